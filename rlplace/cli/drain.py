"""`python -m rlplace.drain RUN NODE`: empty a node of a run that goes on, so that the machine can leave.

The run moves to the nearest placement on its other nodes, between two iterations. Exit codes: 0 the node is empty, or
used again; 1 the change has failed and the run keeps its placement, or there is no answer; 2 wrong usage, or the run
refuses: nothing has moved.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.cli.replace import asked, request_parser, run_folder
from rlplace.commands import answered


def main(argv: Sequence[str] | None = None) -> int:
    """Ask a run to empty a node, wait for the answer, print it, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    parser = request_parser(
        "drain", "Empties a node of a run that goes on, between two iterations."
    )
    parser.add_argument(
        "node", metavar="NODE", help="the number of the node, or its address"
    )
    parser.add_argument(
        "--release",
        action="store_true",
        help="the run may use the node again: the same machine, or one that has joined",
    )

    def command() -> int:
        options = parser.parse_intermixed_args(argv)
        folder = run_folder(options.run)
        node = options.node
        if options.release:
            return asked(folder, (), options.timeout, releases=node)
        return asked(folder, (), options.timeout, drains=node)

    return answered(command)
