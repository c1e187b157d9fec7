"""Runs an answer's code against checks in a judge process, and counts the checks that pass."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.envs.text.code.confine import LAYERS

# The program of the judge process. It imports the modules of this folder, but no other part of rlplace.
_PROGRAM = """
import sys, types
name = ""
for part in "rlplace.envs.text.code".split("."):
    name = f"{name}.{part}".lstrip(".")
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules[name].__path__.append(sys.argv.pop(1))
from rlplace.envs.text.code import process
process.main()
"""
_HERE = str(Path(__file__).parent)
_CHUNK = 1 << 16
# Bytes of the report, which has one line for each check
_LONGEST_REPORT = 1 << 20
# Limits of a judge process that runs no code
_PROBE_S = 30.0
_PROBE_BYTES = 512 << 20
# Seconds for removing the folder of an answer
_REMOVAL_S = 30.0


def run_checks(
    code: str,
    checks: Sequence[Mapping[str, Any]],
    *,
    timeout_s: float = 10.0,
    memory_bytes: int = 512 << 20,
) -> int:
    """Run `code` in a confined process, and return how many of `checks` it passes.

    `checks`: as `forms.read` returns them. A check that was not reached in time has not passed. Blocks for little more
    than `timeout_s`; then all processes are dead. The code cannot start processes or threads, cannot reach the network,
    other processes or other files, and cannot make this function raise an exception.
    """
    job = {"code": code, "checks": list(checks)}
    text = _judged(job, timeout_s, memory_bytes)
    return _passed(text, len(checks))


@functools.cache
def missing_layers() -> tuple[str, ...]:
    """Return the layers of `confine.LAYERS` that this machine does not have. The first call takes a moment."""
    report = _judged({"layers": True}, _PROBE_S, _PROBE_BYTES)
    present = report.decode("ascii", "replace").split(",")
    return tuple(layer for layer in LAYERS if layer not in present)


def _judged(job: Mapping[str, Any], timeout_s: float, memory_bytes: int) -> bytes:
    """Run a judge process on a job, and return its report. When this returns, all its processes have ended."""
    with _folder() as folder, tempfile.TemporaryFile() as given:
        given.write(json.dumps(job).encode("utf-8"))
        given.seek(0)
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb", buffering=0) as reports:
            limits = [str(memory_bytes), str(timeout_s)]
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _PROGRAM, _HERE, str(writer), *limits],
                    stdin=given,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env={
                        "PATH": os.defpath,
                        "HOME": folder,
                        "TMPDIR": folder,
                        "OMP_NUM_THREADS": "1",
                        "OPENBLAS_NUM_THREADS": "1",
                    },
                    pass_fds=(writer,),
                    # All that the judge starts is in its session, and can be killed at once
                    start_new_session=True,
                )
            finally:
                os.close(writer)
            try:
                text = _read(reports.fileno(), timeout_s)
            finally:
                kill_session(process)
    return text


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Provide an empty folder, and remove it with all that the code has left in it."""
    folder = tempfile.mkdtemp(prefix="rlplace-code-")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str) -> None:
    """Remove a folder with everything in it, as far as the system allows."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        # `rm` follows folders that are nested more deeply than Python's own function can
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    [*command, folder],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=_REMOVAL_S,
                    check=False,
                )


def _read(fd: int, timeout_s: float) -> bytes:
    """Return all bytes that are written to a pipe until its other end closes, or until `timeout_s` is over.

    `fd`: file descriptor of the pipe.
    """
    deadline = time.monotonic() + timeout_s
    # `poll` accepts file descriptors above 1023, `select` does not
    waiting = select.poll()
    waiting.register(fd, select.POLLIN | select.POLLHUP)
    text = b""
    while len(text) < _LONGEST_REPORT:
        left_s = max(0.0, deadline - time.monotonic())
        ready = waiting.poll(left_s * 1000)
        chunk = os.read(fd, _CHUNK) if ready else b""
        if not chunk:
            break
        text += chunk
    return text


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that is the first of its session, and all other processes of the session."""
    # All of them may have ended already
    with contextlib.suppress(ProcessLookupError):
        # The number of the session's first process is also that of its group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _passed(text: bytes, checks: int) -> int:
    """Return how many checks passed, by the report `text`.

    Only whole lines count, since a kill may have cut off the last line.
    """
    lines = text.decode("ascii", "replace").split("\n")[:-1]
    return sum(f"{number} passed" in lines for number in range(checks))
