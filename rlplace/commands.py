"""How a command runs and ends: errors are printed to standard error, and the exit code shows the kind of error."""

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
    """Return how the user has started a command, without arguments: `rlplace plan` or `python -m rlplace.plan`.

    `command`: name of the command, such as `plan`.
    """
    called = os.environ.get("RLPLACE_CALLED", "")
    if called.endswith((f"rlplace {command}", f"scripts/{command}")):
        return called
    return f"python -m rlplace.{command}"


def answered(command: Callable[[], int]) -> int:
    """Run a command, and return the exit code for the process. If the command raises an error, print the error.

    `command`: function that runs the command and returns its exit code. After an error, the exit code is WRONG for
    wrong usage, config, placement or cluster, and FAILED for any other RlplaceError, such as a file that cannot be
    written. Errors are printed to standard error.
    """
    try:
        code = command()
        # An error of buffered output is raised here, not when the interpreter ends
        print(end="", flush=True)
        return code
    except (ProblemsError, ClusterError) as error:
        print(error, file=sys.stderr)
        return WRONG
    except RlplaceError as error:
        print(error, file=sys.stderr)
        return FAILED
    except SystemExit as done:  # raised by argparse
        if isinstance(done.code, int):
            return done.code
        return WRONG
    except BrokenPipeError:  # the reader closed the pipe, as `... | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def run_command(main: Callable[[], int]) -> NoReturn:
    """Prepare this process, call `main`, and end the process with the exit code that `main` returns.

    `main`: function that runs the command line of this process. If `main` returns 0 but standard output could not be
    written, the exit code is FAILED.
    """
    streams = begin()
    code = main()
    sys.exit(code_with_output(code, streams))


def code_with_output(code: int, streams: Streams) -> int:
    """Return the exit code of a process whose command ended with `code`.

    This is `code`, or FAILED if `code` is 0 but standard output could not be written. The reason is then printed to
    standard error. `streams`: the standard streams of this process.
    """
    sys.stdout.flush()
    if streams.error is None:
        return code
    print(f"standard output: cannot write: {streams.error.strerror}", file=sys.stderr)
    return code or FAILED


def begin() -> Streams:
    """Prepare this process for a command: make writes to standard output and standard error safe, and bypass proxies.

    Writes to the returned streams do not raise errors. Network calls to this machine do not use proxies from now on. If
    the working folder does not exist any more, end the process with the exit code WRONG.
    """
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
