"""Whether the process that wrote its name into shared memory is still the same living process, and forks of this one.

A name is one word: pid and start time, so that a recycled pid is not taken for the process that had it before.
"""

from __future__ import annotations

import os
import weakref
from functools import cache
from typing import Protocol

_PID_BITS = 22  # Linux gives no larger pid (kernel's PID_MAX_LIMIT)


def this_process() -> int:
    """The word of this process; positive, below 2**63. A forked child has its own."""
    return _word_of(os.getpid())


def pid_of(word: int) -> int:
    return word & ((1 << _PID_BITS) - 1)


def alive(word: int) -> bool:
    """False once the process has ended; a zombie has ended."""
    return word > 0 and _read(pid_of(word)) == word


class Forked(Protocol):
    def enter_process(self) -> None:
        """Forget what belongs to the parent alone."""
        ...


def tell_of_forks(held: Forked) -> None:
    """Call `enter_process` in every child that is forked while the object lives."""
    _held().add(held)


@cache
def _held() -> weakref.WeakSet[Forked]:
    held: weakref.WeakSet[Forked] = weakref.WeakSet()

    def after_fork() -> None:
        for each in list(held):
            each.enter_process()

    os.register_at_fork(after_in_child=after_fork)
    return held


@cache
def _word_of(pid: int) -> int:
    word = _read(pid)
    assert word is not None, f"/proc does not know process {pid}"
    return word


def _read(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    started = int(fields[19])  # field 22 of proc(5): clock ticks after boot
    return (started & ((1 << 40) - 1)) << _PID_BITS | pid
