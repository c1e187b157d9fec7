"""Write the metrics of an iteration: a line on the console, a line of JSON, a TensorBoard record.

A sink writes at once and completely: what a file holds is whole iterations, also after a full disk or a kill.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TextIO

from rlplace.errors import OutputError
from rlplace.report.tfevents import first_record, scalars_record

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
LINES_PER_HEADER = 40


class Sink(Protocol):
    """Takes one iteration at a time. `env_steps` counts env steps or answers since the start of the run."""

    def write(self, iteration: int, env_steps: int, metrics: Mapping[str, float]) -> None:
        """Write one iteration. Raises OutputError if a file cannot take it whole; the file is then unchanged."""
        ...

    def close(self) -> None:
        """Idempotent; never raises for what was already written."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One metric on the console."""

    head: str
    metric: str
    form: str  # of `format`; the longest expected value fits `width`
    width: int

    def cell(self, metrics: Mapping[str, float]) -> str:
        value = metrics.get(self.metric)
        return ("-" if value is None else format(value, self.form)).rjust(self.width)


@dataclasses.dataclass(frozen=True, slots=True)
class Console:
    """What the console shows of a kind of run."""

    steps: str  # what env steps are called
    columns: tuple[Column, ...]


_STAGES = (
    Column("rollout s", "time/rollout_s", ".2f", 10),
    Column("learn s", "time/learn_s", ".2f", 8),
    Column("sync s", "time/sync_s", ".2f", 7),
    Column("moves s", "time/moves_s", ".2f", 8),
    Column("overhead", "time/overhead_share", ".0%", 9),
)
_SIMULATED = (
    Column("return", "env/mean_return", ",.1f", 10),
    Column("episodes", "env/episodes", ",.0f", 10),  # ended in this iteration: 0 explains a return that stands still
    Column("steps/s", "env/steps_per_s", ",.0f", 9),
)
_TEXT = (
    Column("reward", "actor/reward", ".3f", 8),
    Column("held out", "eval/reward", ".3f", 9),
    Column("tokens", "actor/length_learned", ",.1f", 8),  # of an answer, on average
    Column("tokens/s", "rollout/tokens_per_s", ",.0f", 9),
)
_SCORED = (
    Column("kl", "actor/kl_reference", ",.2f", 8),  # of a sample, from the reference
    Column("infer s", "time/infer_s", ".2f", 8),
)
RUN_CONSOLE = Console("env steps", (*_SIMULATED, *_STAGES))
TEXT_CONSOLE = Console("answers", (*_TEXT, *_STAGES))
SCORED_CONSOLE = Console("answers", (*_TEXT, *_SCORED, *_STAGES))


class ConsoleSink:
    """One aligned line per iteration; the heading again every LINES_PER_HEADER lines, bold on a terminal."""

    def __init__(self, stream: TextIO | None = None, console: Console = RUN_CONSOLE) -> None:
        self._console = console
        self._stream = sys.stdout if stream is None else stream
        self._lines = 0

    def write(self, iteration: int, env_steps: int, metrics: Mapping[str, float]) -> None:
        columns = self._console.columns
        if self._lines % LINES_PER_HEADER == 0:
            heads = "".join(column.head.rjust(column.width) for column in columns)
            heading = f" iter{self._console.steps:>13}{heads}"
            self._stream.write(f"\x1b[1m{heading}\x1b[0m\n" if self._stream.isatty() else f"{heading}\n")
        self._lines += 1
        cells = "".join(column.cell(metrics) for column in columns)
        self._stream.write(f"{iteration:>5,}{env_steps:>13,}{cells}\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class WholeAppends:
    """A file that grows by whole pieces: an append is in it completely or not at all. Owns the file descriptor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OutputError.of(path, error) from error

    def append(self, piece: bytes) -> None:
        """Raises OutputError, with the file as it was before."""
        assert self._fd is not None, f"{self._path} is closed"
        try:
            before = os.fstat(self._fd).st_size
            try:
                done = os.write(self._fd, piece)  # all of it, as a rule
                while done < len(piece):  # a disk that fills up takes a part and names its error on the next call
                    done += os.write(self._fd, piece[done:])
            except OSError:
                if os.fstat(self._fd).st_size > before:
                    os.ftruncate(self._fd, before)
                raise
        except OSError as error:
            raise OutputError.of(self._path, error) from error

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class JsonlSink:
    """One JSON object per iteration. A number that JSON cannot hold (nan, inf) is null."""

    def __init__(self, path: Path) -> None:
        self._file = WholeAppends(path)

    def write(self, iteration: int, env_steps: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
        line = json.dumps({"iteration": iteration, "env_steps": env_steps, **finite}, allow_nan=False)
        self._file.append(line.encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """An event file for `tensorboard --logdir`; the horizontal axis is env steps."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = WholeAppends(folder / f"events.out.tfevents.{int(clock())}.{socket.gethostname()}.{os.getpid()}")
        self._file.append(first_record(clock()))

    def write(self, iteration: int, env_steps: int, metrics: Mapping[str, float]) -> None:
        self._file.append(scalars_record(self._clock(), env_steps, metrics))

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def open_sinks(names: Iterable[str], directory: Path, console: Console = RUN_CONSOLE) -> Iterator[list[Sink]]:
    """Open the sinks of `names` ("console", "jsonl", "tensorboard"), with files in `directory`, and close all of them.

    Raises OutputError when a file cannot be made.
    """
    makers: Mapping[str, Callable[[], Sink]] = {
        "console": lambda: ConsoleSink(console=console),
        "jsonl": lambda: JsonlSink(directory / METRICS_FILE),
        "tensorboard": lambda: TensorBoardSink(directory / TENSORBOARD_FOLDER),
    }
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(contextlib.closing(makers[name]())) for name in names]
