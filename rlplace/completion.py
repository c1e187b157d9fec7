"""`python -m rlplace.completion`: the entry point of `rlplace.cli.completion`."""

from __future__ import annotations

from rlplace.cli.completion import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
