"""`python -m rlplace.doctor`: the entry point of `rlplace.cli.doctor`."""

from __future__ import annotations

from rlplace.cli.doctor import main

__all__ = ["main"]

if __name__ == "__main__":
    from rlplace.commands import run_command

    run_command(main)
