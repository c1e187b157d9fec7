"""Predicted turns of runs that share accelerators."""

from __future__ import annotations

import pytest

from rlplace.execution.arbiter import Share
from rlplace.foresight.turns import RunSeconds, StageSeconds, predict_turns


def run(
    name: str, *stages: tuple[str, set[int], float], weight: float = 1.0
) -> RunSeconds:
    return RunSeconds(
        name=name,
        stages=[
            StageSeconds(stage=stage, accelerators=frozenset(places), seconds=seconds)
            for stage, places, seconds in stages
        ],
        share=Share(weight=weight),
    )


def test_complementary_stages_do_twice_the_work() -> None:
    stages = (("rollout", {0}, 1.0), ("learn", {1}, 1.0))
    found = predict_turns([run("a", *stages), run("b", *stages)])
    assert found.gain == pytest.approx(2.0, rel=0.02)
    # Both take as long as alone, once they are out of step
    assert found.seconds["a"] == pytest.approx(2.0, rel=0.02)


def test_the_same_accelerators_all_the_time_bring_nothing() -> None:
    stages = (("rollout", {0, 1}, 1.0), ("learn", {0, 1}, 0.5))
    found = predict_turns([run("a", *stages), run("b", *stages)])
    assert found.gain == pytest.approx(1.0, rel=0.02)
    assert found.seconds["b"] == pytest.approx(3.0, rel=0.05)


def test_a_stage_that_is_twice_as_long_as_the_other_limits_both() -> None:
    stages = (("rollout", {0}, 2.0), ("learn", {1}, 1.0))
    found = predict_turns([run("a", *stages), run("b", *stages)])
    # The accelerator of rollout is always busy: an iteration of each takes two rollouts
    assert found.seconds["a"] == pytest.approx(4.0, rel=0.03)
    assert found.gain == pytest.approx(1.5, rel=0.03)


def test_a_weight_shows_in_the_seconds() -> None:
    stages = (("work", {0}, 1.0),)
    found = predict_turns([run("a", *stages, weight=3.0), run("b", *stages)])
    assert found.seconds["a"] == pytest.approx(4 / 3, rel=0.05)
    assert found.seconds["b"] == pytest.approx(4.0, rel=0.05)
