"""Pauses Python's garbage collector for a simulation."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNGEST = 0  # generation of the garbage collector


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the cyclic garbage collector; at the end, collect what was made meanwhile.

    A simulation makes so many objects that the collector would search all older objects several times.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(_YOUNGEST)
