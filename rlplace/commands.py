"""How a command runs and ends: its error is printed to standard error, and its exit code tells the
kind of the error.
"""

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
    """Return the words with which the user started a command, such as `rlplace plan` or `python -m rlplace.plan`.

    `command`: name of the command, such as `plan`.
    """
    called = os.environ.get("RLPLACE_CALLED", "")
    if called.endswith((f"rlplace {command}", f"scripts/{command}")):
        return called
    return f"python -m rlplace.{command}"


def answered(command: Callable[[], int]) -> int:
    """Run a command, print the error that it raises to standard error, and return the exit code of the process.

    `command`: function that runs the command and returns its exit code. The exit code is WRONG for wrong usage, a wrong
    config, a wrong placement or a wrong cluster, and FAILED for every other RlplaceError, such as a file that cannot be
    written.
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
    """Run the command line of this process, then exit with its exit code.

    `main`: function that runs the command line and returns its exit code. If standard output could not be written, the
    exit code is FAILED.
    """
    streams = begin()
    code = main()
    sys.exit(code_with_output(code, streams))


def code_with_output(code: int, streams: Streams) -> int:
    """Return `code`; but if `code` is 0 and standard output could not be written, print the reason and return FAILED.

    `code`: exit code of the command. `streams`: standard streams of this process.
    """
    sys.stdout.flush()
    if streams.error is None:
        return code
    print(f"standard output: cannot write: {streams.error.strerror}", file=sys.stderr)
    return code or FAILED


def begin() -> Streams:
    """Prepare this process for a command, and return its standard streams, to which writes no longer raise.

    Network calls to this machine bypass the proxies from now on. If the working folder no longer exists, end the
    process with the exit code WRONG.
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
