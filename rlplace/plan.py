"""The command `python -m rlplace.plan`; in Python, this module is called: `rlplace.plan("hybrid_ppo")`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlplace.api.callables import PlanModule

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `plan`, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    from rlplace.cli.plan import main as command

    return command(argv)


sys.modules[__name__].__class__ = PlanModule

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
