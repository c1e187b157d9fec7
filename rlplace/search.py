"""`python -m rlplace.search`: the entry point of `rlplace.cli.search`."""

from __future__ import annotations

from rlplace.cli.search import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
