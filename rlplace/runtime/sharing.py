"""Start several runs that use the same accelerators in turns, and lease the accelerators to them.

::

    rlplace share ─┬─ pair of sockets ─── driver of run A ─── workers of A ─┐
                   │                                                        ├─ memory account of emulated accelerators
                   └─ pair of sockets ─── driver of run B ─── workers of B ─┘

This process starts the drivers, prints what they print, and is the arbiter. A driver that ends gives back everything.
If it was killed, its accelerators are leased to others only after the last of its processes has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rlplace.execution.arbiter import Arbiter, Refused, Share
from rlplace.execution.lease import MARK, VARIABLE, Invitation
from rlplace.json_text import parsed_object
from rlplace.workers.launch.devices import AccountOfRuns

_LOOK_S = 0.2
_READ = 1 << 16
# After this time, a wait is told on the terminal
_TOLD_S = 60.0
# Longest wait for the processes of a killed driver to end by themselves
_LINGER_S = 30.0
_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_PROC = Path("/proc")
_FOLDER = "rlplace-share-"
# File in this folder. This process and the drivers have it locked, so that nothing else removes the folder
_LOCK = "lock"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """A run to start. `name`: unlike those of the others. `words`: for `rlplace train`."""

    name: str
    words: Sequence[str]
    share: Share


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended. `code`: exit code of its driver. `used_s`: accelerator-seconds that were leased to it."""

    name: str
    code: int
    used_s: float


@dataclasses.dataclass(slots=True, kw_only=True)
class _Driver:
    """The driver of a run, and what this process knows of it.

    `end`: its pair of sockets; None: it has closed it. `mark`: of its processes. `asked`, `printed`: parts of lines
    that have come so far. `workers_ended`: whether it has said that its workers have ended. `died_s`: time when it was
    seen dead while workers may live. `told`: whether its present wait was told. `code`: its exit code; None: it lives.
    """

    run: SharedRun
    process: subprocess.Popen[bytes]
    end: socket.socket | None
    account: AccountOfRuns
    mark: str
    asked: bytes = b""
    printed: bytes = b""
    silent: bool = False
    workers_ended: bool = False
    died_s: float | None = None
    told: bool = False
    code: int | None = None


class Sharing:
    """Runs that share accelerators, from their start to the end of the last one."""

    def __init__(
        self,
        runs: Sequence[SharedRun],
        timeout_s: float,
        tell: Callable[[str], None],
    ) -> None:
        """Start nothing yet. `timeout_s`: longest wait for a lease. `tell`: prints a line."""
        self._runs = runs
        self._timeout_s = timeout_s
        self._tell = tell
        self._arbiter = Arbiter({run.name: run.share for run in runs})
        self._drivers: dict[str, _Driver] = {}
        self._ready = selectors.DefaultSelector()
        self._longest = max(len(run.name) for run in runs)
        # The first signal that has asked for the end
        self.asked: int | None = None

    def run(self) -> list[Ended]:
        """Start all runs, and return how they ended. A signal of this process is sent to all of them."""
        _remove_abandoned()
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = {each: signal.signal(each, self._forward) for each in _FORWARDED}
        try:
            for run in self._runs:
                self._drivers[run.name] = self._start(run, folder, lock)
            while any(driver.code is None for driver in self._drivers.values()):
                self._step()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            for driver in self._drivers.values():
                _end(driver)
            self._ready.close()
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
        now_s = time.monotonic()
        return [
            Ended(
                name=name,
                code=driver.code or 0,
                used_s=self._arbiter.used_s(name, now_s),
            )
            for name, driver in self._drivers.items()
        ]

    def _start(self, run: SharedRun, folder: Path, lock: int) -> _Driver:
        """Start the driver of a run. `folder`: for files of all runs. `lock`: descriptor of the lock of the folder."""
        account = AccountOfRuns(folder=folder / "accelerators", run=run.name)
        mine, theirs = socket.socketpair()
        invitation = Invitation(
            descriptor=theirs.fileno(),
            run=run.name,
            account=str(account.folder),
            timeout_s=self._timeout_s,
        )
        mark = f"{folder}/{run.name}"
        variables = {VARIABLE: invitation.text(), MARK: mark}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "rlplace.train", *run.words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno(), lock],
                env={**os.environ, **variables},
                # This process sends it each signal, once
                start_new_session=True,
            )
        driver = _Driver(run=run, process=process, end=mine, account=account, mark=mark)
        assert process.stdout is not None, "it is a pipe"
        mine.setblocking(False)
        os.set_blocking(process.stdout.fileno(), False)
        self._ready.register(mine, selectors.EVENT_READ, (driver, self._read_end))
        self._ready.register(
            process.stdout, selectors.EVENT_READ, (driver, self._read_output)
        )
        return driver

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or number
        for driver in self._drivers.values():
            if driver.process.poll() is None:
                driver.process.send_signal(number)

    def _step(self) -> None:
        """Wait for messages for a moment, and do what is due."""
        for key, _ in self._ready.select(_LOOK_S):
            driver, read = key.data
            read(driver)
        for driver in self._drivers.values():
            if driver.code is None:
                self._look_at(driver)
        self._grant()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read_end(self, driver: _Driver) -> None:
        """Take the messages of a run."""
        assert driver.end is not None, "only an open end is read"
        try:
            more = driver.end.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            self._ready.unregister(driver.end)
            driver.end.close()
            driver.end = None
            return
        *lines, driver.asked = (driver.asked + more).split(b"\n")
        for line in lines:
            self._take(driver, parsed_object(line))

    def _take(self, driver: _Driver, message: Mapping[str, Any]) -> None:
        name = driver.run.name
        now_s = time.monotonic()
        if "keep" in message:
            self._arbiter.keep(name, message["keep"], now_s)
        elif "end" in message:
            self._arbiter.leave(name, now_s)
            driver.workers_ended = True
            driver.account.open().release_run()
        else:
            driver.told = False
            try:
                self._arbiter.ask(
                    name,
                    message["ask"],
                    message["stage"],
                    now_s,
                    keeping=message.get("keeping", False),
                )
            except Refused as error:
                _send(driver, {"refused": str(error)})
        # Before the next message: another run may wait for what was given back
        self._grant()

    def _grant(self) -> None:
        """Lease what is free, and refuse what has waited too long."""
        now_s = time.monotonic()
        waited = {name: self._arbiter.waiting_s(name, now_s) for name in self._drivers}
        for name in self._arbiter.granted(now_s):
            _send(self._drivers[name], {"granted": waited[name]})
        for name, driver in self._drivers.items():
            waiting_s = self._arbiter.waiting_s(name, now_s)
            if waiting_s is None:
                continue
            if waiting_s > self._timeout_s:
                why = self._arbiter.explain(name, now_s)
                self._arbiter.withdraw(name)
                _send(driver, {"refused": f"after {waiting_s:.0f} s, {why}"})
            elif waiting_s > _TOLD_S and not driver.told:
                driver.told = True
                self._tell(self._arbiter.explain(name, now_s))

    # ── what drivers print ───────────────────────────────────────────────────────────────────────────────────────────

    def _read_output(self, driver: _Driver) -> None:
        """Print the lines that a driver has printed, with its name before them."""
        assert driver.process.stdout is not None, "it is a pipe"
        try:
            more = os.read(driver.process.stdout.fileno(), _READ)
        except BlockingIOError:
            return
        if not more:
            self._ready.unregister(driver.process.stdout)
            driver.silent = True
            more = b"\n" if driver.printed else b""
        *lines, driver.printed = (driver.printed + more).split(b"\n")
        for line in lines:
            name = driver.run.name.ljust(self._longest)
            self._tell(f"{name} │ {line.decode('utf-8', 'replace')}")

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_at(self, driver: _Driver) -> None:
        """Note the end of a driver. Its accelerators are given back once all of its processes have ended."""
        code = driver.process.poll()
        if code is None:
            return
        now_s = time.monotonic()
        if driver.died_s is None:
            driver.died_s = now_s
        if not driver.workers_ended:
            left = list(_marked(driver.mark))
            if left and now_s - driver.died_s < _LINGER_S:
                return
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._arbiter.leave(driver.run.name, now_s)
            driver.account.open().release_run()
            driver.workers_ended = True
        if not driver.silent and now_s - driver.died_s < _LINGER_S:
            # Its last lines are still to be printed
            return
        # A signal that has ended the process is shown as a shell shows it
        driver.code = code if code >= 0 else 128 - code
        self._tell(f"{driver.run.name} has ended with exit code {driver.code}")


def _send(driver: _Driver, message: Mapping[str, Any]) -> None:
    """Send a message to a driver. One that has just ended gets none."""
    if driver.end is not None:
        with contextlib.suppress(OSError):
            driver.end.sendall(_line(message))


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _end(driver: _Driver) -> None:
    """Close what belongs to a driver. One that lives, since this process has failed, is asked to end."""
    if driver.process.poll() is None:
        driver.process.terminate()
    if driver.end is not None:
        driver.end.close()
    if driver.process.stdout is not None:
        driver.process.stdout.close()


def _remove_abandoned() -> None:
    """Remove the folders of earlier commands that were killed, once their runs have ended, too."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        # A folder of another user, or one that is just made, cannot be locked
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _marked(mark: str) -> Iterator[int]:
    """Yield the processes of this user that have the mark of a run in their environment."""
    entry = f"{MARK}={mark}".encode()
    for folder in _PROC.glob("[0-9]*"):
        # A process may end meanwhile, or belong to another user
        with contextlib.suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
