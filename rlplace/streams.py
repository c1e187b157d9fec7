"""Standard streams that a command can write to safely, even if they are closed, cut off or lack characters, or the disk
is full.
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
    """The standard streams of this process, which the constructor makes safe to write to.

    The constructor also registers `FALLBACK`, an error handler for codecs.
    """

    def __init__(self) -> None:
        """Replace those of `sys.stdin`, `sys.stdout` and `sys.stderr` that are missing or can raise in a write."""
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
        """Return a stream for `descriptor` whose writes never raise.

        `stream`: the present standard stream; None if there is none. A stream that does not write to `descriptor`, as
        in a notebook, is returned unchanged.
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
    """A file descriptor to which every write succeeds. Data that cannot be written is dropped.

    So a run goes on when its terminal or its reader is gone, or the disk is full. `error` is the first error.
    """

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write an object that has bytes, such as a memoryview; return the number of bytes."""
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
    """A writer that writes all bytes at once; a bare descriptor may write only a part of them."""

    def write(self, data: Any, /) -> int:
        """Write an object that has bytes, such as a memoryview, and flush; return the number of bytes."""
        written = super().write(data)
        self.flush()
        return written


def _is_of(stream: TextIO, descriptor: int) -> TypeGuard[io.TextIOWrapper]:
    """Return whether a stream writes to the descriptor and to nothing else."""
    try:
        return type(stream) is io.TextIOWrapper and stream.fileno() == descriptor
    except OSError:  # a stream in memory has no descriptor
        return False


def _null(descriptor: int, mode: Literal["r", "w"]) -> TextIO:
    """Return a stream of the null device. If `descriptor` is closed, connect it to the null device too.

    If the descriptor stayed closed, the next file or socket would get its number, and prints would go to that file.
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
    """Return the replacement for a character that an encoding lacks, and the position from which encoding goes on.

    The replacement is the raw byte of a file name, or characters that resemble the character, or `?`.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    # A byte of a file name that could not be decoded
    if 0xDC80 <= ord(character) <= 0xDCFF:
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return _PLAIN.get(character, "?"), error.start + 1
