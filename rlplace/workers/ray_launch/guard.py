"""Ends processes when this one is killed in a way that lets it clean up nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable


class Guard:
    """A shell that reads from a pipe whose other end only this process holds, and kills when it closes.

    The kernel ends Ray's servers with the driver that started them; their agents notice, but stay for another minute.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        script = 'read -r _; kill -9 "$@" 2>/dev/null'
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", script, "guard", *map(str, pids)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the whole group of the driver, and the guard must outlive it
        )

    def dismiss(self) -> None:
        """The processes have ended, or are not ours to end any more."""
        self._shell.kill()
        self._shell.communicate()
