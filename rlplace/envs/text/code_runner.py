"""Runs code that a model wrote against unit tests, in a separate process with limits of time, memory and processes.

The limits keep mistakes and endless loops from hurting the run. They do not stop malicious code: it can read what its
user can read, and reach the network of the machine. Put env ranks that score code into a container.

The process runs this file isolated from all installed packages, so the file imports the standard library only.
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

# Constants of the Linux kernel, for prctl (a signal at the parent's death) and of linux/capability.h
_PR_SET_PDEATHSIG = 1
_CAPABILITIES_V3 = 0x20080522
_NOBODY = 65534
# Bytes of each file that the code may write
_FILE_BYTES = 16 << 20
_CHUNK = 1 << 16
# Bytes of the report, which has one line for each test
_LONGEST_REPORT = 1 << 20


def run_tests(
    code: str,
    tests: Sequence[str],
    *,
    timeout_s: float = 10.0,
    memory_bytes: int = 512 << 20,
) -> int:
    """Run `code` in another process, then each of `tests` in the same namespace; return how many tests passed.

    Return 0 if `code` raises. A test that was not run within `timeout_s` has not passed. The call lasts hardly longer
    than `timeout_s`; then the process is killed. The process cannot start other processes or threads. `memory_bytes`:
    limit of the process.
    """
    with tempfile.TemporaryDirectory(prefix="rlplace-code-") as folder:
        # The job is a file in a folder of its own, the report comes through a pipe
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
                # Only this file and the standard library; output of the code goes
                # nowhere
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
                    # All that it starts is in its session, and can be killed at once
                    start_new_session=True,
                )
            finally:
                os.close(writer)
            try:
                text = _read(reports.fileno(), timeout_s)
            finally:
                kill_session(process)
    return _passed(text, len(tests))


def _read(fd: int, timeout_s: float) -> bytes:
    """Return all bytes from a pipe until it is closed for writing, or until `timeout_s` seconds have passed.

    `fd`: file descriptor of the pipe.
    """
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
    """Kill all processes of a session. `process`: the first process of the session."""
    # All of them may have ended already
    with contextlib.suppress(ProcessLookupError):
        # The number of the session's first process is also that of its group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _passed(text: bytes, tests: int) -> int:
    """Return how many of `tests` tests passed. `text`: the report, with one line for each test.

    A last line without a line break does not count, because a kill may have cut it off.
    """
    # Later lines replace earlier ones: the code may have written such lines before the tests
    results: dict[str, str] = {}
    for line in text.decode("utf-8", "replace").split("\n")[:-1]:
        number, _, result = line.partition(" ")
        results[number] = result
    return sum(results.get(str(number)) == "passed" for number in range(tests))


# ── in the separate process ──────────────────────────────────────────────────────────────────────────────────────────


def limit(memory_bytes: int, cpu_s: float) -> None:
    """Limit the memory, processor time, files and processes of this process. The limits cannot be lifted again.

    `cpu_s`: seconds of processor time.
    """
    if sys.platform == "linux":
        _bind_root()
        # If the parent is killed first, this process dies with it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    seconds = int(cpu_s) + 1
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 1),  # no further process or thread
    ):
        resource.setrlimit(what, (most, most))


def _bind_root() -> None:
    """If this process runs as root, change its real user and drop all capabilities.

    Root would be exempt from the limit of processes. The effective user stays root, so that an interpreter in root's
    folders can still be read.
    """
    if os.geteuid() != 0:
        return
    os.setresuid(_NOBODY, 0, 0)
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    nothing = bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def main(report_fd: int) -> None:
    """Run the code and the tests in job.json of the working folder.

    `report_fd`: file descriptor of a pipe, to which a line for each test is written.
    """
    job = json.loads(Path("job.json").read_text(encoding="utf-8"))
    limit(job["memory_bytes"], job["cpu_s"])

    # The tests see the names that the code has defined
    names: dict[str, Any] = {"__name__": "__main__"}
    if succeeds(job["code"], names):
        for number, test in enumerate(job["tests"]):
            result = "passed" if succeeds(test, names) else "failed"
            os.write(report_fd, f"{number} {result}\n".encode())
    # Without running exit handlers of the code
    os._exit(0)


def succeeds(code: str, names: dict[str, Any]) -> bool:
    """Run `code` with the global names `names`. Return True if it raises no exception."""
    try:
        # Executing untrusted code is the purpose of this process
        exec(compile(code, "<answer>", "exec"), names)
    except BaseException:  # noqa: BLE001  # whatever it raises, SystemExit too, is the answer's own failure
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
