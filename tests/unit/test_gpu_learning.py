"""What the checks of learning on a GPU compare: both loops make the same update, and count alike."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu_learning, gpu_measure
from benchmarks.gpu_learning import Actor, Model, Plain, advantages_of, made_up
from rlplace.algo.advantages import Outcomes, grpo

TINY = Model(size="emulated", groups=2, answers=4)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu_measure, gpu_learning):
        monkeypatch.setattr(module, "ON_CPU", True)
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gpu_learning, "BUDGET", 128)


def test_the_plain_loop_has_the_advantages_of_the_estimator() -> None:
    groups = made_up(TINY, shared=True)
    own = [advantage for group in groups for _, advantage in advantages_of(group)]
    assert own == pytest.approx(grpo(Outcomes.of(groups)).tolist(), abs=1e-4)


def test_prompts_of_a_group_are_shared_or_differ_from_their_first_token_on() -> None:
    for shared in (True, False):
        for group in made_up(TINY, shared=shared):
            assert (len({int(sample.tokens[0]) for sample in group}) == 1) == shared
            assert len({sample.weight for sample in group}) > 1


def test_batches_of_the_plain_loop_fit_the_budget_with_their_padding_and_have_every_sample_once() -> (
    None
):
    samples = [sample for group in made_up(TINY, shared=True) for sample in group]
    batches = list(Plain._batches(samples))
    assert all(len(batch) * max(s.weight for s in batch) <= 128 for batch in batches)
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, samples))


def test_operations_are_six_for_each_weight_and_token_and_those_of_attention() -> None:
    # emulated: 4 layers of 8 heads of 32; of a sequence of n tokens 6 x 4 x 256 x n^2.
    assert TINY.operations([10, 30]) == 6 * TINY.weights * 40 + 6 * 4 * 256 * (
        100 + 900
    )
    frozen = dataclasses.replace(TINY, lora_rank=4)
    assert TINY.operations([8]) - frozen.operations([8]) == 2 * TINY.weights * 8


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_the_actor_makes_the_update_of_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_learning, "COMPUTE", "fp32")
    monkeypatch.setattr(gpu_learning, "DTYPE", torch.float32)
    folder = TINY.written(tmp_path)
    plain = Plain(folder, TINY)
    groups = plain.scored(made_up(TINY, shared=True))
    expected = [plain.step(groups) for _ in range(2)]
    actor = Actor(folder, TINY)
    try:
        found = [actor.step(groups) for _ in range(2)]
    finally:
        actor.close()
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            [own.norm, own.loss], [other.norm, other.loss], rtol=1e-3, atol=1e-6
        )
