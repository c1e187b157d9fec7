"""A cable with a delay for kernels without netem: two TUN devices, and a process that carries each packet over, later.

::

    namespace 0 [cable] ──▶ rate ──▶ delay ──▶ [cable] namespace 1      and the same back

A packet waits until those before it are sent at the rate, then travels for the delay; what would wait longer than
`QUEUE_S` is dropped, as a switch does. Runs until its standard input ends:

    python tests/e2e/delayed_cable.py FIRST_NAMESPACE SECOND_NAMESPACE MBIT_PER_S DELAY_MS
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from pathlib import Path

DEVICE = "cable"  # in each of the namespaces
MTU = 9000  # bytes; jumbo frames, since each packet costs Python some microseconds
QUEUE_S = 0.05
AT_ONCE = 64  # packets that are read before what is due is looked for again
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def enter(namespace: str) -> None:
    """From here on, sockets and devices that this thread and its children make belong to that namespace."""
    descriptor = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(descriptor)


def tunnel(namespace: str) -> int:
    """A new device there, and the descriptor by which its packets come and go; it lives as long as that."""
    enter(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        device,
        _TUNSETIFF,
        struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI),
    )
    return device


class Way:
    """One direction. Packets leave in the order in which they came."""

    def __init__(
        self, source: int, target: int, *, bytes_per_s: float, delay_s: float
    ) -> None:
        self.source = source
        self._target = target
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._free_at = 0.0  # when all that came before is sent
        self._travelling: deque[tuple[float, bytes]] = (
            deque()
        )  # (when it arrives, packet)

    @property
    def due(self) -> float:
        return self._travelling[0][0] if self._travelling else float("inf")

    def take_in(self) -> None:
        for _ in range(AT_ONCE):
            try:
                packet = os.read(self.source, MTU)
            except BlockingIOError:
                return
            now = time.monotonic()
            begins = max(now, self._free_at)
            if begins - now > QUEUE_S:
                continue
            self._free_at = begins + len(packet) / self._bytes_per_s
            self._travelling.append((self._free_at + self._delay_s, packet))

    def deliver(self) -> None:
        now = time.monotonic()
        while self.due <= now:
            with contextlib.suppress(
                OSError
            ):  # that end is down: lost, as on any cut cable
                os.write(self._target, self._travelling.popleft()[1])


def carry(ways: tuple[Way, Way], until: int) -> None:
    """Until there is something to read from `until`, its end included."""
    while True:
        left_s = min(way.due for way in ways) - time.monotonic()
        readable, _, _ = select.select(
            [way.source for way in ways] + [until],
            [],
            [],
            None if left_s == float("inf") else max(0.0, left_s),
        )
        if until in readable:
            return
        for way in ways:
            way.deliver()
            if way.source in readable:
                way.take_in()


def main() -> None:
    first, second = (tunnel(namespace) for namespace in sys.argv[1:3])
    bytes_per_s, delay_s = float(sys.argv[3]) * 1e6 / 8, float(sys.argv[4]) / 1e3
    print("laid", flush=True)
    there = Way(first, second, bytes_per_s=bytes_per_s, delay_s=delay_s)
    carry(
        (there, Way(second, first, bytes_per_s=bytes_per_s, delay_s=delay_s)),
        sys.stdin.fileno(),
    )


if __name__ == "__main__":
    main()
