"""Runs code that a model wrote against unit tests, in a process apart with limits of time, memory and processes.

The limits keep mistakes and runaways from hurting the run. They are no wall against malicious code: it may read what
its user may read and reach the network where the machine does. Put env ranks that score code into a container.

The process runs this file isolated from everything installed, so it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from typing import Any

_PR_SET_PDEATHSIG = 1
_CAPABILITIES_V3 = 0x20080522  # linux/capability.h
_NOBODY = 65534
_FILE_BYTES = 16 << 20  # of each file that the code may write
_CHUNK = 1 << 16
_LONGEST_REPORT = 1 << 20  # bytes; one line per test


def run_tests(
    code: str,
    tests: Sequence[str],
    *,
    timeout_s: float = 10.0,
    memory_bytes: int = 512 << 20,
) -> int:
    """Run `code`, then each test in its namespace; return how many passed, none where the code itself raised.

    Block until all is over, at most `timeout_s` and a moment; a test that was not reached has not passed. The process
    is dead when this returns. It can start no processes or threads of its own.
    """
    with tempfile.TemporaryDirectory(prefix="rlplace-code-") as folder:
        job = {
            "code": code,
            "tests": list(tests),
            "cpu_s": timeout_s,
            "memory_bytes": memory_bytes,
        }
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
                    env={
                        "PATH": os.defpath,
                        "HOME": folder,
                        "OMP_NUM_THREADS": "1",
                        "OPENBLAS_NUM_THREADS": "1",
                    },
                    pass_fds=(writer,),
                    start_new_session=True,  # so that all it starts can be killed at once
                )
            finally:
                os.close(writer)
            try:
                text = _read(reports.fileno(), timeout_s)
            finally:
                kill_session(process)
    return _passed(text, len(tests))


def _read(fd: int, timeout_s: float) -> bytes:
    """Return all that is written until the other end closes, or time is up."""
    deadline = time.monotonic() + timeout_s
    text = b""
    while len(text) < _LONGEST_REPORT:
        readable, _, _ = select.select(
            [fd], [], [], max(0.0, deadline - time.monotonic())
        )
        chunk = os.read(fd, _CHUNK) if readable else b""
        if not chunk:
            break
        text += chunk
    return text


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """End a process that began a session, and all that it started there."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        # The session's first process: its number is the group's
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _passed(text: bytes, tests: int) -> int:
    """Count in whole lines only: one that was cut off by death or deadline does not count."""
    # By the number of the test; the code may have written lines of its own before them
    results: dict[str, str] = {}
    for line in text.decode("utf-8", "replace").split("\n")[:-1]:
        number, _, result = line.partition(" ")
        results[number] = result
    return sum(results.get(str(number)) == "passed" for number in range(tests))


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
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    nothing = bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def main(report_fd: int) -> None:
    job = json.loads(Path("job.json").read_text(encoding="utf-8"))
    limit(job["memory_bytes"], job["cpu_s"])

    names: dict[str, Any] = {"__name__": "__main__"}
    if succeeds(job["code"], names):
        for number, test in enumerate(job["tests"]):
            result = "passed" if succeeds(test, names) else "failed"
            os.write(report_fd, f"{number} {result}\n".encode())
    os._exit(0)  # nothing that the code left behind runs any more


def succeeds(code: str, names: dict[str, Any]) -> bool:
    try:
        # Running it is the purpose of this process
        exec(compile(code, "<answer>", "exec"), names)
    except BaseException:  # noqa: BLE001  # whatever it raises, SystemExit too, is the answer's own failure
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
