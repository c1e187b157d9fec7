"""Items on the wire: small ones in the envelope, large ones as frames of their own."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import zmq

from rlplace.comm import codec
from rlplace.comm.network import wire


@pytest.mark.parametrize("frame_bytes", [1 << 10, 40_000, 80_000, 1 << 20])
def test_large_pieces_travel_in_frames_and_come_together(frame_bytes: int) -> None:
    item = [np.arange(10_000.0), np.arange(wire.INLINE_BYTES // 8 + 1), "text"]
    marks, frames = wire.enclose(
        [codec.Packer(wire.INLINE_BYTES).pack(each) for each in ("small", item)],
        frame_bytes,
    )
    assert marks[0] == pickle.dumps("small", 5)
    assert all(len(frame) <= frame_bytes for frame in frames)
    assert any(
        np.shares_memory(np.frombuffer(frame, np.uint8), item[0]) for frame in frames
    )
    small, large = wire.disclose(marks, [zmq.Frame(bytes(frame)) for frame in frames])
    assert codec.unpack(small) == "small"
    back = codec.unpack(large)
    np.testing.assert_array_equal(back[0], item[0])
    np.testing.assert_array_equal(back[1], item[1])
    back[0][0] = 5.0
    assert (back[0][0], back[2]) == (5.0, "text")
