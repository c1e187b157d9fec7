"""What workers print, log and warn: a file per rank, `<run>/logs/env-0.txt`, instead of the driver's console."""

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
    """Return where the output of a rank goes; None: where that of its process goes."""
    if folder is None:
        return None
    return folder / f"{slot.component}-{slot.rank}.txt"


class Outputs:
    """Owns sys.stdout and sys.stderr of a process until `close`: each thread writes to its worker's file.

    What no worker's thread writes goes on as before; in a process of workers alone, to the file of the first.
    """

    def __init__(self, files: Sequence[Path | None] = ()) -> None:
        """`files`: of the workers, where the process has no others."""
        self._of_thread = threading.local()
        self._opened: dict[Path, TextIO] = {}
        if files and files[0] is not None and (whole := self._open(files[0])):
            # For what is not Python, and for processes that it starts
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
        """Send what this thread writes to a file. One that cannot be written leaves it as it is."""
        if file is not None and (opened := self._open(file)):
            self._of_thread.file = opened
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            opened.write(
                f"# {owner}, process {os.getpid()} on {socket.gethostname()}, {began}\n"
            )

    def close(self) -> None:
        """Put back what was there; under streams that others have put there since, once these are put back, too."""
        for ours in self._ours:
            ours.ended = True
        sys.stdout, sys.stderr = _living(sys.stdout), _living(sys.stderr)

    def _open(self, file: Path) -> TextIO | None:
        """Open a file once, for whole lines that appear at once. None where that is not possible."""
        with contextlib.suppress(OSError):
            if file not in self._opened:
                file.parent.mkdir(parents=True, exist_ok=True)
                self._opened[file] = open(  # noqa: SIM115
                    file, "a", buffering=1, encoding="utf-8", errors="backslashreplace"
                )
            return self._opened[file]
        return None


class Above(io.TextIOBase):
    """A standard stream that writes to the one below it."""

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
        """Only flush: others go on to write here, and who has put it there puts back what is below."""
        self.flush()


class ByThread(Above):
    """A standard stream that is the file of a thread's worker, or `others` for any other thread.

    While pdb, or a debugger built on it, steps through a thread, that thread writes to `others` too: its user is there.
    """

    def __init__(self, of_thread: threading.local, others: TextIO) -> None:
        self._of_thread = of_thread
        self.others = others
        # Its owner has put back `others`
        self.ended = False

    @property
    def below(self) -> TextIO:
        file: TextIO | None = (
            None if _is_debugged() else getattr(self._of_thread, "file", None)
        )
        return file or self.others


def _living(stream: TextIO) -> TextIO:
    """Return what is below streams that have ended."""
    while isinstance(stream, ByThread) and stream.ended:
        stream = stream.others
    return stream


def _is_debugged() -> bool:
    """Return whether pdb traces this thread."""
    # Not imported where nobody debugs
    bdb = sys.modules.get("bdb")
    return bdb is not None and isinstance(
        getattr(sys.gettrace(), "__self__", None), bdb.Bdb
    )
