"""What a run left in its folder, read back."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import yaml

from rlplace.config.read import value_at
from rlplace.config.yaml_text import show
from rlplace.errors import ConfigError
from rlplace.report.sinks import METRICS_FILE, SAMPLES_FILE

CONFIG = "config.yaml"
PLAN = "plan.json"
SUMMARY = "summary.json"
_RECENT = 10  # iterations behind a median
_NUMBER = (int, float)
# Keys that a report cannot do without or would stumble over -> of what kinds they are; NoneType: it may lack them.
_OF_CONFIG = {
    "runner.total_iterations": (int, NoneType),
    "runner.stop_at_return": (*_NUMBER, NoneType),
}
_OF_PLAN = {"config": (str,), "components": (dict,), "schedule.active": (dict,)}
_OF_SUMMARY = {
    **dict.fromkeys(
        ("return_first", "return_last", "eval_first", "eval_last"), (*_NUMBER, NoneType)
    ),
    **dict.fromkeys(("wall_s", "start_s", "train_s", "iterations"), _NUMBER),
    "seconds": (dict,),
    **dict.fromkeys(
        (
            "predicted",
            "memory",
            "utilisation",
            "faults",
            "waits",
            "skipped",
            "machine",
            "versions",
            "before_resume",
        ),
        (dict, NoneType),
    ),
}


class Series(NamedTuple):
    """One metric, in the iterations that have it."""

    iterations: array[float]
    values: array[float]

    @property
    def recent(self) -> float:
        """Return the median of the last values."""
        return statistics.median(self.values[-_RECENT:])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The files of a run; a picture is "" where there is none."""

    folder: Path
    config: str  # YAML
    keys: Mapping[str, str]  # the same by dotted key, each value on one line
    plan: Mapping[str, Any]
    plan_text: str
    plan_picture: str
    timeline: str
    summary: Mapping[str, Any]
    metrics: Mapping[str, Series]
    samples: Sequence[
        Mapping[str, Any]
    ]  # of the first and the last iteration, as samples.jsonl has them

    @property
    def name(self) -> str:
        return str(self.plan["config"])


def read_run(folder: Path, key: str = "RUN") -> RunRecord:
    """Read the folder of a run that is over. Raises ConfigError, of `key`, where it is none or nothing was trained."""
    try:
        config = _text(folder / CONFIG)
        plan = _mapping(folder / PLAN)
        keys = dict(_flat("", _checked(yaml.safe_load(config), CONFIG, _OF_CONFIG)))
        _checked(plan, PLAN, _OF_PLAN)
        pictures = (folder / name for name in ("plan.svg", "timeline.svg", "plan.txt"))
        plan_picture, timeline, plan_text = (
            _text(file) if file.is_file() else "" for file in pictures
        )
    except (OSError, ValueError, yaml.YAMLError) as error:
        runs = sorted(
            file.parent
            for depth in ("*", "*/*")
            for file in folder.glob(f"{depth}/{SUMMARY}")
        )
        why = f"a run has {CONFIG} and {PLAN}: {error}"
        fix = str(runs[-1]) if runs else ""
        raise _wrong(
            key, "not-a-run", "is not the folder of a run", folder, why, fix
        ) from error
    try:
        summary = {
            name: value
            for name, value in _mapping(folder / SUMMARY).items()
            if value is not None
        }
    except (OSError, ValueError) as error:
        why = f"it is under way, or ended before it could write {SUMMARY}: {error}"
        raise _wrong(
            key, "run-without-iterations", "the run has no end", folder, why
        ) from error
    if not summary.get("iterations"):
        why = "it ended before the first iteration was over"
        raise _wrong(
            key,
            "run-without-iterations",
            "nothing was trained in this run",
            folder,
            why,
        )
    steps = "env_steps" if "env_steps" in summary else "answers"
    try:
        _checked(
            summary, SUMMARY, {**_OF_SUMMARY, steps: _NUMBER, f"{steps}_per_s": _NUMBER}
        )
    except ValueError as error:
        raise _wrong(
            key, "not-a-run", "is not what this version writes", folder, str(error)
        ) from error
    return RunRecord(
        folder=folder,
        config=config,
        keys=keys,
        plan=plan,
        plan_text=plan_text,
        plan_picture=plan_picture,
        timeline=timeline,
        summary=summary,
        metrics=_metrics(folder / METRICS_FILE, key),
        samples=_samples(folder / SAMPLES_FILE, key),
    )


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _mapping(file: Path) -> dict[str, Any]:
    found = json.loads(_text(file))
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is no JSON object")
    return found


def _checked(
    found: object, name: str, kinds: Mapping[str, tuple[type, ...]]
) -> Mapping[str, Any]:
    """Return the values of a file. Raises ValueError for those of another kind."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} is no mapping")
    for key, allowed in kinds.items():
        if not isinstance(value := value_at(found, key), allowed):
            raise ValueError(
                f"{name} has {'no ' if value is None else 'an unreadable '}{key}"
            )
    return found


def _metrics(file: Path, key: str) -> dict[str, Series]:
    """Return the metrics by name; none of a run without this sink. What is not finite is left out."""
    found: dict[str, Series] = {}
    for iteration, record in _lines(file, key):
        for name, value in record.items():
            if isinstance(value, int | float):
                series = found.setdefault(name, Series(array("d"), array("d")))
                series.iterations.append(iteration)
                series.values.append(value)
    return found


def _samples(file: Path, key: str) -> list[Mapping[str, Any]]:
    by_iteration: dict[float, list[Mapping[str, Any]]] = {}
    for iteration, record in _lines(file, key):
        by_iteration.setdefault(iteration, []).append(record)
        for between in [*by_iteration][1:-1]:
            del by_iteration[between]
    return [record for records in by_iteration.values() for record in records]


def _lines(file: Path, key: str) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Yield each line of a file with its iteration; none where there is no file."""
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if not math.isfinite(iteration := float(record["iteration"])):
                    raise ValueError("its iteration is no finite number")
            except (ValueError, TypeError, KeyError) as error:
                why = f"line {number} is no JSON object of an iteration: {type(error).__name__}: {error}"
                fix = f"remove line {number}, or the file: the report does without"
                raise _wrong(
                    key,
                    "broken-metrics",
                    "the metrics of the run cannot be read",
                    file,
                    why,
                    fix,
                ) from error
            yield iteration, record


def _flat(key: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inside in value.items():
            yield from _flat(f"{key}.{name}" if key else str(name), inside)
    else:
        yield key, show(value)


def _wrong(
    key: str, code: str, what: str, got: Path, why: str, fix: str = ""
) -> ConfigError:
    return ConfigError.of(
        code, key, what, str(got), why, fix or "the folder that a run names as `files`"
    )
