"""The command `python -m rlplace.train`; in Python, this module is called: `run = rlplace.train("cartpole")`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlplace.api.callables import TrainModule

if TYPE_CHECKING:
    from rlplace.contract.job import Job

__all__ = ["main"]


def main(argv: Sequence[str] | None = None, job: Job | None = None) -> int:
    """Run the command `train`, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process. `job`: a custom job
    that replaces the `job` of the config; None: the config names the job.
    """
    from rlplace.cli.train import main as command

    return command(argv, job)


sys.modules[__name__].__class__ = TrainModule

if __name__ == "__main__":
    # Until signals are listened for, Ctrl-C ends the imports below without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rlplace.cli.train import program

    program()
