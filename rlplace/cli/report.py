"""`python -m rlplace.report RUN [--diff OTHER] [--out FILE] [--open]`: write the HTML page of one run, or of two runs.

Exit codes: 0 written, 1 the page cannot be written or opened, 2 wrong usage or no run with iterations.
"""

from __future__ import annotations

import argparse
import errno
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rlplace.checkpoints import write_whole
from rlplace.codes import config_error, problem
from rlplace.commands import DONE, answered, typed
from rlplace.config.options import OptionParser
from rlplace.errors import OutputError
from rlplace.report.page import render_comparison, render_report
from rlplace.report.record import read_run


def main(argv: Sequence[str] | None = None) -> int:
    """Write an HTML page about one run, or two runs side by side. Print its path, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    about = "Writes a run, or two of them side by side, as one HTML page."
    parser = OptionParser(
        typed("report"), description=about, check=lambda run: read_run(Path(run))
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    # `rlplace report runs/pole/*` with several runs, or two runs without --diff
    parser.add_argument("others", nargs="*", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--diff", metavar="OTHER", type=Path, help="the folder of a run to compare with"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="RUN/report.html, or RUN/diff.html"
    )
    parser.add_argument(
        "--open", action="store_true", help="in the browser of this machine"
    )

    def command() -> int:
        options = parser.parse_intermixed_args(argv)
        if options.others:
            raise config_error(
                "bad-option",
                "RUN",
                " ".join(map(str, [options.run, *options.others])),
                error="runs",
                first=options.run,
                last=options.others[-1],
                command=typed("report"),
            )
        run = read_run(options.run)
        other = None if options.diff is None else read_run(options.diff, "--diff")
        text = render_report(run) if other is None else render_comparison(run, other)
        out = options.out or run.folder / (
            "report.html" if other is None else "diff.html"
        )
        try:
            # e.g. a folder, or a device that a file would replace
            if out.exists() and not out.is_file():
                raise OSError(errno.EINVAL, "it is no file")
            write_whole(out, text)
        except OSError as error:
            raise OutputError.of(out, error, "--out", "a file") from error
        print(out)
        if options.open and not webbrowser.open(out.resolve().as_uri()):
            raise OutputError(problem("no-browser", "--open", str(out), page=out))
        return DONE

    return answered(command)
