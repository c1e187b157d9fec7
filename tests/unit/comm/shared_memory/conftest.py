"""Channels in shared memory for tests of this room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.channel import SharedChannel
from tests.channel_peer import PATIENCE_S


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., SharedChannel]:
    return lambda **fields: SharedChannel.create(
        tmp_path, ChannelSpec(**{"name": "test", "capacity_items": 4, "timeout_s": PATIENCE_S, **fields})
    )
