"""Standard streams of a command that are safe to write to: if closed, cut off, on a full disk, or with few
characters.
"""

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
    """The standard streams of this process, made safe by the constructor.

    `FALLBACK`, an error handler for codecs, is registered by it.
    """

    def __init__(self) -> None:
        """Replace `sys.stdin`, `sys.stdout` and `sys.stderr` where they are unsafe."""
        codecs.register_error(FALLBACK, _fallback)
        if sys.stdin is None:
            sys.stdin = _null(0, "r")
        self._raw: list[_Output] = []
        sys.stdout = self._safe(sys.stdout, 1)
        sys.stderr = self._safe(sys.stderr, 2)

    @property
    def error(self) -> OSError | None:
        """The error that kept standard output from being written completely; None also if its reader closed it
        early.
        """
        error = next((raw.error for raw in self._raw if raw.fileno() == 1), None)
        if isinstance(error, BrokenPipeError):
            return None
        return error

    def _safe(self, stream: TextIO | None, descriptor: int) -> TextIO:
        """Return a stream to the same place that never raises when it is written; a stream that is no file's is
        returned itself.
        """
        if stream is None:
            return _null(descriptor, "w")
        # A test or a notebook has replaced the stream
        if not _is_of(stream, descriptor):
            return stream
        stream.flush()
        raw = _Output(descriptor, "w", closefd=False)
        self._raw.append(raw)
        # `python -u` asks for no buffer, since a killed process loses what is in one
        binary = _Unbuffered(raw) if stream.write_through else io.BufferedWriter(raw)
        return io.TextIOWrapper(
            binary,
            encoding=stream.encoding,
            errors=FALLBACK,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )


class _Output(io.FileIO):
    """A descriptor that accepts all writes: data that cannot be written is dropped, and `error` says why.

    So a run goes on when its terminal or its reader is gone, or the disk is full.
    """

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write bytes, of a memoryview too; return their number."""
        while self.error is None:
            try:
                written = super().write(data)
            except OSError as error:
                self.error = error
            else:
                if written is not None:
                    return written
                # Another program has made the descriptor non-blocking
                select.select([], [self], [])
        return len(data)


class _Unbuffered(io.BufferedWriter):
    """Writes everything to its descriptor at once: a bare descriptor may write only a part."""

    def write(self, data: Any, /) -> int:
        """Write an object with bytes and flush; return the number of bytes."""
        written = super().write(data)
        self.flush()
        return written


def _is_of(stream: TextIO, descriptor: int) -> TypeGuard[io.TextIOWrapper]:
    """Whether a stream writes to the descriptor and to nothing else."""
    try:
        return type(stream) is io.TextIOWrapper and stream.fileno() == descriptor
    except OSError:  # a stream in memory has no descriptor
        return False


def _null(descriptor: int, mode: Literal["r", "w"]) -> TextIO:
    """Return a stream to nowhere, and occupy the descriptor if it is closed.

    Otherwise the next file or socket would get the descriptor, and be printed to.
    """
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(null, descriptor)
    # Child processes inherit the descriptor
    if null != descriptor:
        os.close(null)
    else:
        os.set_inheritable(null, True)
    return open(os.devnull, mode, encoding="utf-8", errors="backslashreplace")


def _fallback(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace a character that an encoding lacks: by its raw byte, by characters that resemble it, or by `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    # A byte of a file name that could not be decoded
    if 0xDC80 <= ord(character) <= 0xDCFF:
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return _PLAIN.get(character, "?"), error.start + 1
