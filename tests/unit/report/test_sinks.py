"""Sinks write whole iterations or none, and say so when the disk is full."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.errors import OutputError, RlplaceError
from rlplace.report.sinks import LINES_PER_HEADER, ConsoleSink, JsonlSink, TensorBoardSink, WholeAppends, open_sinks

NUMBERS = {
    "env/mean_return": 471.25,
    "env/episodes": 17.0,
    "env/steps_per_s": 12345.6,
    "time/rollout_s": 1.234,
    "time/learn_s": 0.5,
    "time/sync_s": 0.01,
    "time/moves_s": 0.002,
    "time/overhead_share": 0.123,
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


SMALL_DISK_BYTES = 4096


@contextlib.contextmanager
def small_disk() -> Iterator[None]:
    """A limit for every file of this process: beyond it a write is cut short and the next one fails, as on a full disk.

    No fixture: the report of a test goes to a file, too, and must not meet the limit.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISK_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_the_console_shows_one_aligned_line_per_iteration() -> None:
    out = io.StringIO()
    sink = ConsoleSink(out)
    sink.write(1, 4096, NUMBERS)
    sink.write(1000, 4_096_000, NUMBERS | {"env/mean_return": -1234.5})
    assert out.getvalue().splitlines() == [
        " iter    env steps    return  episodes  steps/s rollout s learn s sync s moves s overhead",
        "    1        4,096     471.2        17   12,346      1.23    0.50   0.01    0.00      12%",
        "1,000    4,096,000  -1,234.5        17   12,346      1.23    0.50   0.01    0.00      12%",
    ]


def test_the_console_marks_what_is_not_known_and_repeats_its_heading() -> None:
    out = io.StringIO()
    sink = ConsoleSink(out)
    for i in range(LINES_PER_HEADER + 1):
        sink.write(i, 64, {"env/mean_return": float("nan")})
    lines = out.getvalue().splitlines()
    assert lines[1].split() == ["0", "64", "nan", "-", "-", "-", "-", "-", "-", "-"]
    assert [i for i, line in enumerate(lines) if "env steps" in line] == [0, LINES_PER_HEADER + 1]


def test_only_a_terminal_gets_escapes() -> None:
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        ConsoleSink(out).write(1, 1, NUMBERS)
    assert terminal.getvalue().startswith("\x1b[1m iter")
    assert terminal.getvalue().splitlines()[0].endswith("\x1b[0m")
    assert "\x1b" not in file.getvalue()


def test_json_has_one_object_per_iteration(tmp_path: Path) -> None:
    file = tmp_path / "new" / "metrics.jsonl"
    sink = JsonlSink(file)
    sink.write(1, 64, {"b": 2.5, "a": 1.0})
    assert file.read_text() == '{"iteration": 1, "env_steps": 64, "a": 1.0, "b": 2.5}\n'
    sink.write(2, 128, {"a": float("nan"), "b": float("-inf")})
    sink.close()
    sink.close()
    assert json.loads(file.read_text().splitlines()[1]) == {"iteration": 2, "env_steps": 128, "a": None, "b": None}


def test_a_full_disk_leaves_whole_lines_and_is_said(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    sink = JsonlSink(file)
    with small_disk(), pytest.raises(OutputError) as caught:  # noqa: PT012  which write fails depends on its length
        for i in range(1000):
            sink.write(i, i, NUMBERS)
    sink.close()
    lines = file.read_text().splitlines()
    assert 0 < file.stat().st_size <= SMALL_DISK_BYTES
    assert [json.loads(line)["iteration"] for line in lines] == list(range(len(lines)))
    assert caught.value.problem.got == str(file)


def test_a_device_that_is_full_is_named_so() -> None:
    file = WholeAppends(Path("/dev/full"))
    with pytest.raises(RlplaceError) as caught:
        file.append(b"x")
    file.close()
    assert isinstance(caught.value, OutputError)
    assert caught.value.code == "disk-full"
    assert "bytes are free" in str(caught.value)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OutputError, match="cannot-write"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")


def test_tensorboard_files_are_whole_after_every_write(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, clock=lambda: 1234.0)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("events.out.tfevents.1234.")
    sizes = [file.stat().st_size]
    for i in range(2):
        sink.write(i, 64 * i, NUMBERS)
        sizes.append(file.stat().st_size)
    sink.close()
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    assert file.read_bytes()[sizes[0] : sizes[1]].count(b"env/mean_return") == 1


def test_sinks_are_made_in_order_and_write_to_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_sinks(["tensorboard", "jsonl", "console"], tmp_path) as sinks:
        assert [type(sink).__name__ for sink in sinks] == ["TensorBoardSink", "JsonlSink", "ConsoleSink"]
        for sink in sinks:
            sink.write(1, 64, NUMBERS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]
    assert "471.2" in capsys.readouterr().out


def test_a_sink_that_cannot_be_made_closes_those_before_it(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("not a folder")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OutputError), open_sinks(["jsonl", "tensorboard"], tmp_path):
        pass
    assert len(os.listdir("/proc/self/fd")) == len(before)
