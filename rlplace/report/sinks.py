"""Sinks for the metrics of a run: the console, files, and the trackers and user's sinks of `report.trackers`.

Each sink takes an iteration as a whole, as soon as it has ended.
"""

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rlplace.envs.registry import needs
from rlplace.errors import OutputError
from rlplace.report.trackers import Samples, Sink, TrackerSink

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
LINES_PER_HEADER = 40


# Format of a return, which depends on its size: at most 1 in some environments, thousands in others.
SCORE = "score"


class Column(NamedTuple):
    """A column of the console, which shows one metric.

    `head`: its heading. `form`: format of the value, for `format`, or SCORE. `width`: characters; the longest expected
    value fits.
    """

    head: str
    metric: str
    form: str
    width: int

    def text(self, value: float) -> str:
        """Return a value of the metric as text, without padding."""
        if self.form == SCORE:
            return score_text(value)
        return format(value, self.form)


def score_text(value: float) -> str:
    """Return a return as text: three decimals below 10, else one."""
    if abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:,.1f}"


class Console(NamedTuple):
    """The columns that the console shows for one kind of run.

    `steps`: heading of the column of env steps; "" for a job in which a step is an iteration.
    """

    steps: str
    columns: tuple[Column, ...]

    def fitting(self, width: int) -> tuple[Column, ...]:
        """Return the columns that fit into `width` characters.

        If there is not enough room, columns are left out in the order of `_DROPPED`.
        """
        shown = self.columns
        for metric in _DROPPED:
            needed = _ITERATION + sum(column.width for column in shown)
            if self.steps:
                needed += _STEPS
            if needed > width:
                shown = tuple(column for column in shown if column.metric != metric)
        return shown


# Widths of the first columns
_ITERATION = 5
_STEPS = 12
# Columns that a narrow terminal does without, the first one first: seconds before learning.
_DROPPED = (
    "time/sync_s",
    "time/moves_s",
    "time/overhead_share",
    "env/episodes",
    "time/infer_s",
    "time/learn_s",
    "time/rollout_s",
    "rollout/tokens_per_s",
    "env/steps_per_s",
    "actor/grad_norm",
    "actor/entropy",
    "actor/mismatch",
    "actor/clip_fraction",
    "actor/kl_reference",
    "actor/kl_teacher_token",
    "actor/truncated_share",
    "actor/approx_kl",
    "actor/length_learned",
    "env/episode_length",
    "eval/reward",
    "actor/explained_variance",
)

_STAGES = (
    Column("rollout s", "time/rollout_s", ".2f", 10),
    Column("learn s", "time/learn_s", ".2f", 8),
    Column("sync s", "time/sync_s", ".2f", 7),
    Column("moves s", "time/moves_s", ".2f", 8),
    Column("overhead", "time/overhead_share", ".0%", 9),
)
_UPDATE = (
    Column("entropy", "actor/entropy", ",.2f", 8),
    Column("grad norm", "actor/grad_norm", ".3g", 10),
)
# What the updates of a simulator's policy did, and the speed.
_SIMULATED = (
    # Steps of an episode, on average.
    Column("length", "env/episode_length", ",.0f", 8),
    # Explained variance of the values: 1 is best, 0 is that of a constant.
    Column("explained", "actor/explained_variance", ".2f", 10),
    Column("kl", "actor/approx_kl", ".4f", 8),
    Column("clipped", "actor/clip_fraction", ".0%", 8),
    *_UPDATE,
    Column("steps/s", "env/steps_per_s", ",.0f", 9),
    # Episodes that ended in this iteration: without any there is no new return.
    Column("episodes", "env/episodes", ",.0f", 9),
)
_TEXT = (
    Column("reward", "actor/reward", ".3f", 8),
    Column("held out", "eval/reward", ".3f", 9),
    # Tokens of an answer, on average.
    Column("tokens", "actor/length_learned", ",.1f", 8),
    # Share of answers that a token limit cut off.
    Column("truncated", "actor/truncated_share", ".0%", 10),
    # Difference of engine and trainer, in log-probabilities.
    Column("mismatch", "actor/mismatch", ".1e", 9),
)
_TEXT_SPEED = Column("tokens/s", "rollout/tokens_per_s", ",.0f", 9)
# KL of a sample, from the reference.
_KL_REFERENCE = Column("kl ref", "actor/kl_reference", ",.2f", 8)
# Reverse KL of a token, from the actor to the teacher.
_KL_TEACHER = Column("kl teacher", "actor/kl_teacher_token", ".3f", 11)
_INFER = Column("infer s", "time/infer_s", ".2f", 8)
_RETURN = Column("return", "env/mean_return", SCORE, 10)
_EVALUATED = Column("evaluated", "eval/return", SCORE, 10)
RUN_CONSOLE = Console("env steps", (_RETURN, *_SIMULATED, *_STAGES))
EVALUATED_CONSOLE = Console("env steps", (_RETURN, _EVALUATED, *_SIMULATED, *_STAGES))
TEXT_CONSOLE = Console("answers", (*_TEXT, *_UPDATE, _TEXT_SPEED, *_STAGES))
SCORED_CONSOLE = Console(
    "answers", (*_TEXT, _KL_REFERENCE, *_UPDATE, _TEXT_SPEED, _INFER, *_STAGES)
)
TAUGHT_CONSOLE = Console(
    "answers", (*_TEXT, _KL_TEACHER, *_UPDATE, _TEXT_SPEED, _INFER, *_STAGES)
)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal on which the cursor can be moved."""
    kind = os.environ.get("TERM", "").lower()
    return stream.isatty() and kind not in ("dumb", "unknown")


class ConsoleSink:
    """Writes one line for each iteration to the console, with as many columns as fit.

    The width is that of the terminal; in a pipe, it is $COLUMNS or 80 characters. The heading is repeated after
    LINES_PER_HEADER lines, and when the columns change. On a terminal, the heading is bold.
    """

    def __init__(self, stream: TextIO, console: Console = RUN_CONSOLE) -> None:
        self._stream = stream
        self._console = console
        self._columns: tuple[Column, ...] = ()
        self._lines = 0

    def __call__(
        self, iteration: int, env_steps: int, metrics: Mapping[str, float]
    ) -> None:
        """Write the line of an iteration, and a heading above it if necessary.

        `iteration`: counted from 1. `env_steps`: number of env steps or answers since the run began. `metrics`: name ->
        value.
        """
        columns = self._console.fitting(shutil.get_terminal_size().columns)
        if self._lines % LINES_PER_HEADER == 0 or columns != self._columns:
            self._columns = columns
            self._lines = 0
            self._write_heading()
        self._lines += 1
        line = f"{iteration:>{_ITERATION},}"
        if self._console.steps:
            line += f"{env_steps:>{_STEPS},}"
        for column in columns:
            cell = "-"
            if column.metric in metrics:
                cell = column.text(metrics[column.metric])
            line += cell.rjust(column.width)
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def _write_heading(self) -> None:
        heading = "iter".rjust(_ITERATION)
        if self._console.steps:
            heading += self._console.steps.rjust(_STEPS)
        for column in self._columns:
            heading += column.head.rjust(column.width)
        if is_terminal(self._stream):
            # Bold
            heading = f"\x1b[1m{heading}\x1b[0m"
        self._stream.write(f"{heading}\n")


class WholeAppends:
    """A file to which pieces are appended, each completely or not at all. It owns the file descriptor."""

    def __init__(self, path: Path) -> None:
        """Open the file `path` for appending. Create it and its folder if they do not exist. Raises OutputError."""
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise OutputError.of(path, error) from error

    def append(self, piece: bytes) -> None:
        """Append a piece to the file, completely or not at all.

        Raises OutputError if the piece cannot be written completely, or if the file was removed or moved.
        """
        try:
            if not self._is_there():
                why = "it was removed or moved while the run wrote to it"
                raise FileNotFoundError(errno.ENOENT, why)
            before = os.fstat(self._fd).st_size
            try:
                # One write takes all of it, as a rule. A disk that fills up takes a part,
                # and the next write says why.
                done = os.write(self._fd, piece)
                while done < len(piece):
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
        """Shorten the file to its first `size` bytes. Raises OutputError."""
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise OutputError.of(self._path, error) from error

    def close(self) -> None:
        os.close(self._fd)


class JsonSink:
    """Appends a JSON object to metrics.jsonl for each iteration, and one to samples.jsonl for each sample.

    samples.jsonl is created with the first sample.
    """

    def __init__(
        self,
        folder: Path,
        append_to: Callable[[Path], WholeAppends],
        with_steps: bool = True,
    ) -> None:
        """Open the file of metrics.

        `folder`: the run's folder. `append_to`: opens a file for appending. `with_steps`: whether lines have the number
        of env steps; False for a job in which a step is an iteration.
        """
        self._with_steps = with_steps
        self._metrics = append_to(folder / METRICS_FILE)
        self._samples = functools.cache(lambda: append_to(folder / SAMPLES_FILE))

    def __call__(
        self, iteration: int, env_steps: int, metrics: Mapping[str, float]
    ) -> None:
        """Append a line with the number of the iteration, the number of steps, and the metrics.

        `env_steps`: number of env steps or answers since the run began. A metric that is not finite becomes null.
        """
        record: dict[str, float | None] = {"iteration": iteration}
        if self._with_steps:
            record["env_steps"] = env_steps
        for name, value in sorted(metrics.items()):
            record[name] = value
            if not math.isfinite(value):
                record[name] = None
        line = json.dumps(record, allow_nan=False)
        self._metrics.append(line.encode() + b"\n")

    def samples(self, iteration: int, samples: Samples) -> None:
        """Append the samples of an iteration, each on a line of its own."""
        lines = ""
        for sample in samples:
            record = {"iteration": iteration, **sample}
            lines += json.dumps(record, ensure_ascii=False) + "\n"
        self._samples().append(lines.encode())


def _append_event(
    file: WholeAppends, iteration: int, env_steps: int, metrics: Mapping[str, float]
) -> None:
    """Append the metrics of an iteration to TensorBoard's file.

    `env_steps`: number of env steps or answers since the run began, the horizontal axis in TensorBoard.
    """
    values = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
    file.append(tensorboard_record(step=env_steps, summary={"value": values}))


def tensorboard_record(**event: object) -> bytes:
    """Return one record of a TensorBoard event file, as bytes. `event`: the fields of the event.

    The library tensorboard makes the record, because other libraries for it import torch. Raises ConfigError if
    tensorboard is not installed.
    """
    with needs(
        "tensorboard", got="tensorboard", extra="run", key="runner.sinks", of="the sink"
    ):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
    record = io.BytesIO()
    made = Event(wall_time=time.time(), **event)
    RecordWriter(record).write(made.SerializeToString())
    return record.getvalue()


def metric_files(directory: Path) -> dict[str, int]:
    """Return path -> size in bytes, for the files of a run that grow with each iteration.

    `directory`: the run's folder; paths are relative to it.
    """
    files = [directory / METRICS_FILE, directory / SAMPLES_FILE]
    files += sorted((directory / TENSORBOARD_FOLDER).glob("events.*"))
    sizes = {}
    for file in files:
        if file.is_file():
            sizes[str(file.relative_to(directory))] = file.stat().st_size
    return sizes


@contextlib.contextmanager
def open_sinks(
    names: Collection[str],
    directory: Path,
    console: Console = RUN_CONSOLE,
    sizes: Mapping[str, int] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Iterator[list[Sink]]:
    """Yield the sinks (receivers of metrics) with these names; close them when the `with` statement ends.

    `names`: the values of `runner.sinks`. `directory`: folder for the files of the sinks. `console`: the columns of the
    console. `config`: the run's config, for trackers. `sizes`: None for a new run; for a run that continues from a
    checkpoint, the result of `metric_files` at the checkpoint. Files are then shortened to these sizes, because the run
    repeats the later iterations. Raises OutputError if a file cannot be made, and ConfigError if the library of a sink
    is not installed.
    """
    # A job without a name for its steps counts iterations alone.
    with_steps = bool(console.steps)
    note = ""
    if "jsonl" in names:
        note = f"        ({METRICS_FILE} has every iteration)"
    with contextlib.ExitStack() as opened:

        def append_to(path: Path) -> WholeAppends:
            return opened.enter_context(contextlib.closing(WholeAppends(path)))

        # A file without a size at the checkpoint was made later: it becomes empty.
        if sizes is not None:
            for name, size in metric_files(directory).items():
                append_to(directory / name).cut(min(size, sizes.get(name, 0)))

        sinks: list[Sink] = []
        for name in names:
            if name == "console":
                sinks.append(ConsoleSink(sys.stdout, console))
            elif name == "jsonl":
                sinks.append(JsonSink(directory, append_to, with_steps))
            elif name == "tensorboard":
                events = _events_file(directory, append_to, sizes or {})
                sinks.append(functools.partial(_append_event, events))
            else:
                tracker = TrackerSink(
                    name, directory, config or {}, note, with_steps=with_steps
                )
                sinks.append(opened.enter_context(tracker))
        yield sinks


def _events_file(
    directory: Path,
    append_to: Callable[[Path], WholeAppends],
    known: Iterable[str],
) -> WholeAppends:
    """Return TensorBoard's file, open for appending: a new file, or for a run that continues, its last file.

    With its last file, a run stays one curve in TensorBoard. `directory`: the run's folder. `append_to`: opens a file
    for appending. `known`: paths of the files at the checkpoint from which the run continues.
    """
    begun = [name for name in known if name.startswith(TENSORBOARD_FOLDER)]
    if begun:
        return append_to(directory / begun[-1])
    host = socket.gethostname()
    name = f"events.out.tfevents.{int(time.time())}.{host}.{os.getpid()}"
    file = append_to(directory / TENSORBOARD_FOLDER / name)
    file.append(tensorboard_record(file_version="brain.Event:2"))
    return file
