"""Watch Ray's own processes, on which all workers of a run depend. Name a process that has died or stands still.

::

    a wait of the driver ── check, twice a second ──▶ all alive: the wait goes on
                                 ├ the raylet died: its workers end now ──────────────────────▶ RayDied
                                 ├ the GCS died: running calls get PATIENCE_S to end ───────────▶ RayDied
                                 ├ the raylet is stopped for STOPPED_S: the same ───────────────▶ RayDied
                                 └ the GCS or an agent is stopped, and a worker is started ─────▶ RayDied

After RayDied, `check` raises nothing for some seconds, in which the run saves. Ray itself notices the
death of its GCS after a minute or more, and then ends the driver without an error of Python.

A process stands still if the operating system reports that a signal or a debugger has stopped it. A slow process that
waits for a processor, a disk or memory is in another state, and ends no run. Running workers need the raylet: half a
minute after it stops, Ray counts its machine as lost. Running workers do not need the GCS and the agents.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rlplace.codes import problem
from rlplace.errors import Problem, RayDied

LOOK_S = 0.4  # shortest time between two looks at the processes
PATIENCE_S = 5.0  # for calls to end after the death of the GCS, which they do without
SAVE_S = 60.0  # for saving after the death of the GCS
ENDING_S = 5.0  # for saving after the death of the raylet: workers outlive it by a few seconds at most
STOPPED_S = 8.0  # seconds for which a process is stopped before the run ends
STOPPED_SAVE_S = 15.0  # seconds for saving; half a minute after the stop, Ray counts the machine as lost
HEAD_LOOK_S = 2.0  # shortest time between two looks at the head of a joined Ray
SILENT_S = 10.0  # seconds without an answer of the head before a warning
HEAD_GONE_S = 30.0  # seconds without an answer before the run ends; a GCS with external state may be restarted
HEAD_SAVE_S = 20.0  # seconds for saving; workers may have died with the head, and nothing would report it
_CONNECT_S = 2.0
# The first bytes that an HTTP/2 client sends: the connection preface, and empty settings
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_COUNTED_S = (
    1.0  # most seconds that one look adds to the time for which a process is stopped
)
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_GCS = "gcs_server"
_RAYLET = "raylet"
# Processes that are needed to start a worker: name from `_kind` -> name in errors
_STARTS = {
    _GCS: "GCS",
    _RAYLET: "raylet",
    **dict.fromkeys(("RuntimeEnvAgent", "agent/main.py"), "agent for environments"),
}
_EXIT_CODE = "exit code"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The death of a process of Ray, or a stop that ends the run.

    `calls_go_on`: whether running calls of workers can end without this process. `at_s`: monotonic time at which the
    death was seen. `save_s`: seconds in which the run may save.
    """

    problem: Problem
    calls_go_on: bool
    at_s: float
    save_s: float

    def error(self) -> RayDied:
        return RayDied(self.problem, calls_go_on=self.calls_go_on)


class Started:
    """The processes of a Ray that this process has started: the GCS, the raylet, and the agents of the raylet."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._kinds: dict[psutil.Process, str] = {}
        self._logs = ""
        for process in processes:
            # A process that only helped to start the others has ended.
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                self._kinds[process] = _kind(words)
                self._logs = self._logs or _log_folder(words)
        self._looked_s = time.monotonic()
        self._death: Death | None = None
        # Process that is stopped now -> seconds for which it is known to be stopped
        self._stopped_s: dict[psutil.Process, float] = {}
        # Process that is stopped for `STOPPED_S` -> description of the stop
        self._stops: dict[psutil.Process, Death] = {}

    def answers(self, *, starting: bool = False) -> bool:
        """Return whether the GCS and the raylet live now, and neither of them is stopped.

        `starting`: whether the agent that is needed to start a worker counts as well.
        """
        if self._death is None:
            self._look_now(time.monotonic())
        if self._death is not None:
            return False
        return not any(
            starting or self._kinds[process] in (_GCS, _RAYLET)
            for process in self._stopped_s
        )

    def death(self, *, starting: bool = False) -> Death | None:
        """Return the first death of the GCS or the raylet; None while both live. Looks only every `LOOK_S` seconds.

        A raylet that is stopped for `STOPPED_S` counts as dead until it continues. `starting`: whether a worker is
        being started. Then the GCS and the agent that is needed to start it count as dead in the same way.
        """
        now = time.monotonic()
        if self._death is None and now >= self._looked_s + LOOK_S:
            self._look_now(now)
        if self._death is not None:
            return self._death
        for process, stop in self._stops.items():
            if starting or self._kinds[process] == _RAYLET:
                return stop
        return None

    def _look_now(self, now: float) -> None:
        """Record which process has died, which processes are stopped, and for how long. `now`: monotonic time."""
        self._death = self._dead(now)
        # A look adds at most `_COUNTED_S`: a driver that was stopped itself did not look in the meantime
        passed_s = min(now - self._looked_s, _COUNTED_S)
        before = self._stopped_s
        self._stopped_s = {
            process: before.get(process, 0.0) + passed_s
            for process, kind in self._kinds.items()
            if kind in _STARTS and _is_stopped(process)
        }
        self._stops = {
            process: self._stops.get(process) or self._stopped(process, now)
            for process, stopped_s in self._stopped_s.items()
            if stopped_s >= STOPPED_S
        }
        self._looked_s = now

    def _stopped(self, process: psutil.Process, now: float) -> Death:
        """Return the description of the stop of `process`, which has lasted for `STOPPED_S`. `now`: monotonic time."""
        kind = self._kinds[process]
        stopped = problem(
            "ray-died",
            "cluster.ray",
            f"process {process.pid}, state T for {self._stopped_s[process]:.0f} s",
            error="stopped" if kind == _RAYLET else "stopped-start",
            name=_STARTS[kind],
            logs=self._logs,
        )
        return Death(problem=stopped, calls_go_on=True, at_s=now, save_s=STOPPED_SAVE_S)

    def _dead(self, now: float) -> Death | None:
        """Return the death of the GCS or the raylet; None while both live."""
        ended = [process for process in self._kinds if _has_ended(process)]
        by_kind = {self._kinds[process]: process for process in ended}
        if _RAYLET in by_kind:
            how = how_ended(by_kind[_RAYLET].pid)
            # It ends itself, with an exit code, when it has lost one of its agents.
            error = "agent" if how.startswith(_EXIT_CODE) else _RAYLET
            return self._died(error, by_kind[_RAYLET], how, now, calls_go_on=False)
        if _GCS in by_kind:
            how = how_ended(by_kind[_GCS].pid)
            return self._died("gcs", by_kind[_GCS], how, now, calls_go_on=True)
        return None

    def _died(
        self,
        error: str,
        process: psutil.Process,
        how: str,
        now: float,
        *,
        calls_go_on: bool,
    ) -> Death:
        """Return the death of `process`. `error`: name of its text in the code `ray-died`. `how`: how it has ended."""
        died = problem(
            "ray-died",
            "cluster.ray",
            f"process {process.pid}" + (f", {how}" if how else ""),
            error=error,
            agents=", ".join(
                kind for kind in self._kinds.values() if kind not in (_GCS, _RAYLET)
            ),
            logs=self._logs,
        )
        save_s = SAVE_S if calls_go_on else ENDING_S
        return Death(problem=died, calls_go_on=calls_go_on, at_s=now, save_s=save_s)


class Head:
    """The GCS of a Ray that was joined, at an address. It counts as dead if it does not answer for `HEAD_GONE_S`."""

    def __init__(self, address: str) -> None:
        self._address = address
        host, _, port = address.rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port)
        self._next_s = 0.0
        # Monotonic time of the first of the last looks, all of which had no answer
        self._silent_since_s: float | None = None
        # Monotonic time of the first of the last calls of `answers`, none of which had an answer of the GCS
        self._unanswered_since_s: float | None = None
        self._told = False
        self._death: Death | None = None

    def answers(self, *, starting: bool = False) -> bool:
        """Return whether the GCS answers now. `starting` makes no difference.

        A GCS that stands still accepts connections but does not answer, so Ray's calls would wait for ever. The GCS
        counts as dead after `HEAD_GONE_S` without an answer.
        """
        now = time.monotonic()
        if self._replies():
            self._unanswered_since_s = None
            return True
        if self._unanswered_since_s is None:
            self._unanswered_since_s = now
        unanswered_s = now - self._unanswered_since_s
        self._warn_silent(unanswered_s)
        if unanswered_s >= HEAD_GONE_S:
            self._death = self._gone(unanswered_s, now)
        return False

    def _replies(self) -> bool:
        """Return whether the GCS reacts to the first bytes of HTTP/2, with which gRPC begins each connection.

        A GCS that requires TLS closes the connection. This is a reaction, too.
        """
        try:
            link = socket.create_connection((self._host, self._port), _CONNECT_S)
        except OSError:
            return False
        with link:
            try:
                link.sendall(_HTTP2)
                link.recv(1)
            except TimeoutError:
                return False
            except OSError:  # closed by the other side
                return True
        return True

    def _accepts(self) -> bool:
        """Return whether the GCS accepts a connection now."""
        try:
            socket.create_connection((self._host, self._port), _CONNECT_S).close()
        except OSError:
            return False
        return True

    def _warn_silent(self, silent_s: float) -> None:
        """Log a warning if the GCS has not answered for `SILENT_S`, once in each period without answers."""
        if SILENT_S <= silent_s < HEAD_GONE_S and not self._told:
            self._told = True
            text = self._problem("silent", silent_s).render()
            logging.getLogger("rlplace").warning("%s", text)

    def _gone(self, silent_s: float, now: float) -> Death:
        """Return the death of the GCS, which has not answered for `silent_s`. `now`: monotonic time."""
        died = self._problem("head", silent_s)
        return Death(problem=died, calls_go_on=True, at_s=now, save_s=HEAD_SAVE_S)

    def death(self, *, starting: bool = False) -> Death | None:
        """Return the death of the GCS; None while it may still live. Looks only every `HEAD_LOOK_S` seconds.

        The log gets one warning if the GCS does not answer for `SILENT_S` seconds. `starting` makes no difference.
        """
        now = time.monotonic()
        if self._death is not None or now < self._next_s:
            return self._death
        self._next_s = now + HEAD_LOOK_S
        if self._accepts():
            self._silent_since_s = None
            # A GCS that stands still accepts connections, too
            self._told = self._told and self._unanswered_since_s is not None
            return None
        if self._silent_since_s is None:
            self._silent_since_s = now
        silent_s = now - self._silent_since_s
        self._warn_silent(silent_s)
        if silent_s >= HEAD_GONE_S:
            self._death = self._gone(silent_s, now)
        return self._death

    def _problem(self, error: str, silent_s: float) -> Problem:
        return problem(
            "ray-died",
            "cluster.ray.address",
            self._address,
            error=error,
            silent_s=silent_s,
            left_s=HEAD_GONE_S - silent_s,
        )


class Servers:
    """Ends the run's waits if a process of Ray has died that the run depends on."""

    def __init__(self, watched: Started | Head) -> None:
        self._watched = watched
        # Monotonic time until which `check` raises nothing
        self._saving_until_s: float | None = None

    def death(self) -> Death | None:
        """Return the death of a process of Ray that the run depends on; None if all live."""
        return self._watched.death()

    def answers(self, *, starting: bool = False) -> bool:
        """Return whether calls to the GCS are answered now. `starting`: whether a worker has to be started, too."""
        return self._watched.answers(starting=starting)

    def unanswered(self) -> RayDied:
        """Return the error that the raylet of the run's own Ray has not answered its GCS.

        From then on, the GCS counts the machine as lost. `check` raises nothing for some seconds, in which the run
        saves.
        """
        lost = problem("ray-died", "cluster.ray", None, error="unanswered")
        self._saving_until_s = time.monotonic() + ENDING_S
        return RayDied(lost, calls_go_on=False)

    def check(self, *, idle: bool = False, starting: bool = False) -> None:
        """Raise RayDied if a process of Ray on which the run depends has died; see the docstring of the module.

        `idle`: whether no call of a worker is running, so that there is nothing to wait for. `starting`: whether a
        worker is being started.
        """
        died = self._watched.death(starting=starting)
        if died is None:
            return
        now = time.monotonic()
        if self._saving_until_s is not None and now < self._saving_until_s:
            return
        if died.calls_go_on and not idle and now < died.at_s + PATIENCE_S:
            return
        self._saving_until_s = now + died.save_s
        raise died.error()


def watched(processes: Sequence[psutil.Process], address: str | None) -> Servers | None:
    """Return the watch over Ray's processes; None if nothing of them can be seen.

    `processes`: the processes of a Ray that was started here; empty for a joined Ray. `address`: address of the GCS of
    a joined Ray; None: unknown.
    """
    if processes:
        return Servers(Started(processes))
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal():
        return Servers(Head(f"{host}:{port}"))
    return None


def how_ended(pid: int) -> str:
    """Return how a child process of this process has ended, such as "SIGKILL" or "exit code 1"; "" if it is unknown."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # not a child, or another thread has asked already
        return ""
    if ended is None:
        return ""
    if ended.si_code == os.CLD_EXITED:
        return f"{_EXIT_CODE} {ended.si_status}"
    return signal.Signals(ended.si_status).name


def _kind(words: Sequence[str]) -> str:
    """Return what a process of Ray is: "gcs_server", "raylet", or the name of an agent."""
    name = Path(words[0]).name if words else ""
    if name in (_GCS, _RAYLET):
        return name
    # Agents show their name, or are Python programs with a path.
    shown = name.removeprefix("ray::")
    scripts = [word for word in words if word.endswith(".py")]
    if not shown.endswith("Agent") and scripts:
        shown = "/".join(Path(scripts[0]).parts[-2:])
    return shown or "agent"


def _log_folder(words: Sequence[str]) -> str:
    """Return the folder of Ray's logs from the command line of its GCS; "" if it is not there."""
    for word in words:
        name, _, value = word.partition("=")
        if name in ("--log_dir", "--log-dir"):
            return value
    return ""


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _is_stopped(process: psutil.Process) -> bool:
    """Return whether a process is stopped by a signal or a debugger."""
    try:
        return process.status() in _STOPPED
    except psutil.NoSuchProcess:
        return False
