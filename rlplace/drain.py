"""`python -m rlplace.drain`: the entry point of `rlplace.cli.drain`."""

from __future__ import annotations

from rlplace.cli.drain import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
