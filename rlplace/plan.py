"""`python -m rlplace.plan --config-name hybrid_ppo [key=value ...]`."""

from __future__ import annotations

import sys

from rlplace.cli.plan import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
