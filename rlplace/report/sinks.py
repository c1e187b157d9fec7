"""Write the metrics of an iteration, at once and whole: to the console, files, and what `report.trackers` knows."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rlplace.envs.registry import needs
from rlplace.errors import OutputError
from rlplace.report.trackers import Samples, Sink, TrackerSink

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
LINES_PER_HEADER = 40


class Column(NamedTuple):
    """One metric on the console."""

    head: str
    metric: str
    form: str  # of `format`; the longest expected value fits `width`
    width: int


class Console(NamedTuple):
    """What the console shows of a kind of run."""

    steps: str  # what env steps are called
    columns: tuple[Column, ...]

    def fitting(self, width: int) -> tuple[Column, ...]:
        """Return the columns that there is room for; those that the live block shows too go first."""
        shown = self.columns
        for metric in _DROPPED:
            if _FIRST + sum(column.width for column in shown) > width:
                shown = tuple(column for column in shown if column.metric != metric)
        return shown


_FIRST = 5 + 12  # width of the columns that are always there: iteration, and steps
_DROPPED = (
    "time/sync_s",
    "time/moves_s",
    "time/overhead_share",
    "actor/mismatch",
    "time/infer_s",
    "time/learn_s",
    "time/rollout_s",
    "actor/length_learned",
    "env/episodes",
    "eval/reward",
    "actor/kl_reference",
)

_STAGES = (
    Column("rollout s", "time/rollout_s", ".2f", 10),
    Column("learn s", "time/learn_s", ".2f", 8),
    Column("sync s", "time/sync_s", ".2f", 7),
    Column("moves s", "time/moves_s", ".2f", 8),
    Column("overhead", "time/overhead_share", ".0%", 9),
)
_SIMULATED = (
    Column("return", "env/mean_return", ",.1f", 10),
    Column(
        "episodes", "env/episodes", ",.0f", 9
    ),  # ended in this iteration: without any there is no new return
    Column("steps/s", "env/steps_per_s", ",.0f", 9),
)
_TEXT = (
    Column("reward", "actor/reward", ".3f", 8),
    Column("held out", "eval/reward", ".3f", 9),
    Column("tokens", "actor/length_learned", ",.1f", 8),  # of an answer, on average
    Column("tokens/s", "rollout/tokens_per_s", ",.0f", 9),
    Column(
        "mismatch", "actor/mismatch", ".1e", 9
    ),  # of engine and trainer, in log-probabilities
)
_SCORED = (
    Column("kl", "actor/kl_reference", ",.2f", 8),  # of a sample, from the reference
    Column("infer s", "time/infer_s", ".2f", 8),
)
RUN_CONSOLE = Console("env steps", (*_SIMULATED, *_STAGES))
TEXT_CONSOLE = Console("answers", (*_TEXT, *_STAGES))
SCORED_CONSOLE = Console("answers", (*_TEXT, *_SCORED, *_STAGES))


def is_terminal(stream: TextIO) -> bool:
    """Whether what is written is shown by a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in (
        "dumb",
        "unknown",
    )


class ConsoleSink:
    """Writes an aligned line per iteration, of the columns that a terminal has room for; a pipe has 80 or $COLUMNS.

    The heading comes again every LINES_PER_HEADER lines, bold on a terminal, and when other columns fit.
    """

    def __init__(self, stream: TextIO, console: Console = RUN_CONSOLE) -> None:
        self._stream = stream
        self._console = console
        self._columns: tuple[Column, ...] = ()
        self._lines = 0

    def __call__(
        self, iteration: int, env_steps: int, metrics: Mapping[str, float]
    ) -> None:
        columns = self._console.fitting(shutil.get_terminal_size().columns)
        if self._lines % LINES_PER_HEADER == 0 or columns != self._columns:
            self._columns = columns
            self._lines = 0
            heading = f" iter{self._console.steps:>12}" + "".join(
                f"{head:>{width}}" for head, _, _, width in columns
            )
            self._stream.write(
                f"\x1b[1m{heading}\x1b[0m\n"
                if is_terminal(self._stream)
                else f"{heading}\n"
            )
        self._lines += 1
        values = (
            (metrics.get(metric), form, width) for _, metric, form, width in columns
        )
        cells = (
            ("-" if value is None else format(value, form)).rjust(width)
            for value, form, width in values
        )
        self._stream.write(f"{iteration:>5,}{env_steps:>12,}{''.join(cells)}\n")
        self._stream.flush()


class WholeAppends:
    """A file that grows by whole pieces: an append is in it completely or not at all. Owns the file descriptor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
        except OSError as error:
            raise OutputError.of(path, error) from error

    def append(self, piece: bytes) -> None:
        """Raises OutputError, with the file as it was before; also where it is no longer at its path."""
        try:
            if not self._is_there():
                raise FileNotFoundError(
                    errno.ENOENT, "it was removed or moved while the run wrote to it"
                )
            before = os.fstat(self._fd).st_size
            try:
                done = os.write(self._fd, piece)  # all of it, as a rule
                while (
                    done < len(piece)
                ):  # a disk that fills up takes a part and names its error on the next call
                    done += os.write(self._fd, piece[done:])
            except OSError:
                if os.fstat(self._fd).st_size > before:
                    os.ftruncate(self._fd, before)
                raise
        except OSError as error:
            raise OutputError.of(self._path, error) from error

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def cut(self, size: int) -> None:
        """Drop what follows the first `size` bytes. Raises OutputError."""
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise OutputError.of(self._path, error) from error

    def close(self) -> None:
        os.close(self._fd)


class JsonSink:
    """Appends JSON objects: one per iteration, and one per sample to a file that is made with the first of them."""

    def __init__(self, folder: Path, append_to: Callable[[Path], WholeAppends]) -> None:
        self._metrics = append_to(folder / METRICS_FILE)
        self._samples = functools.cache(lambda: append_to(folder / SAMPLES_FILE))

    def __call__(
        self, iteration: int, env_steps: int, metrics: Mapping[str, float]
    ) -> None:
        """A number that JSON cannot hold (nan, inf) is null."""
        finite = {
            name: value if math.isfinite(value) else None
            for name, value in sorted(metrics.items())
        }
        line = json.dumps(
            {"iteration": iteration, "env_steps": env_steps, **finite}, allow_nan=False
        )
        self._metrics.append(line.encode() + b"\n")

    def samples(self, iteration: int, samples: Samples) -> None:
        lines = (
            json.dumps({"iteration": iteration, **sample}, ensure_ascii=False) + "\n"
            for sample in samples
        )
        self._samples().append("".join(lines).encode())


def _append_event(
    file: WholeAppends, iteration: int, env_steps: int, metrics: Mapping[str, float]
) -> None:
    """Append one TensorBoard record; its horizontal axis is env steps."""
    values = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
    file.append(tensorboard_record(step=env_steps, summary={"value": values}))


def tensorboard_record(**event: object) -> bytes:
    """Return one record of an event file, by TensorBoard's own library: the others import torch."""
    with needs(
        "tensorboard", got="tensorboard", extra="run", key="runner.sinks", of="the sink"
    ):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
    record = io.BytesIO()
    RecordWriter(record).write(
        Event(wall_time=time.time(), **event).SerializeToString()
    )
    return record.getvalue()


def metric_files(directory: Path) -> dict[str, int]:
    """Return the size of each file that grows by iterations below a run's folder, by its path there."""
    files = [
        directory / METRICS_FILE,
        directory / SAMPLES_FILE,
        *sorted((directory / TENSORBOARD_FOLDER).glob("events.*")),
    ]
    return {
        str(file.relative_to(directory)): file.stat().st_size
        for file in files
        if file.is_file()
    }


@contextlib.contextmanager
def open_sinks(
    names: Collection[str],
    directory: Path,
    console: Console = RUN_CONSOLE,
    sizes: Mapping[str, int] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Iterator[list[Sink]]:
    """Open the sinks of `names`, as `runner.sinks` has them, with files in `directory`, and close them.

    `config`: of the run, for trackers.
    `sizes`: what `metric_files` returned at a checkpoint; what was written since is dropped, for it is done again.
    Raises OutputError when a file cannot be made, ConfigError where the library of a sink is not installed.
    """
    note = f"        ({METRICS_FILE} has every iteration)" if "jsonl" in names else ""
    with contextlib.ExitStack() as opened:

        def append_to(path: Path) -> WholeAppends:
            return opened.enter_context(contextlib.closing(WholeAppends(path)))

        for name, size in metric_files(directory).items() if sizes is not None else ():
            append_to(directory / name).cut(min(size, (sizes or {}).get(name, 0)))

        sinks: list[Sink] = []
        for name in names:
            if name == "console":
                sinks.append(ConsoleSink(sys.stdout, console))
            elif name == "jsonl":
                sinks.append(JsonSink(directory, append_to))
            elif name != "tensorboard":
                sinks.append(
                    opened.enter_context(
                        TrackerSink(name, directory, config or {}, note)
                    )
                )
            else:
                events = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
                begun = [
                    known
                    for known in sizes or ()
                    if known.startswith(TENSORBOARD_FOLDER)
                ]  # one curve, one file
                file = append_to(
                    directory
                    / (begun[-1] if begun else f"{TENSORBOARD_FOLDER}/{events}")
                )
                if not begun:
                    file.append(tensorboard_record(file_version="brain.Event:2"))
                sinks.append(functools.partial(_append_event, file))
        yield sinks
