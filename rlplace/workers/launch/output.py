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
    """Return the path of the output file of the rank at `slot` in `folder`, or None if `folder` is None."""
    if folder is None:
        return None
    return folder / f"{slot.component}-{slot.rank}.txt"


class Outputs:
    """Owns sys.stdout and sys.stderr of a process until `close`: the thread of each worker writes to the worker's file.

    Other threads write to the earlier streams; in a process that has only workers, to the first worker's file.
    """

    def __init__(self, files: Sequence[Path | None] = ()) -> None:
        """Replace sys.stdout and sys.stderr. `files`: output files of all workers, if the process has only workers."""
        self._of_thread = threading.local()
        self._opened: dict[Path, TextIO] = {}
        if files and files[0] is not None and (whole := self._open(files[0])):
            # Redirect the descriptors for output of C code and of child processes.
            for descriptor in (
                1,
                2,
            ):
                os.dup2(whole.fileno(), descriptor)
            sys.stdout = sys.stderr = whole
        self._ours = (
            ByThread(self._of_thread, sys.stdout),
            ByThread(self._of_thread, sys.stderr),
        )
        sys.stdout, sys.stderr = self._ours

    def enter(self, file: Path | None, owner: str) -> None:
        """Direct the output of the calling thread to `file`, which first gets a line about the process.

        `owner`: name of the worker, for this line. If `file` is None or cannot be written, change nothing.
        """
        if file is not None and (opened := self._open(file)):
            self._of_thread.file = opened
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            opened.write(
                f"# {owner}, process {os.getpid()} on {socket.gethostname()}, {began}\n"
            )

    def close(self) -> None:
        """Restore the earlier sys.stdout and sys.stderr.

        If other code has replaced the streams of this object, the streams of that code stay until that code restores
        the streams of this object.
        """
        for ours in self._ours:
            ours.ended = True
        sys.stdout, sys.stderr = _living(sys.stdout), _living(sys.stderr)

    def _open(self, file: Path) -> TextIO | None:
        """Return the stream that appends whole lines to `file`, opened at the first call.

        Return None if opening fails.
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
    """A replacement of a standard stream that writes to the stream that it has replaced ("the stream below")."""

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
        """Flush the stream and leave it open, because other code still writes to it."""
        self.flush()


class ByThread(Above):
    """A standard stream that writes to the file of the thread's worker, or to `others` in any other thread.

    While pdb, or a debugger built on it, steps through a thread, the thread writes to `others`, where the user is.
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
        return file or self.others


def _living(stream: TextIO) -> TextIO:
    """Return `stream`, or if it is a ByThread that has ended, the first stream below it that has not ended."""
    while isinstance(stream, ByThread) and stream.ended:
        stream = stream.others
    return stream


def _is_debugged() -> bool:
    """Return whether pdb, or a debugger built on bdb, traces the calling thread."""
    # bdb is not imported here: it is loaded only while debugging.
    bdb = sys.modules.get("bdb")
    return bdb is not None and isinstance(
        getattr(sys.gettrace(), "__self__", None), bdb.Bdb
    )
