"""Profiles of a run whose work changes: the latest iterations, and older points that grow with the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from rlplace.foresight.drift import carried
from rlplace.foresight.observe import Observations
from rlplace.foresight.profile import ACCELERATOR, Curve, Point, Profile
from rlplace.report.calls import IterationCalls
from rlplace.stopwatch import Part
from tests.unit.foresight.test_observe import WARM, called, job


def point(size: float, seconds: float, blocked_s: float = 0.0) -> Point:
    return Point(
        size=size, laps=10, cpu_s=seconds, least_cpu_s=seconds, blocked_s=blocked_s
    )


def profile(
    counts: Mapping[str, float] | None = None, **costs: Sequence[Point]
) -> Profile:
    curves = {name: Curve(points=tuple(points)) for name, points in costs.items()}
    return Profile(
        machine={"cores": 2},
        versions={},
        subjects={},
        costs=curves,
        counts=counts or {},
    )


def seconds(found: Profile, name: str) -> dict[float, float]:
    return {p.size: p.cpu_s + p.blocked_s for p in found.costs[name].points}


def test_points_of_other_sizes_grow_with_the_work() -> None:
    first = carried(None, profile(play=[point(0.5, 0.6)]))
    second = carried(first, profile(play=[point(0.25, 0.3)]))
    # Nothing in common: nothing is known about a change of the work
    assert seconds(second, "play") == {0.25: 0.3, 0.5: 0.6}
    third = carried(second, profile(play=[point(0.25, 0.2, blocked_s=0.25)]))
    assert seconds(third, "play") == pytest.approx({0.25: 0.45, 0.5: 0.9})
    # Equal measurements change nothing more
    again = carried(third, profile(play=[point(0.25, 0.45)]))
    assert seconds(again, "play") == pytest.approx({0.25: 0.45, 0.5: 0.9})


def test_costs_that_the_present_placement_does_not_have_are_kept() -> None:
    known = profile({"turns": 0.5, "steps": 3.0}, move=[point(0.0, 0.1)])
    found = carried(known, profile({"steps": 4.0}, play=[point(0.5, 0.6)]))
    assert seconds(found, "move") == {0.0: 0.1}
    assert found.counts == {"turns": 0.5, "steps": 4.0}


def test_a_cost_of_another_device_replaces_all_its_points() -> None:
    curve = Curve(points=(point(0.5, 0.1),), on=ACCELERATOR)
    recent = Profile(machine={}, versions={}, subjects={}, costs={"play": curve})
    known = profile(play=[point(0.5, 0.6), point(1.0, 1.2)])
    assert carried(known, recent).costs["play"] == curve


def observations(sizes: Sequence[float], laps_s: Sequence[float]) -> Observations:
    """Return the observations of iterations with a lap of env.run each, after those that do not count."""
    made = job()
    found = Observations(made.config, made.plan)
    warm = [(sizes[0], 9.0)] * WARM
    for index, (size, lap_s) in enumerate([*warm, *zip(sizes, laps_s, strict=True)]):
        part = Part("sim", size, 1, lap_s, lap_s, lap_s, 0.0)
        call = called(made, "env", "run", part, cpu_s=1.0, total_s=1.0, process=7)
        found.add(
            IterationCalls(index, 0.0, 0.1, 1.0, [], [call]),
            {"time/iteration_s": lap_s},
        )
    return found


def test_the_latest_iterations_alone_count() -> None:
    found = observations([8.0] * 6, [0.1, 0.1, 0.1, 0.1, 0.3, 0.3])
    assert seconds(found.profile(), "env.run/sim") == {8.0: 0.1}
    assert seconds(found.profile(2), "env.run/sim") == {8.0: 0.3}
    assert found.series("time/iteration_s") == (0.1, 0.1, 0.1, 0.1, 0.3, 0.3)


def test_sizes_that_the_latest_iterations_did_not_have_do_not_count() -> None:
    found = observations([8.0, 8.0, 8.0, 16.0, 16.0], [0.1, 0.1, 0.1, 0.4, 0.4])
    assert seconds(found.profile(), "env.run/sim") == {8.0: 0.1, 16.0: 0.4}
    assert seconds(found.profile(2), "env.run/sim") == {16.0: 0.4}
