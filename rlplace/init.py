"""`python -m rlplace.init`: the entry point of `rlplace.cli.init`."""

from __future__ import annotations

from rlplace.cli.init import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
