"""The starter: a process that forks confined answer processes for the judge.

The judge forks the starter before it reads the tests, so no answer process has tests in its memory.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

from rlplace.envs.text.code import answer as answering
from rlplace.envs.text.code import confine


def start_answers(control: socket.socket, memory_bytes: int, cpu_s: float) -> None:
    """Start confined answer processes for the judge, one at a time, until the control socket closes.

    A message of the judge is one byte, with file descriptors::

        f    a socket: the process serves functions of the answer
        p    standard input, standard output, a file with the code: the process runs the answer as a program
        l    a pipe: the process writes the names of its layers of confinement

    The reply is the exit status of the process, in four bytes. `memory_bytes`, `cpu_s`: limits of memory and processor
    time of each process.
    """
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 3)
        if not message:
            os._exit(0)
        child = os.fork()
        if child == 0:
            control.close()
            _become_answer(message, fds, memory_bytes, cpu_s)
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(child, 0)
        control.sendall(struct.pack("=i", os.waitstatus_to_exitcode(status)))


def _become_answer(
    message: bytes, fds: list[int], memory_bytes: int, cpu_s: float
) -> None:
    """Confine this process, and run the answer's code in it. Does not return.

    `message`, `fds`: what the starter has received.
    """
    try:
        code = ""
        if message == b"p":
            os.dup2(fds[0], 0)
            os.dup2(fds[1], 1)
            with open(fds[2], encoding="utf-8", errors="replace") as file:
                code = file.read()
        layers = confine.confine(os.getcwd(), memory_bytes, cpu_s)
        if message == b"l":
            os.write(fds[0], ",".join(layers).encode())
            os._exit(0)
        if message == b"p":
            sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
            sys.stdout = open(1, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
            answering.run_program(code)
        answering.serve(socket.socket(fileno=fds[0]))
    finally:
        os._exit(1)
