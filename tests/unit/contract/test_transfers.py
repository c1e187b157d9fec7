"""Transfers of weights in a stage: a component sends once, and each target says from whom it takes."""

from __future__ import annotations

from rlplace.contract.stages import (
    PULL,
    PUSH,
    Stage,
    Transfer,
    steps_of_stage,
    weights,
)


def calls(*transfers: Transfer) -> list[tuple[str, str, str | None]]:
    (step,) = steps_of_stage(Stage("sync", *transfers), {})
    return [(call.component, call.method, call.source) for call in step.calls]


def test_a_component_sends_once_to_all_its_targets() -> None:
    expected = [
        ("actor", PUSH, None),
        ("rollout", PULL, "actor"),
        ("critic", PULL, "actor"),
    ]
    assert calls(weights("actor", to=["rollout", "critic"])) == expected
    assert (
        calls(weights("actor", to="rollout"), weights("actor", to="critic")) == expected
    )
    twice = [weights("actor", to="rollout")] * 2
    assert calls(*twice) == expected[:2]


def test_a_target_takes_from_each_of_its_sources() -> None:
    assert calls(weights("left", to="league"), weights("right", to="league")) == [
        ("left", PUSH, None),
        ("league", PULL, "left"),
        ("right", PUSH, None),
        ("league", PULL, "right"),
    ]
