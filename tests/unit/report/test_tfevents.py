"""The bytes of an event file: checksums by the standard's own vectors, records by an independent reader."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

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
