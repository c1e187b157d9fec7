"""Watch Ray's own processes, which all workers of a run depend on, and name the one that has died.

::

    a wait of the driver ── check, twice a second ──▶ all alive: the wait goes on
                                 ├ the raylet died: its workers end now ──────────────────────▶ RayDied
                                 └ the GCS died: calls go on, so they may end, for PATIENCE_S ─▶ RayDied

After RayDied, `check` raises nothing for some seconds, in which the run saves. Ray itself notices the
death of its GCS after a minute or more, and then ends the driver without an error of Python.
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
HEAD_LOOK_S = 2.0  # shortest time between two looks at the head of a joined Ray
SILENT_S = 10.0  # for which a head does not answer until the output says so
HEAD_GONE_S = 30.0  # and until the run ends; a GCS that keeps its state elsewhere may be started again
HEAD_SAVE_S = 20.0  # for saving then: workers may have died with the head, which nothing would report
_CONNECT_S = 2.0
_GCS = "gcs_server"
_RAYLET = "raylet"
_EXIT_CODE = "exit code"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The death of a process of Ray.

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
        self._next_s = 0.0
        self._death: Death | None = None

    def answers(self) -> bool:
        """Return whether the GCS lives."""
        return self.death() is None

    def death(self) -> Death | None:
        """Return the first death of the GCS or the raylet; None while both live. Looks only every `LOOK_S` seconds."""
        now = time.monotonic()
        if self._death is None and now >= self._next_s:
            self._next_s = now + LOOK_S
            self._death = self._look(now)
        return self._death

    def _look(self, now: float) -> Death | None:
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
        self._told = False
        self._death: Death | None = None

    def answers(self) -> bool:
        """Return whether the GCS accepts a connection now."""
        try:
            socket.create_connection((self._host, self._port), _CONNECT_S).close()
        except OSError:
            return False
        return True

    def death(self) -> Death | None:
        """Return the death of the GCS; None while it may still live. Looks only every `HEAD_LOOK_S` seconds.

        The log gets one warning if the GCS does not answer for `SILENT_S` seconds.
        """
        now = time.monotonic()
        if self._death is not None or now < self._next_s:
            return self._death
        self._next_s = now + HEAD_LOOK_S
        if self.answers():
            self._silent_since_s = None
            self._told = False
            return None
        if self._silent_since_s is None:
            self._silent_since_s = now
        silent_s = now - self._silent_since_s
        if silent_s >= SILENT_S and not self._told:
            self._told = True
            text = self._problem("silent", silent_s).render()
            logging.getLogger("rlplace").warning("%s", text)
        if silent_s >= HEAD_GONE_S:
            died = self._problem("head", silent_s)
            self._death = Death(
                problem=died, calls_go_on=True, at_s=now, save_s=HEAD_SAVE_S
            )
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

    def answers(self) -> bool:
        """Return whether the GCS can be asked now."""
        return self._watched.answers()

    def check(self, *, idle: bool = False) -> None:
        """Raise RayDied if a process of Ray has died that the run depends on; the module's docstring says when.

        `idle`: whether no call of a worker is running, so that there is nothing to wait for.
        """
        died = self._watched.death()
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
