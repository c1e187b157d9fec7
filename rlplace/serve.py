"""`python -m rlplace.serve`: the entry point of `rlplace.cli.serve`."""

from __future__ import annotations

import signal
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `serve`, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    from rlplace.cli.serve import main as command

    return command(argv)


if __name__ == "__main__":
    # Until signals are listened for, Ctrl-C ends the imports below without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rlplace.cli.train import program

    program(main)
