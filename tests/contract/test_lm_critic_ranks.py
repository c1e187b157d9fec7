"""The same samples and returns give the same values and the same critic for any number of ranks."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from tests.critic_ranks import Criticised, CriticScenario, run_critic_ranks
from tests.lm_ranks import ADAM
from tests.tiny_lm import Kind, tiny_model

RULES: dict[str, tuple[Kind, dict[str, object], dict[str, object]]] = {
    "one step": ("qwen3", {}, {}),
    # More ranks than samples in a step; an odd number of ranks, of which only the first has a row of the head.
    "several steps": ("llama", {"epochs": 2, "train_batch": 2, "value_clip": 0.05}, {"zero_stage": 2}),
    "factors": ("qwen3", {}, {"lora_rank": 3, "optimizer": ADAM | {"lr": 1e-2}}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "llama"):
        tiny_model(root / kind, kind)
    return root


@functools.cache
def criticised(root: Path, name: str, ranks: int) -> list[Criticised]:
    kind, algorithm, critic = RULES[name]
    scenario = CriticScenario(model=root / kind, ranks=ranks, iterations=2, algorithm=algorithm, critic=critic)
    return run_critic_ranks(scenario)


@pytest.mark.parametrize(("name", "ranks"), [("one step", 2), ("several steps", 3), ("factors", 2)])
def test_ranks_say_and_learn_what_one_does(folders: Path, name: str, ranks: int) -> None:
    alone, together = criticised(folders, name, 1)[0], criticised(folders, name, ranks)
    assert len({outcome.digest for outcome in together}) == 1
    for values, expected in zip(together[0].values, alone.values, strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-3, rtol=1e-3)
    assert together[0].weights.keys() == alone.weights.keys()
    for weight, expected in alone.weights.items():
        np.testing.assert_allclose(together[0].weights[weight], expected, rtol=1e-4, atol=2e-5, err_msg=weight)
    for name_of in ("value_loss", "clip_share", "grad_norm", "optimizer_steps", "explained_variance", "value", "lr"):
        key = f"critic/{name_of}"
        for outcome in together:
            found = [metrics[key].value for metrics in outcome.metrics]
            assert found == pytest.approx([metrics[key].value for metrics in alone.metrics], rel=1e-3, abs=1e-4), key
