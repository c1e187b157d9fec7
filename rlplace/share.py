"""`python -m rlplace.share`: the entry point of `rlplace.cli.share`."""

from __future__ import annotations

from rlplace.cli.share import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
