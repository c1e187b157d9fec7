"""The process in which code of a model runs: limits itself, runs code and tests, reports each test as one line of JSON.

Run as a file by `code_runner`, isolated from everything installed: it imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_CAPABILITIES_V3 = 0x20080522  # linux/capability.h
_NOBODY = 65534
_FILE_BYTES = 16 << 20  # of each file that the code may write
_LONGEST_TEXT = 500  # characters of what a test raised


def limit(memory_bytes: int, cpu_s: float) -> None:
    """For this process, for good."""
    if sys.platform == "linux":
        _bind_root()
        # Dies with whoever started this, should it be killed before it kills.
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
    """The limit of processes does not bind root: take another real user and give up every capability.

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
    """What the code raised; None if nothing."""
    try:
        exec(compile(code, "<answer>", "exec"), names)  # to run it is what this process is for
    except BaseException as error:  # noqa: BLE001  # whatever it raises, SystemExit too, is the answer's own failure
        return f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
