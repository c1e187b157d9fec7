"""The bytes of an event file: checksums by the standard's own vectors, records by an independent reader."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from rlplace.report.tfevents import crc32c, first_record, scalars_record


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


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def events_of(data: bytes) -> list[bytes]:
    """The events of a file, with every checksum verified."""
    found = []
    while data:
        (length,), (length_crc,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
        event, (event_crc,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        assert (length_crc, event_crc) == (masked(data[:8]), masked(event))
        found.append(event)
        data = data[16 + length :]
    return found


def test_a_file_begins_with_its_version() -> None:
    assert events_of(first_record(1.5)) == [b"\x09" + struct.pack("<d", 1.5) + b"\x1a\x0dbrain.Event:2"]


def test_scalars_read_back_as_protocol_buffers(tmp_path: Path) -> None:
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    scalars = {"env/return": 475.25, "time/learn_s": 0.125, "größe": -1.0, "n": math.nan, "big": 1e300, "low": -1e300}
    data = first_record(1.0) + scalars_record(2.0, 300, scalars) + scalars_record(3.0, 0, {})
    first, second, third = (event_pb2.Event.FromString(event) for event in events_of(data))
    assert first.file_version == "brain.Event:2"
    assert (second.wall_time, second.step) == (2.0, 300)
    values = {value.tag: value.simple_value for value in second.summary.value}
    assert math.isnan(values.pop("n"))
    assert values == {
        "env/return": 475.25,
        "time/learn_s": 0.125,
        "größe": -1.0,
        "big": math.inf,
        "low": -math.inf,
    }
    assert (third.step, len(third.summary.value)) == (0, 0)


def test_steps_of_every_size() -> None:
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    steps = [0, 1, 127, 128, 16384, 2**40]
    events = events_of(b"".join(scalars_record(0.0, step, {"a": 1.0}) for step in steps))
    assert [event_pb2.Event.FromString(event).step for event in events] == steps
