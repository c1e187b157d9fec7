"""`python -m rlplace.export`: the entry point of `rlplace.cli.export`."""

from __future__ import annotations

from rlplace.cli.export import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
