"""Clean up after this process, even when it is killed."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

_KILL = 'kill -9 "$@" 2>/dev/null'
# A process that still writes into the folder can make a removal fail; it ends soon, for the reason that this runs.
_REMOVE = 'for i in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$@" 2>/dev/null && exit; sleep 1; done'


class Guard:
    """A shell that reads from a pipe whose other end only this process holds: a line dismisses it, the end sets it off.

    It has no parent: Ray kills the children of a worker that it ends.
    """

    def __init__(self, script: str, arguments: Iterable[str]) -> None:
        watch = f"exec 3<&0; {{ read -r _ <&3 || {{ {script}; }}; }} &"  # a shell gives `&` no standard input
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", watch, "guard", *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the whole group of the driver, and the guard must outlive it
        )
        self._shell.wait()  # at once: what watches is in the background

    @classmethod
    def killing(cls, pids: Iterable[int]) -> Guard:
        """The kernel ends Ray's servers with the driver that started them; their agents would stay for a minute."""
        return cls(_KILL, map(str, pids))

    @classmethod
    def removing(cls, *folders: Path) -> Guard:
        return cls(_REMOVE, map(str, folders))

    def dismiss(self) -> None:
        """There is nothing left to clean up, or it is not ours any more. Idempotent."""
        pipe = self._shell.stdin
        assert pipe is not None
        if not pipe.closed:
            with contextlib.suppress(BrokenPipeError):  # it was ended
                pipe.write(b"dismissed\n")
                pipe.flush()
            pipe.close()
