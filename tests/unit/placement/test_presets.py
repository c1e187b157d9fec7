"""Named placements expand to plain text."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.placement import Topology
from tests.unit.placement.placing import only_problem, place

RLHF = ("actor", "critic", "reference", "reward", "rollout")


def expand(
    preset: str,
    cluster: int = 8,
    components: tuple[str, ...] | None = None,
    **sizes: Any,
) -> object:
    return place(
        {"preset": preset, **sizes}, Topology.uniform(1, cluster), components=components
    ).canonical()


def test_presets_of_a_ppo_job() -> None:
    assert expand("hybrid") == {"actor": "0-7", "env": "0-3", "rollout": "4-7"}
    assert expand("hybrid", env=2) == {"actor": "0-7", "env": "0-1", "rollout": "2-7"}
    assert expand("hybrid", 16, accelerators=8, actor=6) == {
        "actor": "0-5",
        "env": "0-3",
        "rollout": "4-7",
    }
    assert expand("colocate_all") == dict.fromkeys(("actor", "env", "rollout"), "0-7")
    assert expand("colocate_all", accelerators=4) == dict.fromkeys(
        ("actor", "env", "rollout"), "0-3"
    )
    assert expand("disaggregated", actor=4) == {
        "actor": "0-3",
        "env": "4-5",
        "rollout": "6-7",
    }


def test_presets_of_an_rlhf_job() -> None:
    sizes = {"actor": 16, "critic": 16, "rollout": 16}
    for name in (
        "colocate_actor_ref+critic_reward",
        "colocate_critic_reward + colocate_actor_ref",
    ):
        assert expand(name, 48, RLHF, **sizes) == {
            "actor": "0-15",
            "reference": "0-15",
            "critic": "16-31",
            "reward": "16-31",
            "rollout": "32-47",
        }
    assert expand(
        "colocate_actor_ref", 48, (*RLHF, "reward.style"), actor=16, rollout=16
    ) == {
        "actor": "0-15",
        "reference": "0-15",
        "critic": "16-20",
        "reward": "21-25",
        "reward.style": "26-30",
        "rollout": "31-46",
    }
    together = expand(
        "colocate_critic_reward", 8, ("actor", "rollout", "reward.a", "critic")
    )
    assert together == {
        "actor": "0-1",
        "reward.a": "2-3",
        "critic": "2-3",
        "rollout": "4-5",
    }


@pytest.mark.parametrize(
    ("block", "code", "fix"),
    [
        ({"preset": "hybird"}, "unknown-preset", "preset: hybrid"),
        (
            {"preset": "colocate_actor_ref+critic_rewrd"},
            "unknown-preset",
            "preset: colocate_actor_ref+critic_reward",
        ),
        ({"preset": 3}, "unknown-preset", "preset: <one of these>"),
        ({"preset": ["hybrid"]}, "unknown-preset", "preset: <one of these>"),
        ({"preset": "hybrid", "actr": 3}, "unknown-key", "actor: 3"),
        ({"preset": "hybrid", "actor": "0-7"}, "bad-count", "actor: 8"),
        ({"preset": "hybrid", "env": "0-3"}, "bad-count", "env: <a number>"),
        ({"preset": "hybrid", "accelerators": 9}, "preset-sizes", "accelerators: 8"),
        ({"preset": "hybrid", "actor": 9}, "preset-sizes", "actor: 8"),
        ({"preset": "hybrid", "env": 8}, "preset-sizes", "env: 4"),
        (
            {"preset": "disaggregated", "actor": 4, "env": 4, "rollout": 4},
            "preset-sizes",
            "actor: 2\nenv: 2\nrollout: 2",
        ),
        ({"preset": "colocate_all", "actor": 4, "env": 8}, "preset-sizes", "actor: 8"),
    ],
)
def test_what_no_preset_can_do(block: dict[str, object], code: str, fix: str) -> None:
    problem = only_problem(block)
    assert (problem.code, problem.fix) == (code, fix)
    with_fix = {**block, **_read(fix)}
    with_fix.pop("actr", None)
    if "<" not in fix:
        place(with_fix)


def _read(fix: str) -> dict[str, object]:
    pairs = (line.split(": ") for line in fix.splitlines())
    return {key: int(value) if value.isdecimal() else value for key, value in pairs}
