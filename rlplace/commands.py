"""How a command ends: what it raises is told on standard error, its exit code says of what kind it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from rlplace.codes import config_error
from rlplace.errors import ClusterError, ProblemsError, RlplaceError
from rlplace.proxies import keep_local
from rlplace.streams import Streams

DONE = 0
FAILED = 1
WRONG = 2


def typed(command: str) -> str:
    """Return how the user has called a command: `rlplace plan`, `scripts/plan`, else `python -m rlplace.plan`."""
    called = os.environ.get("RLPLACE_CALLED", "")
    if called.endswith((f"rlplace {command}", f"scripts/{command}")):
        return called
    return f"python -m rlplace.{command}"


def answered(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; that of wrong usage, a wrong config or cluster is WRONG.

    FAILED is that of all else that the package raises on purpose, such as a file that cannot be written.
    """
    try:
        code = command()
        print(end="", flush=True)  # what is left would fail when the interpreter ends
        return code
    except (ProblemsError, ClusterError) as error:
        print(error, file=sys.stderr)
        return WRONG
    except RlplaceError as error:
        print(error, file=sys.stderr)
        return FAILED
    except SystemExit as done:  # of argparse
        if isinstance(done.code, int):
            return done.code
        return WRONG
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run the command line of this process, and end it with the exit code; FAILED where its output was not written."""
    streams = begin()
    code = main()
    sys.exit(code_with_output(code, streams))


def code_with_output(code: int, streams: Streams) -> int:
    """Return the exit code of a command: FAILED, with the reason on standard error, where output was not written."""
    sys.stdout.flush()
    if streams.error is None:
        return code
    print(f"standard output: cannot write: {streams.error.strerror}", file=sys.stderr)
    return code or FAILED


def begin() -> Streams:
    """Make a command's standard streams safe, keep its own calls from proxies; end it where its folder is gone."""
    streams = Streams()
    keep_local()
    try:
        os.getcwd()
    except OSError as error:
        print(
            config_error(
                "no-working-folder",
                "command line",
                os.environ.get("PWD"),
                reason=error.strerror,
            ),
            file=sys.stderr,
        )
        sys.exit(WRONG)
    return streams
