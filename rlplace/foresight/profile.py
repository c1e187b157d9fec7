"""A profile: the measured seconds of each part of the work, as JSON, from which later commands predict::

    {"rlplace_profile": 1, "machine": {...}, "versions": {...}, "subjects": {"env": "Hopper-v5", ...},
     "costs": {"env.run/sim": {"source": "measured here", "points": [{"size": 8, "laps": 4096, "cpu_s": 2.1e-4, ...}]}},
     "counts": {"actor.learn/steps_share": 0.8}}

The name of a cost has the component, its method and the part of the call: `env.run/sim` is one vector step of a rank,
and its size is the number of simulators in the step. Docs: docs/foresight.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rlplace.codes import config_error
from rlplace.json_text import parsed

VERSION_KEY = "rlplace_profile"
VERSION = 1
MEASURED = "measured here"
ELSEWHERE = "measured elsewhere"
ASSUMED = "assumed"
SOURCES = (MEASURED, ELSEWHERE, ASSUMED)
PROCESSOR = "processor"
ACCELERATOR = "accelerator"
# Processor name of a profile that was not measured
AS_PUBLISHED = "as published"
COLD = "cold_"  # prefix of parts whose laps came after another thread had used the processor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The measured cost of one lap (one run of a measured part of a call) at one size of work.

    `size`: units of work in the lap: rows, tokens, sequences or bytes; 0 if the work has no size. `laps`: number of
    measured laps. `cpu_s`: mean seconds of a lap on its processor, or on the rank's accelerator. `least_cpu_s`: the
    least seconds of a lap on this device, as the median over iterations. `blocked_s`: further seconds of a lap that
    need no processor. `spread`: relative standard deviation of `cpu_s` over iterations.
    """

    size: float
    laps: float
    cpu_s: float
    least_cpu_s: float
    blocked_s: float
    spread: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """All measured points of one cost, in the order of their sizes.

    `source`: how the cost is known, one of SOURCES. `on`: the device of the seconds, PROCESSOR or ACCELERATOR.
    """

    points: tuple[Point, ...]
    source: str = MEASURED
    on: str = PROCESSOR


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of the work of a job, and the machine and library versions with which they were measured.

    `machine`: properties of the machine, such as processor and cores. `versions`: library -> version.
    `subjects`: component -> what it runs, such as a simulator or a model. `costs`: cost name -> its points.
    `counts`: name -> mean over iterations of a number that is not seconds. `samples`: distribution -> draws from it,
    such as lengths of answers. `computed`: what predictions have computed from this profile, by all that it depends on.
    """

    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    subjects: Mapping[str, str]
    costs: Mapping[str, Curve]
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    samples: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    computed: dict[object, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def merged(self, other: Profile) -> Profile:
        """Return a profile with the costs of this profile and of `other`, the newer profile.

        Points of nearly equal size are averaged, weighted by their laps. If a cost has another source or device in
        `other`, the points of `other` replace those of this profile.
        """
        costs = dict(self.costs)
        for name, curve in other.costs.items():
            mine = costs.get(name)
            costs[name] = (
                curve
                if mine is None or (mine.source, mine.on) != (curve.source, curve.on)
                else _merged(mine, curve)
            )
        return Profile(
            machine=other.machine,
            versions=other.versions,
            subjects={**self.subjects, **other.subjects},
            costs=costs,
            counts={**self.counts, **other.counts},
            samples={**self.samples, **other.samples},
        )

    def elsewhere(self) -> Profile:
        """Return a copy of the profile in which measured costs are marked as measured on another machine."""
        costs = {
            name: dataclasses.replace(curve, source=ELSEWHERE)
            if curve.source == MEASURED
            else curve
            for name, curve in self.costs.items()
        }
        return dataclasses.replace(self, costs=costs)

    def record(self) -> dict[str, Any]:
        """Return the profile as plain values for a JSON file."""
        return {
            VERSION_KEY: VERSION,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "subjects": dict(self.subjects),
            "costs": {
                name: {
                    "source": curve.source,
                    "on": curve.on,
                    "points": [dataclasses.asdict(point) for point in curve.points],
                }
                for name, curve in sorted(self.costs.items())
            },
            "counts": dict(sorted(self.counts.items())),
            "samples": {
                name: list(values) for name, values in sorted(self.samples.items())
            },
        }


def _merged(old: Curve, new: Curve) -> Curve:
    points = {point.size: point for point in old.points}
    for point in new.points:
        near = next(
            (size for size in points if math.isclose(size, point.size, rel_tol=0.02)),
            None,
        )
        points[point.size if near is None else near] = (
            point if near is None else mean(points[near], point)
        )
    return Curve(
        points=tuple(sorted(points.values(), key=lambda p: p.size)),
        source=new.source,
        on=new.on,
    )


def mean(a: Point, b: Point) -> Point:
    """Return one point in place of the points `a` and `b`.

    `size` and `cpu_s` are means weighted by laps. `blocked_s` and `least_cpu_s` are the smaller values, `spread` is the
    larger value.
    """
    laps = a.laps + b.laps
    share = a.laps / laps

    def of(name: str) -> float:
        return share * float(getattr(a, name)) + (1.0 - share) * float(getattr(b, name))

    return Point(
        size=of("size"),
        laps=laps,
        cpu_s=of("cpu_s"),
        least_cpu_s=min(a.least_cpu_s, b.least_cpu_s),
        blocked_s=min(a.blocked_s, b.blocked_s),
        spread=max(a.spread, b.spread),
    )


def read_profile(text: str, *, file: str) -> Profile:
    """Return the profile in `text`, which is JSON from `Profile.record`. Raises ConfigError for a wrong entry.

    `file`: name of the file, for errors.
    """
    try:
        record = parsed(text)
    except ValueError as error:
        raise config_error("not-a-profile", file, str(error), error="json") from error
    if not isinstance(record, dict) or record.get(VERSION_KEY) != VERSION:
        got = type(record).__name__
        if isinstance(record, dict):
            got = str(record.get(VERSION_KEY))
        raise config_error(
            "not-a-profile",
            file,
            got,
            error="version",
            version_key=VERSION_KEY,
            version=VERSION,
        )
    costs = {}
    for name, curve in _mapping(record, "costs", file).items():
        source = curve.get("source", MEASURED) if isinstance(curve, dict) else None
        if source not in SOURCES:
            raise config_error(
                "not-a-profile",
                file,
                str(source),
                error="source",
                name=name,
                sources=", ".join(SOURCES),
            )
        on = curve.get("on", PROCESSOR)
        if on not in (PROCESSOR, ACCELERATOR):
            raise config_error(
                "not-a-profile",
                file,
                str(on),
                error="device",
                name=name,
                processor=PROCESSOR,
                accelerator=ACCELERATOR,
            )
        costs[name] = Curve(
            points=_points(name, curve.get("points", ()), file), source=source, on=on
        )
    return Profile(
        machine=_mapping(record, "machine", file),
        versions=_mapping(record, "versions", file),
        subjects=_mapping(record, "subjects", file),
        costs=costs,
        counts={
            name: _number(value, name, file)
            for name, value in _mapping(record, "counts", file).items()
        },
        samples={
            name: tuple(
                _number(value, name, file) for value in _listed(values, name, file)
            )
            for name, values in _mapping(record, "samples", file).items()
        },
    )


def _points(name: str, points: object, file: str) -> tuple[Point, ...]:
    fields = [field.name for field in dataclasses.fields(Point)]
    found = []
    for point in _listed(points, name, file):
        given = point if isinstance(point, dict) else {}
        unknown = [key for key in given if key not in fields]
        if unknown or "cpu_s" not in given:
            raise config_error(
                "not-a-profile",
                file,
                str(point),
                error="fields",
                name=name,
                fields=", ".join(fields),
            )
        values = {
            key: _number(value, f"{name}: {key}", file) for key, value in given.items()
        }
        whole = {
            "size": 0.0,
            "laps": 1.0,
            "least_cpu_s": values["cpu_s"],
            "blocked_s": 0.0,
        } | values
        if not whole["laps"]:
            raise config_error(
                "not-a-profile", file, str(point), error="laps", name=name
            )
        found.append(Point(**whole))
    return tuple(sorted(found, key=lambda point: point.size))


def _listed(values: object, name: str, file: str) -> list[Any]:
    if not isinstance(values, (list, tuple)):
        raise config_error("not-a-profile", file, str(values), error="list", name=name)
    return list(values)


def _mapping(record: Mapping[str, Any], name: str, file: str) -> dict[str, Any]:
    value = record.get(name, {})
    if not isinstance(value, dict):
        raise config_error(
            "not-a-profile", file, type(value).__name__, error="mapping", name=name
        )
    return value


def _number(value: object, name: str, file: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0.0
    ):
        raise config_error("not-a-profile", file, str(value), error="number", name=name)
    return float(value)
