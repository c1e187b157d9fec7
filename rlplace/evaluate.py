"""`python -m rlplace.evaluate`: the entry point of `rlplace.cli.evaluate`."""

from __future__ import annotations

from rlplace.cli.evaluate import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
