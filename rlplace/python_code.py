"""Parsing Python code in a process with several threads."""

from __future__ import annotations

import ast
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LOCK = threading.Lock()
_TRIES = 10


def parse(code: str | bytes) -> ast.Module:
    """Return the syntax tree of a program. Raises the errors of `ast.parse`, from any thread."""
    return one_at_a_time(lambda: ast.parse(code))


def one_at_a_time(read: Callable[[], T]) -> T:
    """Call `read`, which parses Python code, in one thread at a time, and return its result.

    Python 3.11 and 3.12 count the depth of a tree for all threads together. So a parse can end with "SystemError: AST
    constructor recursion depth mismatch" if another thread parses at the same time. Code outside of rlplace may do so,
    hence the further tries. Source: python/cpython#106905.
    """
    with _LOCK:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(SystemError):
                return read()
        return read()
