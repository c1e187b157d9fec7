"""The judge process. `main` is its whole program, which runs isolated from installed packages."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys

from rlplace.envs.text.code import confine
from rlplace.envs.text.code.starter import start_answers

# Bytes of memory that the judge may use beyond the limit of the answer
_OWN_BYTES = 1 << 30


def main() -> None:
    """Read the job from standard input, run its checks, and write one line for each check to the report.

    Arguments of the program: file descriptor of the report; bytes of memory and seconds of processor time of each
    answer process.
    """
    confine.die_with_parent()
    report = int(sys.argv[1])
    memory_bytes = int(sys.argv[2])
    cpu_s = float(sys.argv[3])
    # The starter is forked before this process knows the tests
    here, there = socket.socketpair()
    starter = os.fork()
    if starter == 0:
        os.close(report)
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        here.close()
        confine.die_with_parent()
        start_answers(there, memory_bytes, cpu_s)
    there.close()
    confine.hide_memory()
    most = memory_bytes + _OWN_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    job = json.loads(sys.stdin.buffer.read())
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if job.get("layers"):
        # No code is run: the report has the layers of confinement of an answer process
        socket.send_fds(here, [b"l"], [report])
        here.recv(4, socket.MSG_WAITALL)
    else:
        _run(job, here, report)
    os.close(report)
    # Nothing is left for the parent to wait for
    here.close()
    os.waitpid(starter, 0)
    os._exit(0)


def _run(job: dict[str, object], control: socket.socket, report: int) -> None:
    """Run the checks of a job. `control`: socket to the starter. `report`: file descriptor for the results."""
    from rlplace.envs.text.code.trial import Trial

    trial = Trial(str(job["code"]), control)
    checks = job["checks"]
    assert isinstance(checks, list)
    for number, check in enumerate(checks):
        try:
            passed = trial.passes(check)
        except BaseException:  # noqa: BLE001  # an invalid reply or a lost process: the check has failed
            passed = False
        result = "passed" if passed else "failed"
        os.write(report, f"{number} {result}\n".encode())
    trial.end()
