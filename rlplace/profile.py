"""`python -m rlplace.profile`: the entry point of `rlplace.cli.profile`."""

from __future__ import annotations

from rlplace.cli.profile import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
