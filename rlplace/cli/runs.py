"""`python -m rlplace.runs [FOLDER]`: print one line for each run in a folder, the oldest run first.

Exit codes: 0 printed, 2 wrong usage or no run in the folder.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.checkpoints.store import LOCK, in_use
from rlplace.codes import config_error
from rlplace.commands import DONE, answered, typed
from rlplace.config.options import Meaning, OptionParser, of_other_programs
from rlplace.json_text import parsed
from rlplace.report.record import CONFIG, SUMMARY
from rlplace.report.sinks import METRICS_FILE
from rlplace.report.summary import is_custom
from rlplace.report.typed import commands
from rlplace.tables import table

FORMATS = ("text", "json")
# Metrics with the score of an iteration, in shipped jobs: mean of the last 100 episodes, or of the iteration's answers
_SCORES: tuple[str, ...] = (
    "env/mean_return",
    "actor/reward",
)
_NUMBERS = range(3, 7)  # columns of the table that hold numbers
_DEEPEST = (
    3  # depth of <output_dir>/<config>/<date>, and of sweeps in a folder below runs/
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The state and the results of a run, read from its folder.

    `config`: name of the config. `best`, `last`: the best and the latest return or reward; None: there is no value yet.
    """

    folder: str
    config: str
    state: str  # running, finished, stopped by a signal, failed, or not started (ended before training)
    iterations: int
    best: float | None
    last: float | None
    seconds: float  # time of all commands of the run; while it runs, of its iterations
    # Overrides of the command that started the run, if known
    overrides: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a list of the runs in a folder, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    parser = OptionParser(
        typed("runs"),
        description="Lists runs, the oldest first.",
        reader=lambda words: of_other_programs(words, _meant),
        check=_found,
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="runs", help="of runs (runs)"
    )
    parser.add_argument(
        "--format",
        default=FORMATS[0],
        choices=FORMATS,
        help="text (the default) or json",
    )

    def command() -> int:
        options = parser.parse_args(argv)
        found = _found(options.folder)
        shown = [dataclasses.asdict(run) for run in found]
        print(
            json.dumps(shown, indent=1) if options.format == "json" else render(found)
        )
        return DONE

    return answered(command)


def _meant(name: str, value: str) -> Meaning | None:
    """Return what is meant by an option of another program that selects or orders runs."""
    if name in ("last", "limit", "n", "tail", "max", "latest") and value.isdecimal():
        return Meaning(f"| tail -n {value}", "all runs are listed, the newest last")
    if name in ("sort", "sort_by", "order", "order_by"):
        reason = (
            "runs are listed in the order of their start; --format json has all values"
        )
        return Meaning(f"leave out --{name.replace('_', '-')}", reason)
    if name in ("all", "a"):
        return Meaning(f"leave out --{name}", "all runs are listed")
    return None


def _found(folder: str) -> list[Run]:
    """Return the runs in a folder, the oldest first. Raises ConfigError if there are none."""
    error = "none"
    cause = None
    found: list[Run] = []
    try:
        places = sorted(folders(Path(folder)), key=lambda f: (f.name, f))
        found = [read(place) for place in places]
    except OSError as refused:
        error = "none-read"
        cause = refused.strerror
    if not found:
        raise config_error(
            "not-a-run",
            "FOLDER",
            folder,
            error=error,
            config=CONFIG,
            lock=LOCK,
            cause=cause,
        )
    return found


def folders(place: Path, depth: int = _DEEPEST) -> Iterator[Path]:
    """Yield the folders of runs in `place`. If `place` itself is the folder of a run, yield `place` only.

    `depth`: number of levels below `place` to search. Raises OSError if `place` cannot be read.
    """
    try:
        is_run = (place / CONFIG).is_file() and (place / LOCK).is_file()
        below = [*place.iterdir()] if depth and not is_run and place.is_dir() else []
    except OSError:
        if depth == _DEEPEST:
            raise
        return
    if is_run:
        yield place
    for inside in below:
        # The target of a link is listed at its own place.
        if not inside.is_symlink():
            yield from folders(inside, depth - 1)


def read(folder: Path) -> Run:
    """Return the state and results of a run from the files in its folder. Damaged and missing files count as empty."""
    lines = list(_lines(folder / METRICS_FILE))
    summary = _mapping(_text(folder / SUMMARY))
    # Finished, and not resumed since
    over = (folder / SUMMARY).is_file() and _written(folder / SUMMARY) >= _written(
        folder / LOCK
    )
    names = _SCORES
    if over and summary and is_custom(summary):
        names = (str(summary.get("score", "")),)
    scores = [
        line[name]
        for line in lines
        for name in names
        if isinstance(line.get(name), int | float)
    ]
    scores = [score for score in scores if math.isfinite(score)]
    seconds = (
        _number(summary, "wall_s")
        if over
        else sum(_number(line, "time/iteration_s") for line in lines)
    )
    return Run(
        folder=str(folder),
        config=folder.absolute().parent.name,
        state="running"
        if in_use(folder)
        else _ended(summary)
        if over
        else "failed"
        if lines
        else "not started",
        iterations=int(
            _number(lines[-1], "iteration") if lines else _number(summary, "iterations")
        ),
        best=max(scores, default=None),
        last=scores[-1] if scores else None,
        seconds=seconds,
        overrides=tuple(
            word
            for command in commands(folder)[:1]
            for word in command.get("overrides", ())
        ),
    )


def _ended(summary: Mapping[str, Any]) -> str:
    """Return the final state of a run, such as "finished" or "failed".

    `summary`: content of the run's summary.json. Older versions of rlplace wrote no state into it; such a run counts as
    finished if its summary names a saved policy.
    """
    return str(
        summary.get("state") or ("finished" if summary.get("policy") else "failed")
    )


def _number(record: Mapping[str, Any], key: str) -> float:
    """Return the number under `key` in `record`; 0 if the value is missing, not a number, or not finite."""
    value = record.get(key)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return 0.0


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns


def _text(file: Path) -> str:
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def _lines(file: Path) -> Iterator[Mapping[str, Any]]:
    return (line for line in map(_mapping, _text(file).splitlines()) if line)


def _mapping(text: str) -> Mapping[str, Any]:
    try:
        found = parsed(text)
    except ValueError:  # being written, truncated or damaged
        return {}
    if isinstance(found, dict):
        return found
    return {}


def render(found: Sequence[Run]) -> str:
    """Return the runs as a table. Overrides that are equal in all runs of a config are left out."""

    def number(value: float | None) -> str:
        if value is None:
            return "-"
        if abs(value) >= 10:
            return f"{value:,.1f}"
        return f"{value:.3f}"

    rows = [
        (
            "folder",
            "config",
            "state",
            "iterations",
            "best",
            "last",
            "seconds",
            "overrides",
        )
    ]
    for run in found:
        alike = [set(other.overrides) for other in found if other.config == run.config]
        own = shlex.join(
            word for word in run.overrides if any(word not in other for other in alike)
        )
        score = (number(run.best), number(run.last), f"{run.seconds:,.0f}")
        rows.append(
            (run.folder, run.config, run.state, f"{run.iterations:,}", *score, own)
        )
    return "\n".join(table(rows, gap=2, right=_NUMBERS))
