"""What workers print, log and warn: one file per rank, `<run>/logs/env-0.txt`, instead of the driver's console."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rlplace.placement.language.slots import Slot


def output_file(folder: Path | None, slot: Slot) -> Path | None:
    """Return the path in `folder` of the output file for the rank at `slot`; None if `folder` is None."""
    if folder is None:
        return None
    return folder / f"{slot.component}-{slot.rank}.txt"


class Outputs:
    """Replaces sys.stdout and sys.stderr of a process until `close`: what a worker's thread writes goes to the worker's
    file.

    Other threads write to the earlier streams. In a process that has only workers, they write to the first worker's
    file.
    """

    def __init__(self, files: Sequence[Path | None] = ()) -> None:
        """Replace sys.stdout and sys.stderr.

        `files`: output files of all workers of a process that has only workers; empty for any other process.
        """
        self._of_thread = threading.local()
        self._opened: dict[Path, TextIO] = {}
        # The file to which the descriptors of a process of workers were redirected; it stays open
        self._whole: TextIO | None = None
        if files and files[0] is not None and (whole := self._open(files[0])):
            # Redirect the descriptors for output of C code and of child processes.
            for descriptor in (
                1,
                2,
            ):
                os.dup2(whole.fileno(), descriptor)
            sys.stdout = sys.stderr = self._whole = whole
        self._ours = (
            ByThread(self._of_thread, sys.stdout),
            ByThread(self._of_thread, sys.stderr),
        )
        sys.stdout, sys.stderr = self._ours

    def enter(self, file: Path | None, owner: str) -> None:
        """From now on, write the output of the calling thread to `file`. The file first gets a line about the worker's
        process.

        `owner`: name of the worker, for this line. If `file` is None or cannot be opened, change nothing.
        """
        if file is not None and (opened := self._open(file)):
            self._of_thread.file = opened
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            opened.write(
                f"# {owner}, process {os.getpid()} on {socket.gethostname()}, {began}\n"
            )

    def close(self) -> None:
        """Restore the earlier sys.stdout and sys.stderr, and close the files of workers.

        What a thread of a worker still writes goes to the earlier streams.

        If other code has replaced the streams in the meantime, its streams stay. When that code later restores the
        streams of this object, they write to the earlier streams.
        """
        for ours in self._ours:
            ours.ended = True
        sys.stdout, sys.stderr = _living(sys.stdout), _living(sys.stderr)
        for opened in self._opened.values():
            # A full disk must not keep the others open.
            if opened is not self._whole:
                with contextlib.suppress(OSError):
                    opened.close()
        self._opened.clear()

    def _open(self, file: Path) -> TextIO | None:
        """Return a stream that appends to `file` and flushes each line; the first call opens it. Return None if opening
        fails.
        """
        with contextlib.suppress(OSError):
            if file not in self._opened:
                file.parent.mkdir(parents=True, exist_ok=True)
                self._opened[file] = open(  # noqa: SIM115
                    file, "a", buffering=1, encoding="utf-8", errors="backslashreplace"
                )
            return self._opened[file]
        return None


class Above(io.TextIOBase):
    """Base class of replacements for a standard stream, which pass everything on to another stream.

    `below`: the other stream, usually the one that was replaced.
    """

    @property
    def below(self) -> TextIO:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # others may not set it
        return self.below.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # the same
        return self.below.errors

    def write(self, text: str, /) -> int:
        return self.below.write(text)

    def flush(self) -> None:
        self.below.flush()

    def fileno(self) -> int:
        return self.below.fileno()

    def isatty(self) -> bool:
        return self.below.isatty()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Flush the stream without closing it, because other code still writes to it."""
        self.flush()


class ByThread(Above):
    """A standard stream that writes to the file of the calling thread's worker, or to `others` in a thread without a
    worker.

    While a thread is traced by pdb or a debugger that is built on it, the thread writes to `others`, where the user is.
    """

    def __init__(self, of_thread: threading.local, others: TextIO) -> None:
        self._of_thread = of_thread
        self.others = others
        # True once `others` has been restored by its owner
        self.ended = False

    @property
    def below(self) -> TextIO:
        file: TextIO | None = (
            None if _is_debugged() else getattr(self._of_thread, "file", None)
        )
        if file is None or file.closed:
            return self.others
        return file

    def write(self, text: str, /) -> int:
        below = self.below
        try:
            return below.write(text)
        except ValueError:
            # The file was closed at this moment.
            if not below.closed:
                raise
            return self.others.write(text)


def _living(stream: TextIO) -> TextIO:
    """Return `stream`, or if it is a ByThread of a closed Outputs, the stream that it has replaced. Repeat this until
    the result is another kind of stream or its Outputs is open.
    """
    while isinstance(stream, ByThread) and stream.ended:
        stream = stream.others
    return stream


def _is_debugged() -> bool:
    """Return whether pdb, or a debugger that is built on bdb, traces the calling thread."""
    # bdb is not imported here: it is loaded only while debugging.
    bdb = sys.modules.get("bdb")
    return bdb is not None and isinstance(
        getattr(sys.gettrace(), "__self__", None), bdb.Bdb
    )
