"""Standard streams to which a command can always write without an error.

Writes succeed even if a stream is closed, its reader is gone, its encoding lacks a character, or the disk is full.
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
    """The standard streams of this process. The constructor replaces them by streams to which writes never fail.

    The constructor also registers the codec error handler `FALLBACK`, for characters that an encoding lacks.
    """

    def __init__(self) -> None:
        """Replace `sys.stdout` and `sys.stderr` by safe streams, and `sys.stdin` if it is missing."""
        codecs.register_error(FALLBACK, _fallback)
        if sys.stdin is None:
            sys.stdin = _null(0, "r")
        self._raw: list[_Output] = []
        sys.stdout = self._safe(sys.stdout, 1)
        sys.stderr = self._safe(sys.stderr, 2)

    @property
    def error(self) -> OSError | None:
        """The first error of a write to standard output; None without an error.

        A pipe that its reader has closed early does not count as an error.
        """
        error = next((raw.error for raw in self._raw if raw.fileno() == 1), None)
        if isinstance(error, BrokenPipeError):
            return None
        return error

    def _safe(self, stream: TextIO | None, descriptor: int) -> TextIO:
        """Return a stream to `descriptor` with writes that never raise an error.

        `stream`: the present standard stream; None: it is missing. A stream that does not write to `descriptor`, as in
        a notebook, is returned unchanged.
        """
        if stream is None:
            return _null(descriptor, "w")
        # A test or a notebook has replaced the stream
        if not _is_of(stream, descriptor):
            return stream
        stream.flush()
        raw = _Output(descriptor, "w", closefd=False)
        self._raw.append(raw)
        # `python -u` asks for no buffer: a killed process loses the content of its buffer
        binary = _Unbuffered(raw) if stream.write_through else io.BufferedWriter(raw)
        return io.TextIOWrapper(
            binary,
            encoding=stream.encoding,
            errors=FALLBACK,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )


class _Output(io.FileIO):
    """A file descriptor to which every write succeeds. After the first error, all data is dropped.

    So a run continues if its terminal or reader is gone, or if the disk is full. `error`: the first error; None: no
    error yet.
    """

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write `data`, an object with bytes such as a memoryview. Return the number of bytes written or dropped."""
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
    """A writer that writes all bytes of each call immediately. A bare descriptor may write only a part of them."""

    def write(self, data: Any, /) -> int:
        """Write `data`, an object with bytes such as a memoryview, and flush. Return the number of bytes."""
        written = super().write(data)
        self.flush()
        return written


def _is_of(stream: TextIO, descriptor: int) -> TypeGuard[io.TextIOWrapper]:
    """Return whether `stream` is a plain text stream to `descriptor`, and not a replacement as in a notebook."""
    try:
        return type(stream) is io.TextIOWrapper and stream.fileno() == descriptor
    except OSError:  # a stream in memory has no descriptor
        return False


def _null(descriptor: int, mode: Literal["r", "w"]) -> TextIO:
    """Return a stream to the null device. If `descriptor` is closed, connect it to the null device as well.

    Otherwise the next file or socket would get the number of the closed descriptor, and would receive printed text.
    `mode`: "r" to read, "w" to write.
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
    """Return (replacement for a character that the encoding lacks, position after the character).

    This is a codec error handler; `error` has the text and the position. The replacement is a similar ASCII text such
    as `->`, or `?`. For a byte of a file name that could not be decoded, it is this byte.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    # A byte of a file name that could not be decoded
    if 0xDC80 <= ord(character) <= 0xDCFF:
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return _PLAIN.get(character, "?"), error.start + 1
