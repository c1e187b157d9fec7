"""`python -m rlplace.train`: the entry point of `rlplace.cli.train`."""

from __future__ import annotations

import signal

# Until signals are listened for, Ctrl-C ends the imports below without a word.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from rlplace.cli.train import main, program

__all__ = ["main"]

if __name__ == "__main__":
    program()
