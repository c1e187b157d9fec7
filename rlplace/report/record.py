"""Reads the files that a run has written into its folder."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import yaml

from rlplace.codes import config_error
from rlplace.config.found import value_at
from rlplace.config.yaml_text import show, values_of
from rlplace.errors import ConfigError
from rlplace.json_text import parsed, parsed_object
from rlplace.report.sinks import METRICS_FILE, SAMPLES_FILE
from rlplace.report.summary import steps_name

CONFIG = "config.yaml"
PLAN = "plan.json"
SUMMARY = "summary.json"
_RECENT = 10  # iterations behind a median
_NUMBER = (int, float)
# Keys that a report needs or would stumble over -> their types. NoneType: it may be missing.
_OF_CONFIG = {
    "runner.total_iterations": (int, NoneType),
    "runner.stop_at_return": (*_NUMBER, NoneType),
}
_OF_PLAN = {"config": (str,), "components": (dict,), "schedule.active": (dict,)}
_SCORES = ("return_first", "return_last", "eval_first", "eval_last")
_COUNTS = ("wall_s", "start_s", "train_s", "iterations")
_CHAPTERS = (
    "predicted",
    "memory",
    "utilisation",
    "faults",
    "waits",
    "skipped",
    "machine",
    "versions",
    "before_resume",
)
_OF_SUMMARY = {
    **dict.fromkeys(_SCORES, (*_NUMBER, NoneType)),
    **dict.fromkeys(_COUNTS, _NUMBER),
    "seconds": (dict,),
    "changes": (list, NoneType),
    **dict.fromkeys(_CHAPTERS, (dict, NoneType)),
}


class Series(NamedTuple):
    """The values of one metric. `iterations`: for each value, the index of its iteration."""

    iterations: array[float]
    values: array[float]

    @property
    def recent(self) -> float:
        """Return the median of the last `_RECENT` values."""
        return statistics.median(self.values[-_RECENT:])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The content of the files in a run's folder. If a text or picture has no file, its field is empty.

    `config`: the config as YAML. `keys`: dotted key of the config -> its value, on one line.
    `plan`: content of plan.json. `plan_text`: the plan as text. `plan_picture`, `timeline`: SVG documents.
    `summary`: content of summary.json. `metrics`: name of the metric -> its values.
    `samples`: the recorded samples of the first and the last iteration, as in samples.jsonl.
    """

    folder: Path
    config: str
    keys: Mapping[str, str]
    plan: Mapping[str, Any]
    plan_text: str
    plan_picture: str
    timeline: str
    summary: Mapping[str, Any]
    metrics: Mapping[str, Series]
    samples: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        return str(self.plan["config"])


def read_run(folder: Path, key: str = "RUN") -> RunRecord:
    """Return the record of a run that has ended, read from its folder.

    `key`: name of the argument or config key that gave the folder, for errors. Raises ConfigError if `folder` is not
    the folder of a run, or if the run has no finished iteration.
    """
    try:
        config = _text(folder / CONFIG)
        plan = _mapping(folder / PLAN)
        values = _checked(values_of(config), CONFIG, _OF_CONFIG)
        keys = dict(_flat("", values))
        _checked(plan, PLAN, _OF_PLAN)
        # The page does without those that are missing.
        plan_picture = _text_if_there(folder / "plan.svg")
        timeline = _text_if_there(folder / "timeline.svg")
        plan_text = _text_if_there(folder / "plan.txt")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _not_a_run(folder, key, error) from error
    return RunRecord(
        folder=folder,
        config=config,
        keys=keys,
        plan=plan,
        plan_text=plan_text,
        plan_picture=plan_picture,
        timeline=timeline,
        summary=_summary(folder, key),
        metrics=_metrics(folder / METRICS_FILE, key),
        samples=_samples(folder / SAMPLES_FILE, key),
    )


def read_config(folder: Path, key: str = "RUN") -> Mapping[str, Any]:
    """Return the config of a run, read from its folder. The run may be under way.

    `key`: name of the argument that gave the folder, for errors. Raises ConfigError if `folder` is not the folder of a
    run.
    """
    try:
        _checked(_mapping(folder / PLAN), PLAN, _OF_PLAN)
        return _checked(values_of(_text(folder / CONFIG)), CONFIG, {"cluster": (dict,)})
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _not_a_run(folder, key, error) from error


def read_rows(folder: Path, key: str = "RUN") -> list[dict[str, Any]]:
    """Return the metrics of each iteration of a run, in order: name -> value; an empty list if none is written.

    `key`: name of the argument that gave the folder, for errors. Raises ConfigError if a line cannot be read.
    """
    file = folder / METRICS_FILE
    return [dict(record) for _, record in _lines(file, key)]


def _not_a_run(folder: Path, key: str, error: Exception) -> ConfigError:
    """Return the error for a folder that is not that of a run. It names the newest run below the folder, if any.

    `key`: name of the argument or config key that gave the folder. `error`: why the folder is not that of a run.
    """
    run = _newest_run_below(folder)
    # The name of a config, beside the folder that has its runs
    if run is None and not folder.is_absolute():
        run = _newest_run_below(Path("runs") / folder)
    cause: object = error
    if isinstance(error, OSError):
        cause = f"{error.filename}: {error.strerror}"
    name = "folder"
    if run is not None:
        name = "folder-above"
    return config_error(
        "not-a-run",
        key,
        str(folder),
        error=name,
        config=CONFIG,
        plan=PLAN,
        cause=cause,
        run=run,
    )


def _newest_run_below(folder: Path) -> Path | None:
    """Return the folder of the newest run, by name, among the folders one or two levels below `folder`.

    Return None if there are no runs.
    """
    runs: list[Path] = []
    for depth in ("*", "*/*"):
        runs += (file.parent for file in folder.glob(f"{depth}/{SUMMARY}"))
    return max(runs, default=None)


def _summary(folder: Path, key: str) -> dict[str, Any]:
    """Return the content of summary.json in a run's folder, without null values.

    `key`: name of the argument or config key that gave the folder, for errors. Raises ConfigError if the file is
    missing or broken, or if the run has no finished iteration.
    """
    try:
        found = _mapping(folder / SUMMARY)
    except (OSError, ValueError) as error:
        raise config_error(
            "run-without-iterations",
            key,
            str(folder),
            error="no-summary",
            summary=SUMMARY,
            cause=error,
        ) from error
    summary = {name: value for name, value in found.items() if value is not None}
    if not summary.get("iterations"):
        raise config_error(
            "run-without-iterations", key, str(folder), error="no-iteration"
        )

    steps = steps_name(summary)
    kinds = {**_OF_SUMMARY, steps: _NUMBER, f"{steps}_per_s": _NUMBER}
    try:
        _checked(summary, SUMMARY, kinds)
    except ValueError as error:
        raise config_error(
            "not-a-run", key, str(folder), error="summary", cause=error
        ) from error
    return summary


def _text_if_there(file: Path) -> str:
    if file.is_file():
        return _text(file)
    return ""


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _mapping(file: Path) -> dict[str, Any]:
    try:
        return parsed_object(_text(file))
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error


def _checked(
    found: object, name: str, kinds: Mapping[str, tuple[type, ...]]
) -> Mapping[str, Any]:
    """Return `found` unchanged if it is a mapping and its values have the right types.

    `name`: name of the file, for errors. `kinds`: dotted key -> allowed types of its value. Raises ValueError if a type
    is wrong.
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} is no mapping")
    for key, allowed in kinds.items():
        value = value_at(found, key)
        if isinstance(value, allowed):
            continue
        if value is None:
            raise ValueError(f"{name} has no {key}")
        raise ValueError(f"{name} has an unreadable {key}")
    return found


def _metrics(file: Path, key: str) -> dict[str, Series]:
    """Return name -> values of each metric in `file`; {} if there is no file. Null values are left out.

    `key`: name of the argument or config key that gave the run's folder, for errors.
    """
    found: dict[str, Series] = {}
    for iteration, record in _lines(file, key):
        for name, value in record.items():
            if isinstance(value, int | float):
                series = found.setdefault(name, Series(array("d"), array("d")))
                series.iterations.append(iteration)
                series.values.append(value)
    return found


def _samples(file: Path, key: str) -> list[Mapping[str, Any]]:
    """Return the samples of the first and the last iteration in `file`.

    `key`: name of the argument or config key that gave the run's folder, for errors.
    """
    by_iteration: dict[float, list[Mapping[str, Any]]] = {}
    for iteration, record in _lines(file, key):
        by_iteration.setdefault(iteration, []).append(record)
        # The file may be large: those between are dropped while it is read.
        for between in [*by_iteration][1:-1]:
            del by_iteration[between]
    return list(itertools.chain.from_iterable(by_iteration.values()))


def _lines(file: Path, key: str) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Yield (iteration, JSON object) for each line of `file`. If there is no file, yield nothing.

    `key`: name of the argument or config key that gave the run's folder, for errors. Raises ConfigError if a line
    cannot be read.
    """
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = parsed(line)
                iteration = float(record["iteration"])
                if not math.isfinite(iteration):
                    raise ValueError("its iteration is no finite number")
            except (ValueError, TypeError, KeyError) as error:
                raise config_error(
                    "broken-metrics",
                    key,
                    str(file),
                    line=number,
                    cause=f"{type(error).__name__}: {error}",
                ) from error
            yield iteration, record


def _flat(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as text on one line) for each value inside a nested mapping.

    `key`: the dotted key of `value` itself; "" for the outermost mapping.
    """
    if not isinstance(value, Mapping) or not value:
        yield key, show(value)
        return
    for name, inside in value.items():
        dotted = str(name)
        if key:
            dotted = f"{key}.{name}"
        yield from _flat(dotted, inside)
