"""The same samples give the same update for any number of actor ranks, on all of them alike."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest

from tests.lm_ranks import ADAM, LmLearned, LmScenario, run_lm_ranks
from tests.tiny_lm import Kind, tiny_model

RANKS = (1, 2, 4)
# One step on the engine's log-probabilities; several on the trainer's own, with fewer samples in a step than ranks.
RULES: dict[str, tuple[Kind, dict[str, object], dict[str, object]]] = {
    "one step": ("qwen3", {}, {}),
    "several steps": (
        "llama",
        {"tis_cap": 1.5, "epochs": 2, "train_batch": 3, "entropy_coef": 0.01},
        {"zero_stage": 2},
    ),
    "factors": ("qwen3", {}, {"lora_rank": 3, "optimizer": ADAM | {"lr": 1e-2}}),
    "near itself without factors": (
        "qwen3",
        {"kl_coef": 0.1, "train_batch": 5},
        {"lora_rank": 3, "optimizer": ADAM | {"lr": 1e-2}},
    ),
    "factors apart": ("llama", {}, {"lora_rank": 3, "optimizer": ADAM | {"lr": 1e-2}, "sync": {"mode": "lora"}}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "llama"):
        tiny_model(root / kind, kind)
    return root


@functools.cache
def learned(root: Path, name: str, ranks: int) -> list[LmLearned]:
    kind, algorithm, actor = RULES[name]
    reference = {"share_actor": "kl_coef" in algorithm}
    return run_lm_ranks(
        LmScenario(model=root / kind, ranks=ranks, iterations=2, algorithm=algorithm, actor=actor, reference=reference)
    )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("ranks", RANKS[1:])
def test_ranks_make_the_update_of_one(folders: Path, name: str, ranks: int) -> None:
    alone, together = learned(folders, name, 1)[0], learned(folders, name, ranks)[0]
    assert together.pushed.keys() == alone.pushed.keys()
    for weight, expected in alone.pushed.items():
        np.testing.assert_allclose(together.pushed[weight], expected, rtol=1e-4, atol=2e-5, err_msg=weight)
    np.testing.assert_allclose(together.logprobs, alone.logprobs, atol=1e-4)
    for name_of in ("loss", "entropy", "approx_kl", "clipped_low", "grad_norm", "optimizer_steps", "reward"):
        key = f"actor/{name_of}"
        found = [metrics[key].value for metrics in together.metrics]
        assert found == pytest.approx([metrics[key].value for metrics in alone.metrics], rel=1e-3, abs=1e-6), key


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("ranks", RANKS[1:])
def test_all_ranks_have_the_same(folders: Path, name: str, ranks: int) -> None:
    outcomes = learned(folders, name, ranks)
    assert len({outcome.digest for outcome in outcomes}) == 1
    assert all(outcome.logprobs == outcomes[0].logprobs for outcome in outcomes)
    for outcome in outcomes:
        assert all(np.array_equal(outcome.pushed[name], tensor) for name, tensor in outcomes[0].pushed.items())


def test_the_optimizer_may_lie_on_the_host_of_each_rank(folders: Path) -> None:
    scenario = LmScenario(model=folders / "qwen3", ranks=2, iterations=2, actor={"optimizer": ADAM | {"on_host": True}})
    on_host = run_lm_ranks(scenario)[0]
    assert on_host.digest == run_lm_ranks(dataclasses.replace(scenario, actor={}))[0].digest
