"""`python -m rlplace.report`: the way in to `rlplace.cli.report`."""

from __future__ import annotations

from rlplace.cli.report import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
