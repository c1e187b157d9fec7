"""Language-model runs that go on with the same curve. Through other placements: test_resume_matrix.py.

Not to the bit: how many answers an engine has in flight depends on timing, and a product of matrices rounds by its
batch. What is saved and loaded is equal to the bit: tests/contract/test_state.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.workers.roles.prompts import Prompts
from tests.e2e.language import INLINE, tiny
from tests.e2e.training import Finished, train

LORA = ("actor.lora_rank=4",)
SEEDED = ("rollout.seed=0", "actor.optimizer.schedule=constant", "algorithm.kl_coef=0")
CURVE = ("actor/reward", "actor/tokens_learned", "actor/entropy", "actor/grad_norm")


def curve(run: Finished) -> list[list[float]]:
    return [[line[name] for name in CURVE] for line in run.metrics()]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="all weights"),
        # Ranks go on from the state of factors in tests/contract/test_state.py.
        pytest.param(LORA, id="lora", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on(more: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    job = (*INLINE, *tiny(model), *SEEDED, *more)
    whole = train(
        "hybrid_grpo_llm", tmp_path / "whole", *job, "runner.total_iterations=4"
    )
    assert whole.code == 0, whole.err
    train("hybrid_grpo_llm", tmp_path / "cut", *job, "runner.total_iterations=2")
    run = train(
        "hybrid_grpo_llm",
        tmp_path / "cut",
        *job,
        "runner.total_iterations=4",
        "resume=auto",
    )
    assert run.code == 0, run.err
    for numbers, expected in zip(curve(run), curve(whole), strict=True):
        assert numbers == pytest.approx(expected, rel=1e-4)
    assert run.summary()["tokens_learned"] == whole.summary()["tokens_learned"]


def test_prompts_that_short_rounds_have_left_are_asked_after_a_resume(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    episodes = Prompts.episodes

    def recorded(prompts: Prompts, number: int, samples: int) -> object:
        if samples > 1:  # else it is looked at only
            asked.append(number)
        return episodes(prompts, number, samples)

    job = (*INLINE, *tiny(model), "algorithm.short_rounds=2", "algorithm.name=grpo")
    first = train("hybrid_grpo_llm", tmp_path, *job, "runner.total_iterations=2")
    assert first.code == 0, first.err
    (file,) = tmp_path.glob("*/*/checkpoints/000002/env/tails_*.json")
    left = json.loads(file.read_text(encoding="utf-8"))["instead"]
    monkeypatch.setattr(Prompts, "episodes", recorded)
    run = train(
        "hybrid_grpo_llm", tmp_path, *job, "runner.total_iterations=4", "resume=auto"
    )
    assert run.code == 0, run.err
    assert sorted(left, key=int) == ["8", "9", "10", "11"]  # of the round that waits
    third = [number for number in asked if number in left.values()]
    assert sorted(third) == sorted(left.values())
    assert [line["env/prompts_left"] for line in run.metrics()] == [2, 2, 0, 2]
