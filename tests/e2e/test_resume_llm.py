"""Language-model runs that go on with the same curve. Through other placements: test_resume_matrix.py.

Not to the bit: how many answers an engine has in flight depends on timing, and a product of matrices rounds by its
batch. What is saved and loaded is equal to the bit: tests/contract/test_state.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.language import INLINE, tiny
from tests.e2e.training import Finished, train

LORA = ("actor.lora_rank=4",)
SEEDED = ("rollout.seed=0", "actor.optimizer.schedule=constant", "algorithm.kl_coef=0")
CURVE = ("actor/reward", "actor/tokens_learned", "actor/entropy", "actor/grad_norm")


def curve(run: Finished) -> list[list[float]]:
    return [[line[name] for name in CURVE] for line in run.metrics()]


@pytest.mark.parametrize("more", [(), LORA], ids=["all weights", "lora"])
def test_a_run_goes_on(more: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    job = (*INLINE, *tiny(model), *SEEDED, *more)
    whole = train("hybrid_grpo_llm", tmp_path / "whole", *job, "runner.total_iterations=4")
    assert whole.code == 0, whole.err
    train("hybrid_grpo_llm", tmp_path / "cut", *job, "runner.total_iterations=2")
    run = train("hybrid_grpo_llm", tmp_path / "cut", *job, "runner.total_iterations=4", "resume=auto")
    assert run.code == 0, run.err
    for numbers, expected in zip(curve(run), curve(whole), strict=True):
        assert numbers == pytest.approx(expected, rel=1e-4)
    assert run.summary()["tokens_learned"] == whole.summary()["tokens_learned"]
