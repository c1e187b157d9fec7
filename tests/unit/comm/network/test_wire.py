"""Items on the wire: small ones in the envelope, large ones as frames of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zmq

from rlplace.comm import codec
from rlplace.comm.network import wire


def sent(item: Any, frame_bytes: int = 1 << 30) -> Any:
    """The item after a journey in frames."""
    marks, frames = wire.enclose([codec.Packer(wire.INLINE_BYTES).pack(item)], frame_bytes)
    assert all(len(frame) <= frame_bytes for frame in frames)
    (packed,) = wire.disclose(marks, [zmq.Frame(bytes(frame)) for frame in frames])
    return codec.unpack(packed)


def test_small_items_take_no_frame_and_large_ones_are_not_copied() -> None:
    large = np.arange(wire.INLINE_BYTES)
    items = ["small", {"rows": large, "more": large[1:]}, np.zeros(3), large.T]
    marks, frames = wire.enclose([codec.Packer(wire.INLINE_BYTES).pack(item) for item in items], 1 << 30)
    assert [isinstance(mark, bytes) for mark in marks] == [True, False, True, False]
    assert sum(len(mark) for mark in marks if isinstance(mark, tuple)) == len(frames) == 5
    assert any(np.shares_memory(np.frombuffer(frame, np.uint8), large) for frame in frames)
    back = [codec.unpack(p) for p in wire.disclose(marks, [zmq.Frame(bytes(frame)) for frame in frames])]
    assert back[0] == "small"
    np.testing.assert_array_equal(back[1]["rows"], large)
    np.testing.assert_array_equal(back[3], large)


@pytest.mark.parametrize("frame_bytes", [1 << 10, 40_000, 80_000, 1 << 20])
def test_large_pieces_travel_in_frames_and_come_together(frame_bytes: int) -> None:
    item = [np.arange(10_000.0), np.arange(wire.INLINE_BYTES // 8 + 1), "text"]
    back = sent(item, frame_bytes)
    np.testing.assert_array_equal(back[0], item[0])
    np.testing.assert_array_equal(back[1], item[1])
    back[0][0] = 5.0
    assert (back[0][0], back[2]) == (5.0, "text")
