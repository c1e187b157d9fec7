"""What starts the template of a node, and the command that makes a fork of it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rlplace.workers.ray_launch import fork
from rlplace.workers.ray_launch.session import Guard
from rlplace.workers.worker import Worker

_END_S = 1.0  # for the template to end


class Template:
    """The template of this node; as a Ray actor, of the actor's. Owns the process and its folder."""

    def __init__(self, modules: Iterable[str]) -> None:
        """Start it, without waiting: who wants a fork waits."""
        self._door = Path(tempfile.mkdtemp(prefix="rlplace_")) / "door"
        self._guard = Guard.removing(self._door.parent)
        # Nobody reads while it runs: a pipe may fill.
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed by stop
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(self._door))
            door.listen(1024)  # who comes early waits
            self._process = self._started(door.fileno(), modules)
        self._errors = ""

    def _started(self, listening: int, modules: Iterable[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, fork.__file__, "--template", str(listening), *modules],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to ask whether there is CUDA must not initialize it
            },
            stdin=subprocess.PIPE,  # its end is the template's: also where this process is killed
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            text=True,
            start_new_session=True,  # Ctrl-C is for the driver
            pass_fds=[listening],
        )

    def command(self) -> str:
        """Return what starts a fork in place of Python."""
        return shlex.join([sys.executable, "-I", "-S", fork.__file__, "--client", str(self._door)])

    def why_not(self) -> str | None:
        """Return why the template has ended; None while it serves."""
        if self._process.poll() is None:
            return None
        self.stop()
        return self._errors.strip().rpartition("\n")[2]

    def stop(self) -> None:
        """End it. Idempotent; its forks go on."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.communicate(timeout=_END_S)  # ends its standard input
            except subprocess.TimeoutExpired:  # in the middle of an import
                self._process.kill()
                self._process.communicate()
            shutil.rmtree(self._door.parent, ignore_errors=True)
            self._guard.dismiss()
            with self._stderr:
                self._stderr.seek(0)
                self._errors = self._stderr.read()


class Templates:
    """The templates of all nodes; where there is none, or it has ended, workers start as Ray starts them."""

    def __init__(self) -> None:
        self._here: Template | None = None
        self._elsewhere: dict[int, tuple[Any, str]] = {}  # by node: actor and command
        self._without: dict[int, str] = {}  # nodes where it failed: why

    def start_here(self, modules: Iterable[str]) -> None:
        """Start the one of this machine, before Ray is there: for a Ray of this machine alone."""
        self._here = Template(modules)

    def start_on(self, nodes: Mapping[int, Mapping[str, Any]], modules: Iterable[str], timeout_s: float) -> None:
        """Start one on each node not yet tried, by the options of an actor there. It stays without if this fails."""
        if self._here is not None:
            return
        made: Any = ray.remote(Template)
        new = {node: on for node, on in nodes.items() if node not in self._elsewhere and node not in self._without}
        hosts = {node: made.options(num_cpus=0, **on).remote(modules) for node, on in new.items()}
        asked = {node: host.command.remote() for node, host in hosts.items()}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
        for node, host in hosts.items():
            try:
                self._elsewhere[node] = host, ray.get(asked[node], timeout=0)
            except GetTimeoutError:
                self._without[node] = f"no template within {timeout_s:g} s"
                host.stop.remote()  # Ray ends the actor after this
            except RayError as error:
                self._without[node] = str(error).strip().rpartition("\n")[2]

    def command_here(self) -> str | None:
        """Return what starts a fork of the template that `start_here` started."""
        return self._here.command() if self._here is not None else None

    def command(self, node: int) -> str | None:
        """Return what starts a fork on a node in place of Python."""
        if self._here is not None:
            return self._here.command()
        return self._elsewhere[node][1] if node in self._elsewhere else None

    def why_not(self) -> str | None:
        """Return why workers start without one, here or on which nodes; None where none has to."""
        if self._here is not None:
            return self._here.why_not()
        asked = {node: host.why_not.remote() for node, (host, _) in self._elsewhere.items()}
        answers = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_END_S)[0] if asked else []
        ended = dict(self._without)
        for node, reference in asked.items():
            if reference in answers:
                with contextlib.suppress(RayError):  # its node is lost, which is said elsewhere
                    ended |= {node: why} if (why := ray.get(reference)) else {}
        return "; ".join(f"node {node}: {why}" for node, why in sorted(ended.items())) or None

    def stop(self) -> None:
        """End all; their forks go on. Idempotent."""
        if self._here is not None:
            self._here.stop()
        hosts = [host for host, _ in self._elsewhere.values()]
        if hosts and ray.is_initialized():
            # Ray would kill the template with the actor, and leave the folder.
            ray.wait([host.stop.remote() for host in hosts], num_returns=len(hosts), timeout=3 * _END_S)
            for host in hosts:
                ray.kill(host)
        self._elsewhere.clear()


def modules_of(workers: Iterable[type[Worker]]) -> list[str]:
    """Name what workers of these classes import, as far as it is ours: code of users may start threads."""
    own = [worker.__module__ for worker in workers if worker.__module__.startswith("rlplace.")]
    return list(dict.fromkeys([*own, *(name for worker in workers for name in worker.imports)]))
