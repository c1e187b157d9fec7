"""Another process that calls methods of the channel ends it is sent, and how tests wait for a state of a channel."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
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
    return until(channel, lambda s: (len(s.waiting_producers), len(s.waiting_consumers)) == (puts, gets))


def held_bytes(arena: Arena) -> tuple[int, int]:
    """Memory of segments in use, and of free ones."""
    words, held = arena._words, [0, 0]
    with arena._change():
        for first in (segment // 8 for segment in arena._segments()):
            held[words[first + HOLDER] == FREE] += words[first + SIZE] * words[first + MEMORY]
    return held[0], held[1]


def in_child(work: Callable[..., Any], *arguments: Any) -> int | None:
    """How a forked child ended that did the work."""
    process = FORK.Process(target=work, args=arguments)
    process.start()
    process.join()
    return process.exitcode


class ProcessPeer:
    """A plain process; one call at a time."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._line, remote = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(remote,), daemon=True)
        self._process.start()
        remote.close()
        self._threads = ThreadPoolExecutor(1)

    def call(self, end: Any, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(self._call, end, method, args, kwargs)

    def kill(self) -> None:
        """Idempotent; a call that is under way fails."""
        self._process.kill()
        self._process.join()
        self._threads.shutdown()
        self._line.close()

    def _call(self, *request: Any) -> Any:
        self._line.send(request)
        ok, reply = self._line.recv()
        if ok:
            return reply
        raise reply


def _serve(line: Connection) -> None:
    while True:
        try:
            end, method, args, kwargs = line.recv()
        except EOFError:
            return
        try:
            reply = True, getattr(end, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller asked for it
            reply = False, error
        line.send(reply)
