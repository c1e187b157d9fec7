"""Start the template process of a node, and build the command that forks it. Does not import Ray."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rlplace.signals import blocked_signals
from rlplace.workers.launch.sockets import socket_folder
from rlplace.workers.ray_launch import fork
from rlplace.workers.ray_launch.session import Guard
from rlplace.workers.worker import Worker

_MOST_BYTES = 1 << 20  # most of a template's error output that is read while it runs
END_S = 1.0  # longest wait for the template to end
# Libraries that are slow to import, start no threads, and can be forked
_LIBRARIES = ("numpy", "torch", "gymnasium")


class Template:
    """The template process of one node: it has imported the workers' modules, and is forked to start workers quickly.

    Owns the process, and the folder with the socket at which forks are requested. For another node, this object lives
    in a Ray actor on that node.
    """

    def __init__(
        self,
        modules: Iterable[str],
        variables: Mapping[str, str] | None = None,
        tried: Iterable[str] = (),
    ) -> None:
        """Start the template process, without waiting. Clients that ask for a fork wait until the imports are done.

        `modules`: names of the modules that the template imports. `variables`: additional environment variables for the
        imports. `tried`: names of further modules. If the template could not be forked with them, it does without them.
        """
        self._door = (
            Path(tempfile.mkdtemp(prefix="rlplace_", dir=socket_folder())) / "door"
        )
        self._guard = Guard.removing(self._door.parent)
        # A file instead of a pipe: no process reads meanwhile, so a pipe could fill up.
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed by stop
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(self._door))
            # Clients that come early wait in the backlog.
            door.listen(1024)
            with blocked_signals():
                imported = [*modules, fork.TRIED, *tried]
                self._process = self._started(door.fileno(), imported, variables or {})
        self._errors = ""

    def _started(
        self, listening: int, modules: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, fork.__file__, "--template", str(listening), *modules],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **variables,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # checking for CUDA must not initialize it
            },
            # the template ends when this pipe closes, also if this process is killed
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            text=True,
            start_new_session=True,  # Ctrl-C is for the driver only
            pass_fds=[listening],
        )

    def command(self) -> str:
        """Return the command line that starts a worker as a fork, which Ray runs instead of the Python interpreter."""
        return shlex.join(
            [sys.executable, "-I", "-S", fork.__file__, "--client", str(self._door)]
        )

    def why_not(self) -> str | None:
        """Return why the template has ended: the last line of its error output. Return None while the template runs."""
        if self._process.poll() is None:
            return None
        self.stop()
        return self._errors.strip().rpartition("\n")[2]

    def left_out(self) -> str | None:
        """Return without which modules the template does, and why, as a text. Return None if it has all modules so far.

        The reason is what its error output says before.
        """
        if self._process.poll() is not None:
            return None
        # The template writes at the same position of the file at which `read` would read.
        output = os.pread(self._stderr.fileno(), _MOST_BYTES, 0).decode(
            errors="replace"
        )
        before, found, after = output.partition(fork.LEFT_OUT)
        if not found:
            return None
        why = before.strip().rpartition("\n")[2]
        return f"{fork.LEFT_OUT}{after.partition(chr(10))[0]}: {why}"

    def stop(self) -> None:
        """End the template process; workers that were forked continue. A second call does nothing."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                # Closes its standard input.
                self._process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:  # e.g. in the middle of an import
                self._process.kill()
                self._process.communicate()
            shutil.rmtree(self._door.parent, ignore_errors=True)
            self._guard.dismiss()
            with self._stderr:
                self._stderr.seek(0)
                self._errors = self._stderr.read()


def modules_of(workers: Iterable[type[Worker]]) -> list[str]:
    """Return the names of the modules that a template imports for the worker classes `workers`.

    These are modules of rlplace and libraries. A user's modules are not among them, because they may start threads,
    which a fork would not have. If a class is a user's, or no class names modules, the result includes torch and other
    slow libraries, as far as this process has imported them.
    """
    found: dict[str, None] = {}
    ours = True
    for worker in workers:
        found |= dict.fromkeys(worker.imports)
        if worker.__module__.startswith("rlplace."):
            found[worker.__module__] = None
        else:
            ours = False
    if not found or not ours:
        # The user's code has been imported here, and with it the libraries that it needs.
        libraries = [name for name in _LIBRARIES if name in sys.modules]
        if libraries:
            found |= dict.fromkeys((Worker.__module__, *libraries))
    return list(found)
