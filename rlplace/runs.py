"""`python -m rlplace.runs`: the entry point of `rlplace.cli.runs`."""

from __future__ import annotations

from rlplace.cli.runs import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
