"""Make the standard streams of a command safe to write to: closed, cut off, on a full disk, or of few characters."""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from typing import Any, Literal, TextIO, TypeGuard

FALLBACK = "rlplace.fallback"  # name of the codec error handler
_PLAIN = {
    "±": "+-",
    "→": "->",
    "…": "...",
    "µ": "u",
    "–": "-",
    "—": "-",
    "×": "x",
    "·": ".",
}


class Streams:
    """The standard streams of this process, from when it is made on."""

    def __init__(self) -> None:
        codecs.register_error(FALLBACK, _fallback)
        if sys.stdin is None:
            sys.stdin = _null(0, "r")
        self._raw: list[_Output] = []
        sys.stdout = self._safe(sys.stdout, 1)
        sys.stderr = self._safe(sys.stderr, 2)

    @property
    def error(self) -> OSError | None:
        """Return why standard output was not written to its end; None too where its reader has seen enough."""
        error = next((raw.error for raw in self._raw if raw.fileno() == 1), None)
        if isinstance(error, BrokenPipeError):
            return None
        return error

    def _safe(self, stream: TextIO | None, descriptor: int) -> TextIO:
        """Return a stream to the same place whose writes raise nothing; the same one where it is no file's."""
        if stream is None:
            return _null(descriptor, "w")
        # A test or a notebook has put a stream of its own there
        if not _is_of(stream, descriptor):
            return stream
        stream.flush()
        raw = _Output(descriptor, "w", closefd=False)
        self._raw.append(raw)
        # Under `python -u` nothing may wait in a buffer: a process that is killed would lose it.
        binary = _Unbuffered(raw) if stream.write_through else io.BufferedWriter(raw)
        return io.TextIOWrapper(
            binary,
            encoding=stream.encoding,
            errors=FALLBACK,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )


class _Output(io.FileIO):
    """A descriptor that takes everything: what cannot be written any more is dropped, and `error` says why.

    A run goes on when its terminal, its reader or the space on the disk is gone.
    """

    error: OSError | None = None

    def write(self, data: Any, /) -> int:  # a BufferedWriter gives a memoryview
        while self.error is None:
            try:
                written = super().write(data)
            except OSError as error:
                self.error = error
            else:
                if written is not None:
                    return written
                # Another program has made it non-blocking
                select.select([], [self], [])
        return len(data)


class _Unbuffered(io.BufferedWriter):
    """Gives each write to its descriptor at once, and whole: a bare descriptor may take less than it is given."""

    def write(self, data: Any, /) -> int:  # whatever has bytes
        written = super().write(data)
        self.flush()
        return written


def _is_of(stream: TextIO, descriptor: int) -> TypeGuard[io.TextIOWrapper]:
    """Whether a stream writes to the descriptor and to nothing else."""
    try:
        return type(stream) is io.TextIOWrapper and stream.fileno() == descriptor
    except OSError:  # of a stream in memory
        return False


def _null(descriptor: int, mode: Literal["r", "w"]) -> TextIO:
    """Return a stream to nowhere, and occupy a closed descriptor: the next file or socket would become it."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(null, descriptor)
    if null != descriptor:
        os.close(null)
    else:
        os.set_inheritable(null, True)
    return open(os.devnull, mode, encoding="utf-8", errors="backslashreplace")


def _fallback(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace what an encoding does not have: by bytes as they came, by characters that resemble it, or by `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    # A byte of a file's name that was not readable as text
    if 0xDC80 <= ord(character) <= 0xDCFF:
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return _PLAIN.get(character, "?"), error.start + 1
