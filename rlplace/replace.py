"""`python -m rlplace.replace`: the entry point of `rlplace.cli.replace`."""

from __future__ import annotations

from rlplace.cli.replace import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
