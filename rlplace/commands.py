"""How a command ends: what it raises is told on standard error, its exit code says of what kind it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from rlplace.errors import ClusterError, ProblemsError, RlplaceError

DONE, FAILED, WRONG = 0, 1, 2


def typed(command: str) -> str:
    """Return how the user has called a command: `rlplace plan`, `scripts/plan`, else `python -m rlplace.plan`."""
    called = os.environ.get("RLPLACE_CALLED", "")
    return called if called.endswith((f"rlplace {command}", f"scripts/{command}")) else f"python -m rlplace.{command}"


def answered(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; that of wrong usage, a wrong config or cluster is WRONG.

    FAILED is that of all else that the package raises on purpose, such as a file that cannot be written.
    """
    try:
        return command()
    except (ProblemsError, ClusterError) as error:
        print(error, file=sys.stderr)
        return WRONG
    except RlplaceError as error:
        print(error, file=sys.stderr)
        return FAILED
    except SystemExit as done:  # of argparse
        return done.code if isinstance(done.code, int) else WRONG
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
