"""How tests wait for a state of a channel, and work in a child process."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from rlplace.comm.channel import Channel, ChannelStats
from rlplace.comm.shared_memory.arena import FREE, HOLDER, MEMORY, SIZE, Arena

FORK = multiprocessing.get_context("fork")  # for tests without threads
PATIENCE_S = 60.0  # longer than any step takes on a busy machine; reached only by a broken channel


def until(channel: Channel, holds: Callable[[ChannelStats], bool]) -> ChannelStats:
    deadline = time.monotonic() + PATIENCE_S
    while not holds(stats := channel.stats()):
        assert time.monotonic() < deadline, f"never came true; last seen: {stats}"
    return stats


def waiting(channel: Channel, *, puts: int = 0, gets: int = 0) -> ChannelStats:
    return until(
        channel,
        lambda s: (len(s.waiting_producers), len(s.waiting_consumers)) == (puts, gets),
    )


def held_bytes(arena: Arena) -> tuple[int, int]:
    """Memory of segments in use, and of free ones."""
    words, held = arena._words, [0, 0]
    with arena._change():
        for first in (segment // 8 for segment in arena._segments()):
            held[words[first + HOLDER] == FREE] += (
                words[first + SIZE] * words[first + MEMORY]
            )
    return held[0], held[1]


def in_child(work: Callable[..., Any], *arguments: Any) -> int | None:
    """How a forked child ended that did the work."""
    process = FORK.Process(target=work, args=arguments)
    process.start()
    process.join()
    return process.exitcode
