"""Scalars as TensorBoard's event records, so that the driver needs neither TensorFlow nor a library that imports torch.

A record is `length, crc(length), event, crc(event)`; an event is a protocol buffer of two or three fields. Both formats
are fixed: see `tensorflow/core/lib/io/record_writer.h` and `tensorflow/core/util/event.proto`.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping

_CASTAGNOLI = 0x82F63B78  # the CRC-32C polynomial, bits reversed
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers


def first_record(wall_time: float) -> bytes:
    """The record every event file begins with."""
    return _record(_field(1, _FIXED64, struct.pack("<d", wall_time)) + _field(3, _BYTES, b"brain.Event:2"))


def scalars_record(wall_time: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """One record with the value of every name at `step` (not negative)."""
    event = _field(1, _FIXED64, struct.pack("<d", wall_time)) + _field(2, _VARINT, _varint(step))
    # ctypes makes numbers beyond float32 infinite; struct refuses them.
    numbers = ((name.encode(), bytes(ctypes.c_float(value))) for name, value in scalars.items())
    pairs = (_field(1, _BYTES, name) + _field(2, _FIXED32, number) for name, number in numbers)
    return _record(event + _field(5, _BYTES, b"".join(_field(1, _BYTES, pair) for pair in pairs)))


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum of RFC 3720."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _shifted((crc ^ byte) & 0xFF) ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@functools.cache
def _shifted(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (_CASTAGNOLI if byte & 1 else 0)
    return byte


def _record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _masked_crc(length) + event + _masked_crc(event)


def _masked_crc(data: bytes) -> bytes:
    """A checksum of data that may itself hold checksums is rotated and shifted, as the record format asks."""
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _field(number: int, wire_type: int, payload: bytes) -> bytes:
    length = _varint(len(payload)) if wire_type == _BYTES else b""
    return _varint(number << 3 | wire_type) + length + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
