"""`python -m rlplace.plan`: the entry point of `rlplace.cli.plan`."""

from __future__ import annotations

from rlplace.cli.plan import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
