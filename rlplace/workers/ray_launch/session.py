"""Start or join Ray, list its nodes, and end what was started. Imports Ray only inside `ray_environment`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from rlplace.codes import problem
from rlplace.config.blocks.machines import RayConfig
from rlplace.cores import usable_cores
from rlplace.errors import ClusterError
from rlplace.placement.machines.topology import in_rank_order
from rlplace.signals import blocked_signals, deliver_deferred
from rlplace.workers.launch.reservation import Machine
from rlplace.workers.launch.sockets import ray_variables
from rlplace.workers.ray_launch import fork, private
from rlplace.workers.ray_launch.servers import Servers, watched
from rlplace.workers.ray_launch.token import make_token, use_token

# Ray messages that repeat our errors, or that warn of many small workers
_QUIET = "worker died or was killed|PYTHON worker processes have been started"

# Ray's default of 15 makes workers starve on a busy machine. Each process has one core. Ray's usage reports are off.
_ALWAYS = {
    # After the death of its GCS, Ray ends the driver, workers and raylets. Until then the run saves and ends by itself.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "120",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": _QUIET,
}
_STARTED_HERE = {
    # listen on the loopback address only; this is Ray's switch for it
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",  # the metrics are not used
    "RAY_prestart_worker_first_driver": "0",  # no idle processes
    "RAY_worker_maximum_startup_concurrency": "8",  # default: number of cores; forked workers mostly wait for Ray
    # Interval of retries until Ray's server accepts; the first try may come too early and would wait for a second.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}
_JOINED = {
    # How often an unreachable cluster is tried, 40 s each. Ray's default of 20 would take a quarter of an hour without
    # handling signals. Clients read this name too.
    "RAY_gcs_server_port_wait_time_s": "1",
}

# Ray gives up a start after 30 s, which a busy machine can exceed.
_ATTEMPTS = 3
_REACH_S = 5.0  # longest wait for a cluster to accept a connection
_END_S = 10.0  # longest wait for Ray to end; normally one or two seconds
_SHORT = 80  # characters of a command line in an error

# Slurm sends these signals to all processes of a step
_STAY = "trap '' TERM HUP USR1 USR2"
_KILL = 'kill -9 "$@" 2>/dev/null'
# Removing can fail while a process still writes into the folder; that process ends soon. Names are those of
# shared_memory.folder.
_SEGMENTS = (
    'for s in "$f"/segments/*; do [ -e "$s" ] && rm -f -- "/dev/shm/${s##*/}"; done'
)
_REMOVE = (
    f'for f in "$@"; do {_SEGMENTS}; done 2>/dev/null; '
    'for i in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$@" 2>/dev/null && exit; sleep 1; done'
)


@contextlib.contextmanager
def ray_environment(address: str | None) -> Iterator[None]:
    """Return a context manager that sets environment variables for importing and starting Ray, during its `with` block.

    Variables that the user has set are not changed. `address`: cluster to join; None: Ray will be started on this
    machine. Raises ClusterError if the path of Ray's folder is too long for sockets.
    """
    wanted = _ALWAYS | (_JOINED if address else {**_STARTED_HERE, **ray_variables()})
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


class RaySession:
    """The connection of this process to Ray.

    If the session has started Ray, `close` ends Ray. If the session has joined a running Ray, this Ray continues.
    """

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self.address = config.address or "the Ray of this machine"
        self._begun = False
        # Whether Ray was connected before
        self._shared = False
        self._guard: Guard | None = None
        # Watches Ray's own processes; None before the start, and where none of them can be seen
        self.watch: Servers | None = None
        # Servers of the Ray that was started here
        self._servers: list[psutil.Process] = []
        self._forget_token: Callable[[], None] | None = None
        # Lines that say what this Ray does more slowly than the tried versions
        self.notes: list[str] = []

    def start(self) -> None:
        """Start or join Ray, as the config says. Call this once. Raise ClusterError if Ray cannot be started or
        reached.
        """
        with ray_environment(self._config.address):
            import ray

            self._shared = ray.is_initialized()
            # Set first: an interrupted start must be closed too.
            self._begun = True
            if not self._shared and self._config.address is None:
                others = _descendants()
                self._forget_token = make_token()
                if (why := private.why_not_lean()) is not None:
                    self.notes.append(why)
                _start_local(self._config.start_timeout_s)
                started = _descendants() - others
                for pid in started:
                    # This process only helped to start the servers.
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self._servers.append(psutil.Process(pid))
                self._guard = Guard.killing(started)
            elif not self._shared:
                self._forget_token = _join(self._config.address or "auto")
            head = ray.get_runtime_context().gcs_address
            self.watch = watched(self._servers, head)

    @property
    def local(self) -> bool:
        """Whether this session has started Ray itself, so that Ray ends with the session."""
        return self._config.address is None and not self._shared

    def machines(self) -> list[Machine]:
        """Return the living nodes of the cluster, in the order of their node ranks."""
        import ray

        return [_machine(node) for node in in_rank_order(ray.nodes())]

    def living(self) -> list[Machine]:
        """Return the living nodes of the cluster, in any order; labels of node ranks are not looked at."""
        import ray

        return [_machine(node) for node in ray.nodes() if node["Alive"]]

    def servers(self) -> dict[str, tuple[str, int]]:
        """Return the address of the Ray server of each living node: node id -> (host, port)."""
        import ray

        alive = [node for node in ray.nodes() if node["Alive"]]
        return {
            node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"])
            for node in alive
        }

    def free(self) -> Mapping[str, Mapping[str, float]]:
        """Return the resources that are free: node id -> resource name -> amount."""
        return private.free_by_node()

    def processes(self) -> list[psutil.Process]:
        """Return all processes that Ray has started on this machine, including workers that have not reported yet.

        Return an empty list if this session has joined a running Ray.
        """
        found: list[psutil.Process] = []
        for server in self._servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += server.children(recursive=True)
        return found

    def wake(self) -> None:
        """Continue stopped processes of the run's own Ray.

        Call this before ending workers and Ray: Ray's calls would wait for stopped processes.
        """
        for server in self._servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                if server.status() == psutil.STATUS_STOPPED:
                    server.resume()

    def _kill_servers(self) -> None:
        for server in self._servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                server.kill()

    def close(self) -> None:
        """End Ray if this session has started it, else disconnect from Ray. A second call does nothing."""
        if not self._begun:
            return
        self._begun = False
        if not self._shared:
            import ray

            # Ray waits for a server without a deadline.
            late = threading.Timer(_END_S, self._kill_servers)
            late.daemon = True
            late.start()
            try:
                agents = self.processes()
                with private.signals_kept(), private.servers_killed():
                    ray.shutdown()
                for agent in agents:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        agent.kill()
            finally:
                late.cancel()
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
        if self._forget_token is not None:
            self._forget_token()
            self._forget_token = None


def _machine(node: Mapping[str, Any]) -> Machine:
    """Return a node that Ray reports as a Machine."""
    return Machine(
        id=node["NodeID"],
        address=node["NodeManagerAddress"],
        total=node["Resources"],
    )


def _descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _start_local(timeout_s: float) -> None:
    import ray

    deadline = time.monotonic() + timeout_s
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with (
                private.signals_kept(),
                private.lean_start(fork.__file__),
                blocked_signals(),
            ):
                ray.init(
                    address="local",
                    num_cpus=usable_cores(),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            return
        # Ray raises various errors if its processes are slow; after the last try the error is passed on
        except Exception as error:
            ray.shutdown()
            deliver_deferred()
            if attempt == _ATTEMPTS or time.monotonic() > deadline:
                raise ClusterError(
                    problem(
                        "ray-did-not-start",
                        "cluster.ray",
                        f"{type(error).__name__}: {error}".partition("\n")[0],
                        attempt=attempt,
                    )
                ) from error


def _join(address: str) -> Callable[[], None] | None:
    """Connect to the Ray cluster at `address`; raise ClusterError if this fails.

    Return a function that undoes the token settings made for the connection; None if none were made.
    """
    import ray

    where = address
    forget_token = None
    try:
        if address == "auto":
            where = _shared_address()
        host, _, port = where.rpartition(":")
        # Ray itself interprets addresses with a scheme.
        if host and port.isdecimal():
            # Connect once first: Ray takes half a minute to notice that no process listens.
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=_REACH_S
            ).close()
            forget_token = use_token(where)
        with private.signals_kept():
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        if forget_token is not None:
            forget_token()
        if (differs := _of_other_versions(str(error), address)) is not None:
            raise differs from error
        why = (
            (getattr(error, "strerror", None) or str(error)).strip().partition("\n")[0]
        )
        why = why if where == address else f"{where}: {why}"
        error_name = "here"
        # The address is of a single machine.
        if address.count(".") and ":" not in address:
            error_name = "without-port"
        unreachable = problem(
            "cluster-unreachable",
            "cluster.ray.address",
            address,
            error=error_name,
            reason=why,
            address=address,
        )
        raise ClusterError(unreachable) from error
    return forget_token


def _of_other_versions(said: str, address: str) -> ClusterError | None:
    """Return the error for a cluster with a different version of Ray or Python; None if `said` gives another reason.

    `said`: Ray's message about the failed connection. `address`: address of the cluster in the config.
    """
    versions = [
        dict(re.findall(r"(Ray|Python): (\S+)", part))
        for part in said.partition("This process")[::2]
    ]
    if "Version mismatch" not in said or any(
        part.keys() != {"Ray", "Python"} for part in versions
    ):
        return None
    there, here = versions
    differing = [name for name in there if there[name] != here[name]]
    texts = [
        " and ".join(f"{name} {version}" for name, version in part.items())
        for part in (there, here)
    ]
    error_name = "ray"
    if there["Python"] != here["Python"]:
        error_name = "python"
    differs = problem(
        "ray-differs",
        "cluster.ray.address",
        address,
        error=error_name,
        differing=" and another ".join(differing),
        cluster=texts[0],
        driver=texts[1],
        executable=sys.executable,
        there_ray=there["Ray"],
        there_python=there["Python"],
        here_ray=here["Ray"],
        here_python=here["Python"],
    )
    return ClusterError(differs)


def _shared_address() -> str:
    """Return the address of the cluster that `ray.address: auto` joins.

    This is the value of RAY_ADDRESS, which Ray sets in its jobs too. If it is not set, it is the address of the cluster
    that `ray start` has started on this machine. Raise ConnectionError if there is no such cluster, or several. Raise
    ClusterError if the only clusters on this machine belong to other programs, because `ray.init("auto")` would join
    one of them.
    """
    named = os.environ.get("RAY_ADDRESS", "auto") or "auto"
    if named != "auto":
        return named
    started, (shared, alone) = private.address_of_start(), _at_work()
    # The address file is in another folder, or of a cluster that has ended.
    if started not in shared and len(shared) == 1:
        return shared.pop()
    if started is None and alone:
        private_one = problem(
            "cluster-private", "cluster.ray.address", "auto", programs="; ".join(alone)
        )
        raise ClusterError(private_one)
    if len(shared) > 1 and started not in shared:
        raise ConnectionError(
            f"several are here, {', '.join(sorted(shared))}: RAY_ADDRESS, or the address itself, names one"
        )
    if started is None:
        raise ConnectionError(
            "RAY_ADDRESS is not set, and no `ray start` has left an address here"
        )
    return started


def _at_work() -> tuple[set[str], list[str]]:
    """Return the Ray clusters on this machine, in two groups.

    The first group has the addresses of clusters that `ray start` has started or joined. The second group has one text
    for each cluster that a program has started for itself; the text names the program.
    """
    shared = set[str]()
    alone = list[str]()
    for server in psutil.process_iter(["cmdline"]):
        words = server.info["cmdline"] or []
        addresses = [
            word.partition("=")[2]
            for word in words
            if word.startswith("--gcs-address=")
        ]
        if not addresses or not private.is_server(words):
            continue
        # The process is ending.
        with contextlib.suppress(psutil.NoSuchProcess):
            program = server.parent()
            if program is None or not _starts_ray_for_itself(program):
                shared.add(addresses[0])
            else:
                text = " ".join(program.cmdline())
                alone.append(
                    f"{addresses[0]} of process {program.pid}, {textwrap.shorten(text, _SHORT)}"
                )
    return shared, alone


def _starts_ray_for_itself(program: psutil.Process) -> bool:
    """Return whether `program`, the parent process of a Ray server, has started this Ray for its own use.

    This is so if the program uses Ray and is not the command `ray start --block`. A program that does not use Ray has
    only become the parent after the server's start.
    """
    words = [Path(word).name for word in program.cmdline()]
    if any(pair == ("ray", "start") for pair in itertools.pairwise(words)):
        return False
    try:
        return any(
            Path(each.path).name.startswith("_raylet.")
            for each in program.memory_maps()
        )
    except psutil.AccessDenied:  # a process of another user
        return program.pid != 1


class Guard:
    """Runs a clean-up command when this process has ended, even if it was killed.

    A shell process reads from a pipe that only this process holds open. When the pipe ends, the shell runs the command.
    When a line arrives in the pipe, the shell ends without the command. The shell is detached, because Ray kills the
    children of a worker that it ends.
    """

    def __init__(self, script: str, arguments: Iterable[str]) -> None:
        # A shell gives background commands no standard input.
        watch = f"{_STAY}; exec 3<&0; {{ read -r _ <&3 || {{ {script}; }}; }} &"
        # Ctrl-C reaches the whole process group of the driver; the guard must survive it.
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", watch, "guard", *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        # Returns at once: the watching part runs in the background.
        self._shell.wait()

    @classmethod
    def killing(cls, pids: Iterable[int]) -> Guard:
        """Return a guard that kills the processes `pids` when this process has ended.

        The kernel ends Ray's servers together with the driver, but the agents of these servers would run for another
        minute.
        """
        return cls(_KILL, map(str, pids))

    @classmethod
    def removing(cls, *folders: Path) -> Guard:
        return cls(_REMOVE, map(str, folders))

    def dismiss(self) -> None:
        """Cancel the clean-up command. A second call does nothing."""
        pipe = self._shell.stdin
        assert pipe is not None
        if not pipe.closed:
            # The guard has ended already.
            with contextlib.suppress(BrokenPipeError):
                pipe.write(b"dismissed\n")
                pipe.flush()
            pipe.close()
