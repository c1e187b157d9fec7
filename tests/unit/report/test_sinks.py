"""Sinks write whole iterations or none, and say so when the disk is full; event files hold what they should."""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlplace.errors import OutputError
from rlplace.report.sinks import (
    LINES_PER_HEADER,
    ConsoleSink,
    WholeAppends,
    crc32c,
    first_record,
    open_sinks,
    scalars_record,
)

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


def test_the_console_shows_one_aligned_line_per_iteration() -> None:
    out = io.StringIO()
    sink = ConsoleSink(out)
    sink(1, 4096, NUMBERS)
    sink(1000, 4_096_000, NUMBERS | {"env/mean_return": -1234.5})
    assert out.getvalue().splitlines() == [
        " iter    env steps    return  episodes  steps/s rollout s learn s sync s moves s overhead",
        "    1        4,096     471.2        17   12,346      1.23    0.50   0.01    0.00      12%",
        "1,000    4,096,000  -1,234.5        17   12,346      1.23    0.50   0.01    0.00      12%",
    ]


def test_the_console_marks_what_is_not_known_and_repeats_its_heading_in_bold_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for out in (terminal, file):
        sink = ConsoleSink(out)
        for i in range(LINES_PER_HEADER + 1):
            sink(i, 64, {"env/mean_return": float("nan")})
    lines = file.getvalue().splitlines()
    assert lines[1].split() == ["0", "64", "nan", "-", "-", "-", "-", "-", "-", "-"]
    headings = (0, LINES_PER_HEADER + 1)
    assert [f"\x1b[1m{line}\x1b[0m" if i in headings else line for i, line in enumerate(lines)] == (
        terminal.getvalue().splitlines()
    )


def test_files_are_whole_after_every_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    with open_sinks(["tensorboard", "jsonl", "console"], folder) as sinks:
        (events,) = (folder / "tensorboard").iterdir()
        assert events.name.startswith("events.out.tfevents.")
        for metrics in (
            {"env/return": 2.5, "env/episodes": 1.0},
            {"env/episodes": float("nan"), "env/return": float("-inf")},
        ):
            before = events.stat().st_size
            for sink in sinks:
                sink(1, 64, metrics)
            assert events.read_bytes()[before:].count(b"env/return") == 1
    assert (folder / "metrics.jsonl").read_text() == (
        '{"iteration": 1, "env_steps": 64, "env/episodes": 1.0, "env/return": 2.5}\n'
        '{"iteration": 1, "env_steps": 64, "env/episodes": null, "env/return": null}\n'
    )
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_device_that_is_full_is_named_so() -> None:
    with contextlib.closing(WholeAppends(Path("/dev/full"))) as file, pytest.raises(OutputError) as caught:
        file.append(b"x")
    assert caught.value.code == "disk-full"


def test_a_sink_that_cannot_be_made_closes_those_before_it(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("not a folder")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OutputError, match="cannot-write"), open_sinks(["jsonl", "tensorboard"], tmp_path):
        pass
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_the_checksum_is_that_of_the_standard(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


def events_of(data: bytes) -> Iterator[Any]:
    """Yield the events of a file, with every checksum verified."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    record_writer = pytest.importorskip("tensorboardX.record_writer")
    while data:
        length, length_crc = struct.unpack("<QI", data[:12])
        event, (event_crc,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        assert (length_crc, event_crc) == (record_writer.masked_crc32c(data[:8]), record_writer.masked_crc32c(event))
        yield event_pb2.Event.FromString(event)
        data = data[16 + length :]


def test_scalars_read_back_as_protocol_buffers() -> None:
    scalars = {"env/return": 475.25, "größe": -1.0, "n": math.nan, "big": 1e300, "low": -1e300}
    steps = [0, 1, 127, 128, 16384, 2**40]
    records = [scalars_record(2.0, 300, scalars), *(scalars_record(0.0, step, {}) for step in steps)]
    first, second, *more = events_of(b"".join([first_record(1.5), *records]))
    assert (first.wall_time, first.file_version) == (1.5, "brain.Event:2")
    assert (second.wall_time, second.step) == (2.0, 300)
    values = {value.tag: value.simple_value for value in second.summary.value}
    assert math.isnan(values.pop("n"))
    assert values == {"env/return": 475.25, "größe": -1.0, "big": math.inf, "low": -math.inf}
    assert [(event.step, len(event.summary.value)) for event in more] == [(step, 0) for step in steps]
