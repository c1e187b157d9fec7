"""How much of a machine's processors others used while something was timed: a number without it says little."""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from pathlib import Path

_EVERY_S = 0.25
_MARK = "RLPLACE_BENCHMARK"
_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # fields of /proc/stat: idle, waiting for a disk


class Alone:
    """Entered while something is timed in processes that it starts, with all that these start."""

    def __enter__(self) -> Alone:
        self._mark = f"{_MARK}={secrets.token_hex(8)}".encode()
        os.environ[_MARK] = self._mark.decode().partition("=")[2]
        self._mine: dict[int, int] = {}  # process -> ticks when last seen
        self._ours: dict[int, bool] = {}
        self._over = threading.Event()
        self.seen: list[
            tuple[float, int, int, int]
        ] = []  # seconds since the epoch; ticks at work, of ours, of all
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
        del os.environ[_MARK]

    def others(self, began_s: float = 0.0, ended_s: float = math.inf) -> float:
        """Return the share of all processors that others used between two moments, in seconds since the epoch."""
        first = max(
            (seen for seen in self.seen if seen[0] <= began_s), default=self.seen[0]
        )
        last = min(
            (seen for seen in self.seen if seen[0] >= ended_s), default=self.seen[-1]
        )
        _, busy, ours, whole = (
            now - then for now, then in zip(last, first, strict=True)
        )
        if whole:
            return max(0.0, busy - ours) / whole
        return 0.0

    def _watch(self) -> None:
        while True:
            over = self._over.wait(_EVERY_S)
            for folder in Path("/proc").iterdir():
                if folder.name.isdecimal():
                    self._look(folder)
            busy, whole = _ticks()
            self.seen.append((time.time(), busy, sum(self._mine.values()), whole))
            if over:
                return

    def _look(self, folder: Path) -> None:
        number = int(folder.name)
        try:
            if number not in self._ours:
                self._ours[number] = self._mark in (
                    folder / "environ"
                ).read_bytes().split(b"\0")
            if self._ours[number]:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                self._mine[number] = int(fields[11]) + int(fields[12])
        except OSError:  # it has ended
            return


def _ticks() -> tuple[int, int]:
    """Return the ticks in which processors were at work, and all."""
    fields = [
        int(field)
        for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    ]
    return sum(fields) - sum(fields[at] for at in _IDLE), sum(fields)
