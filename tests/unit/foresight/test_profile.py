"""Profiles: what is read is what was written, merges weigh by laps, curves go through their points."""

from __future__ import annotations

import json

import pytest

from rlplace.errors import ConfigError
from rlplace.foresight.costs import Costs, fit
from rlplace.foresight.profile import ASSUMED, Curve, Point, Profile, read_profile


def point(size: float, cpu_s: float, laps: float = 10.0) -> Point:
    return Point(
        size=size, laps=laps, cpu_s=cpu_s, least_cpu_s=cpu_s / 2, blocked_s=0.0
    )


def profile(**costs: Curve) -> Profile:
    named = {name.replace("__", "."): curve for name, curve in costs.items()}
    return Profile(
        machine={"cores": 2},
        versions={"python": "3.11"},
        subjects={"env": "A"},
        costs=named,
        counts={"n": 2.0},
    )


def test_a_profile_is_read_as_it_was_written() -> None:
    made = profile(
        env__run=Curve(points=(point(1, 0.1), point(4, 0.3)), source=ASSUMED)
    )
    assert read_profile(json.dumps(made.record()), file="p.json") == made


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "is no JSON"),
        ("[]", "is no profile"),
        ('{"rlplace_profile": 99}', "is no profile"),
        ('{"rlplace_profile": 1, "costs": []}', "costs is no mapping"),
        (
            '{"rlplace_profile": 1, "costs": {"a": {"source": "guessed"}}}',
            "costs of a have no known source",
        ),
        (
            '{"rlplace_profile": 1, "costs": {"a": {"points": [{"cpu_s": -1}]}}}',
            "a: cpu_s is no finite number",
        ),
        (
            '{"rlplace_profile": 1, "costs": {"a": {"points": [{"size": 3}]}}}',
            "a point of a is not whole",
        ),
        (
            '{"rlplace_profile": 1, "costs": {"a": {"points": [{"cpu_s": 1, "gpu_s": 2}]}}}',
            "a point of a is not whole",
        ),
        ('{"rlplace_profile": 1, "counts": {"a": NaN}}', "a is no finite number"),
        (
            '{"rlplace_profile": 1, "costs": {"a": {"on": "a moon"}}}',
            "a is on neither of both",
        ),
        (
            '{"rlplace_profile": 1, "costs": {"a": {"points": 5}}}',
            "a is no list",
        ),
        (
            '{"rlplace_profile": 1, "costs": {"a": {"points": [{"cpu_s": 1, "laps": 0}]}}}',
            "a point of a is of no laps",
        ),
    ],
)
def test_what_is_no_profile_is_named(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        read_profile(text, file="p.json")
    assert caught.value.problems[0].code == "not-a-profile"


def test_merged_profiles_have_all_costs_and_weigh_equal_sizes_by_laps() -> None:
    old = profile(
        a=Curve(points=(point(8, 1.0, laps=30),)), b=Curve(points=(point(1, 1.0),))
    )
    new = profile(a=Curve(points=(point(8, 2.0, laps=10), point(16, 3.0))))
    merged = old.merged(new)
    assert [(p.size, p.cpu_s, p.laps) for p in merged.costs["a"].points] == [
        (8.0, 1.25, 40.0),
        (16.0, 3.0, 10.0),
    ]
    assert merged.costs["b"] == old.costs["b"]


def test_a_curve_goes_through_its_points_and_beyond_them_on_their_line() -> None:
    costs = Costs(
        profile(
            **{
                "env.run/sim": Curve(
                    points=(point(10, 1.0), point(20, 2.0), point(40, 3.0))
                )
            }
        )
    )
    at = {size: costs.of("env.run/sim", size).cpu_s for size in (10, 15, 30, 40)}
    assert at == {10: 1.0, 15: 1.5, 30: 2.5, 40: 3.0}
    assert not costs.stretched
    assert costs.of("env.run/sim", 80).cpu_s > 4.0
    assert costs.stretched == {"env.run/sim": 80}


def test_of_a_single_size_the_kind_of_work_says_how_much_of_it_grows() -> None:
    costs = Costs(
        profile(
            **{
                part: Curve(points=(point(10, 1.0),))
                for part in ("env.run/sim", "x/step")
            }
        )
    )
    assert costs.of("env.run/sim", 20).cpu_s == pytest.approx(1.9)
    assert costs.of("x/step", 20).cpu_s == 1.0


def test_sizes_that_differ_by_chance_are_one_point() -> None:
    near = Curve(points=tuple(point(size, size / 100) for size in (100, 105, 110, 119)))
    costs = Costs(profile(minibatch=near))
    assert costs.of("minibatch", 108.5).cpu_s == pytest.approx(1.085)
    assert costs.of("minibatch", 119).cpu_s == pytest.approx(
        1.085 * (1 + 10.5 / 108.5 / 2)
    )


def test_what_was_not_measured_takes_no_time_and_is_told() -> None:
    costs = Costs(
        profile(
            a=Curve(points=(), source=ASSUMED),
            b=Curve(points=(point(0, 1.0),), source=ASSUMED),
        )
    )
    assert (costs.of("a", 3).cpu_s, costs.of("c").cpu_s, costs.of("b").cpu_s) == (
        0.0,
        0.0,
        1.0,
    )
    assert costs.missing == {"a": 3, "c": 0.0}
    assert costs.assumed == {"b"}


def test_costs_that_varied_or_lie_on_no_line_are_told_where_they_matter() -> None:
    steady, wild = (
        Point(size=8, laps=9, cpu_s=0.01, least_cpu_s=0.01, blocked_s=0, spread=s)
        for s in (0.1, 0.6)
    )
    bent = tuple(
        Point(size=n, laps=9, cpu_s=s, least_cpu_s=s, blocked_s=0)
        for n, s in ((8, 0.01), (16, 0.001), (32, 0.04))
    )
    curves = {
        "a.run/steady": (steady,),
        "a.run/wild": (wild,),
        "a.run/bent": bent,
        "a.run/rare": (wild,),
    }
    profile = Profile(
        machine={},
        versions={},
        subjects={},
        costs={n: Curve(points=p) for n, p in curves.items()},
    )
    costs = Costs(profile)
    for name in curves:
        costs.of(name, 8, laps=0.01 if "rare" in name else 1.0)
    assert [told.partition(" by ")[0] for told in costs.noisy] == [
        "a.run/bent",
        "a.run/wild",
    ]


def test_a_fitted_line_never_falls_and_never_begins_below_nothing() -> None:
    assert fit([(1.0, 3.0, 1.0), (2.0, 5.0, 1.0), (3.0, 7.0, 1.0)]) == (
        pytest.approx(1.0),
        pytest.approx(2.0),
    )
    base, slope = fit([(1.0, 5.0, 1.0), (2.0, 4.0, 1.0)])
    assert slope == 0.0
    assert 4.0 < base < 5.0
    assert fit([(1.0, 1.0, 1.0), (2.0, 4.0, 1.0)])[0] == 0.0
