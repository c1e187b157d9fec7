"""Two placements side by side: what differs is marked, what one lacks is said."""

from __future__ import annotations

import json

from rlplace.placement.show.text import compare, diff_record, render_diff
from rlplace.placement.show.view import PlanView
from tests.unit.placement.reports import APART, llm, ppo

LEFT, RIGHT = ppo(name="hybrid"), ppo(APART, name="apart", offload=False)


def differing(left: PlanView, right: PlanView) -> dict[str, tuple[str, str]]:
    lines = (
        (f"{chapter}/{line.what}", line)
        for chapter, found in compare(left, right).items()
        for line in found
    )
    return {name: (line.left, line.right) for name, line in lines if line.differs}


def test_a_placement_does_not_differ_from_itself() -> None:
    assert differing(LEFT, LEFT) == {}
    assert render_diff(LEFT, LEFT).startswith("diff: the same placement twice\n")
    assert render_diff(LEFT, ppo(name="more", envs=256)).startswith("diff: the same")


def test_jobs_with_other_components_and_stages_can_be_compared() -> None:
    found = differing(LEFT, llm())
    assert found["placement/critic"] == ("-", "0-7 (8 ranks)")
    assert found["residency/env"] == ("off, full, off", "-")
    assert found["machines/at work in infer 1"] == ("-", "8 (100%)")
    assert found["moves in each iteration/weights, same_accelerator"][0] == "0 bytes"


def test_a_record_is_json_and_says_what_fits() -> None:
    record = diff_record(LEFT, RIGHT)
    assert json.loads(json.dumps(record)) == record
    assert (record["left"], record["right"], record["fits"]) == (
        "hybrid",
        "apart",
        [True, True],
    )
    assert [c["title"] for c in record["chapters"]][:2] == ["machines", "placement"]


def test_long_placements_are_cut() -> None:
    scattered = ",".join(map(str, range(0, 40, 2)))
    wide = ppo(
        {"actor": scattered, "env": "0-3", "rollout": "4-7"},
        nodes=[{"accelerators": 40}],
        envs=160,
    )
    assert max(map(len, render_diff(LEFT, wide).splitlines())) <= 100
