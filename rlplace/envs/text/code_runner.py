"""Runs code that a model wrote against unit tests, in a process apart with limits of time, memory and processes.

The limits keep mistakes and runaways from hurting the run. They are no wall against malicious code: it may read what
its user may read and reach the network where the machine does. Put env ranks that score code into a container.

The process runs this file isolated from everything installed, so it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

_PR_SET_PDEATHSIG = 1
_CAPABILITIES_V3 = 0x20080522  # linux/capability.h
_NOBODY = 65534
_FILE_BYTES = 16 << 20  # of each file that the code may write
_LONGEST_TEXT = 500  # characters of what a test raised
_CHUNK = 1 << 16
_LONGEST_REPORT = 1 << 20  # bytes; one line per test


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TestReport:
    """Result of one piece of code."""

    __test__ = False  # not a test of pytest's

    passed: int  # tests
    ended: Literal["finished", "timeout", "died"]
    failures: tuple[str, ...]  # what each failed test, or the code itself, raised


def run_tests(code: str, tests: Sequence[str], *, timeout_s: float = 10.0, memory_bytes: int = 512 << 20) -> TestReport:
    """Run `code`, then each test in its namespace. Block until all is over, at most `timeout_s` and a moment.

    The process is dead when this returns. It can start no processes or threads of its own.
    """
    with tempfile.TemporaryDirectory(prefix="rlplace-code-") as folder:
        job = {"code": code, "tests": list(tests), "cpu_s": timeout_s, "memory_bytes": memory_bytes}
        (Path(folder) / "job.json").write_text(json.dumps(job), encoding="utf-8")
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb", buffering=0) as reports:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", __file__, str(writer)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                    pass_fds=(writer,),
                    start_new_session=True,  # so that all it starts can be killed at once
                )
            finally:
                os.close(writer)
            try:
                text, in_time = _read(reports.fileno(), timeout_s)
            finally:
                _kill(process)
    return _report(text, len(tests), in_time)


def _read(fd: int, timeout_s: float) -> tuple[bytes, bool]:
    """Return all that is written until the other end closes, and whether it closed in time."""
    deadline, text = time.monotonic() + timeout_s, b""
    while len(text) < _LONGEST_REPORT:
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return text, False
        chunk = os.read(fd, _CHUNK)
        if not chunk:
            return text, True
        text += chunk
    return text, True


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)  # the session's first process: its number is the group's
    process.wait()


def _report(text: bytes, tests: int, in_time: bool) -> TestReport:
    """Read whole lines only: one that was cut off by death or deadline does not count."""
    lines = []
    for line in text.decode("utf-8", "replace").split("\n")[:-1]:
        try:
            lines.append(json.loads(line))
        except ValueError:  # the code wrote into the pipe
            continue
    results = [line for line in lines if isinstance(line, dict)]
    raised = {r["test"]: "raised" in r for r in results if isinstance(r.get("test"), int) and 0 <= r["test"] < tests}
    failures = tuple(str(r["raised"]) for r in results if "raised" in r)
    finished = any("finished" in r for r in results)
    ended: Literal["finished", "timeout", "died"] = "finished" if finished else "died" if in_time else "timeout"
    return TestReport(passed=sum(not failed for failed in raised.values()), ended=ended, failures=failures)


# ── in the process apart ─────────────────────────────────────────────────────────────────────────────────────────────


def limit(memory_bytes: int, cpu_s: float) -> None:
    """Limit this process, for good."""
    if sys.platform == "linux":
        _bind_root()
        # Dies with its parent, should that be killed before it kills this.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    seconds = int(cpu_s) + 1
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 1),  # this one: no further process or thread
    ):
        resource.setrlimit(what, (most, most))


def _bind_root() -> None:
    """As root, take another real user and give up every capability: the limit of processes does not bind root.

    The effective user stays, so that an interpreter in root's own folders can still be read.
    """
    if os.geteuid() != 0:
        return
    os.setresuid(_NOBODY, 0, 0)
    header, nothing = struct.pack("=Ii", _CAPABILITIES_V3, 0), bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def main(report_fd: int) -> None:
    job = json.loads(Path("job.json").read_text(encoding="utf-8"))
    limit(job["memory_bytes"], job["cpu_s"])

    def report(**line: Any) -> None:
        os.write(report_fd, json.dumps(line).encode() + b"\n")

    names: dict[str, Any] = {"__name__": "__main__"}
    failure = attempt(job["code"], names)
    if failure is not None:
        report(raised=failure)
    else:
        for index, test in enumerate(job["tests"]):
            failure = attempt(test, names)
            report(test=index) if failure is None else report(test=index, raised=failure)
    report(finished=True)
    os._exit(0)  # nothing that the code left behind runs any more


def attempt(code: str, names: dict[str, Any]) -> str | None:
    """Return what the code raised; None if nothing."""
    try:
        exec(compile(code, "<answer>", "exec"), names)  # running it is the purpose of this process
    except BaseException as error:  # noqa: BLE001  # whatever it raises, SystemExit too, is the answer's own failure
        return f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
