"""Language-model runs that go on with the same curve, in place and through other placements.

Not to the bit: how many answers an engine has in flight depends on timing, and a product of matrices rounds by its
batch. What is saved and loaded is equal to the bit: tests/contract/test_state.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.language import INLINE, PLACEMENTS, tiny
from tests.e2e.training import SMALL, Finished, placed, train

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


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_curve_is_the_same_through_all_placements(model: Path, tmp_path: Path) -> None:
    """With factors: hybrid with two actor ranks, collocated with two, disaggregated with one, hybrid again."""
    job = (*tiny(model), *SEEDED, *LORA, "runner.total_iterations=8")
    whole = train("hybrid_grpo_llm", tmp_path / "whole", *job, *placed(*PLACEMENTS["hybrid_grpo_llm"]))
    assert whole.code == 0, whole.err
    path = ("hybrid_grpo_llm", "collocated_grpo_llm", "disaggregated_grpo_llm", "hybrid_grpo_llm")
    for number, config in enumerate(path, 1):
        words = (*job[:-1], *placed(*PLACEMENTS[config]), f"runner.total_iterations={2 * number}", "resume=auto")
        run = train("hybrid_grpo_llm", tmp_path / "moved", *words)
        assert run.code == 0, run.err
    for numbers, expected in zip(curve(run), curve(whole), strict=True):
        assert numbers == pytest.approx(expected, rel=5e-3, abs=5e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_simulator_policy_keeps_its_curve_through_world_sizes(tmp_path: Path) -> None:
    """8, 4, 2 and 8 actor ranks."""
    steps = ("env.id=CartPole-v1", "runner.stop_at_return=null", "actor.optimizer.schedule=constant")
    job = ("cluster.accelerators_per_node=8", *SMALL[1:], *steps)
    whole = train("hybrid_ppo", tmp_path / "whole", *job, *placed("0-7", "0-3", "4-7"), "runner.total_iterations=8")
    assert whole.code == 0, whole.err
    path = [("0-7", "0-3", "4-7"), ("0-3", "0-3", "0-3"), ("0-1", "2-3", "4-7"), ("0-7", "0-3", "4-7")]
    for number, where in enumerate(path, 1):
        words = (*job, *placed(*where), f"runner.total_iterations={2 * number}", "resume=auto")
        run = train("hybrid_ppo", tmp_path / "moved", *words)
        assert run.code == 0, run.err
    for line, expected in zip(run.metrics(), whole.metrics(), strict=True):
        assert line["env/return"] == pytest.approx(expected["env/return"], rel=2e-2)
        assert line["actor/entropy"] == pytest.approx(expected["actor/entropy"], rel=1e-3)
