"""`python -m rlplace.replace RUN cluster.component_placement.env=0-7 ...`: move components of a run that goes on.

The run plans and proves the change between two iterations, and then makes it. Exit codes: 0 changed, 1 the change has
failed and the run keeps its placement, or there is no answer, 2 wrong usage, or the run refuses: nothing has moved.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.checkpoints.store import LOCK, in_use
from rlplace.codes import config_error, problem
from rlplace.commands import DONE, FAILED, WRONG, answered, typed
from rlplace.config import compose
from rlplace.config.keys import PLACEMENT
from rlplace.config.options import OptionParser
from rlplace.errors import OutputError
from rlplace.report.record import CONFIG
from rlplace.runtime.requests import REQUEST, answer_of, ask

WAIT_S = 3600.0  # for the border of an iteration


def main(argv: Sequence[str] | None = None) -> int:
    """Ask a run to change its placement, wait for the answer, print it, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    parser = request_parser(
        "replace", "Moves components of a run that goes on, between two iterations."
    )
    parser.add_argument(
        "places",
        metavar="OVERRIDE",
        nargs="*",
        help=f"{PLACEMENT}.<component>=<place>",
    )

    def command() -> int:
        options = parser.parse_intermixed_args(argv)
        folder = run_folder(options.run)
        places = _places(folder, options.places)
        return asked(folder, options.places, options.timeout, places=places)

    return answered(command)


def request_parser(command: str, description: str) -> OptionParser:
    """Return the parser of a command that asks a run: with RUN and --timeout. `command`: its name."""
    parser = OptionParser(typed(command), description=description, check=run_folder)
    parser.add_argument(
        "run",
        metavar="RUN",
        help="the folder of a run; or a folder of runs, of which one is under way",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=WAIT_S,
        metavar="SECONDS",
        help=f"to wait until the run takes the request ({WAIT_S:g})",
    )
    return parser


def run_folder(run: str) -> Path:
    """Return the folder of a run. `run`: this folder; or a folder of runs, of which one is under way.

    Raises ConfigError if there is no such run, and if several runs of the folder are under way.
    """
    folder = Path(run)
    if _is_run(folder):
        return folder
    # A folder such as runs/hopper, or runs
    below = [*folder.glob("*"), *folder.glob("*/*")]
    runs = [each for each in sorted(below) if _is_run(each)]
    under_way = [each for each in runs if in_use(each)]
    if len(under_way) == 1:
        return under_way[0]
    if under_way:
        raise config_error(
            "not-a-run",
            "RUN",
            run,
            error="several",
            runs=", ".join(str(each.relative_to(folder)) for each in under_way),
            newest=under_way[-1],
        )
    error = "ended" if runs else "none"
    raise config_error("not-a-run", "RUN", run, error=error, config=CONFIG, lock=LOCK)


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / LOCK).is_file()


def _places(folder: Path, words: Sequence[str]) -> Mapping[str, Any]:
    """Return component -> its place, from overrides of the config of a run.

    Raises ConfigError for an override of another key, and for one that cannot be parsed.
    """
    names: list[str] = []
    for word in words:
        key = word.partition("=")[0]
        name = key.removeprefix(f"{PLACEMENT}.").partition(".")[0]
        if "=" not in word or not key.startswith(f"{PLACEMENT}."):
            raise config_error("bad-change", key, word, error="other-key")
        names.append(name)
    if not names:
        raise config_error("bad-change", PLACEMENT, error="no-place", run=folder)
    (composed,) = compose.with_hydra(
        ["--config-dir", str(folder), "--config-name", "config", *words]
    )
    placement = composed.mapping["cluster"][PLACEMENT.rpartition(".")[2]]
    return {name: placement[name] for name in names}


def asked(
    folder: Path,
    words: Sequence[str],
    timeout_s: float,
    *,
    places: Mapping[str, Any] | None = None,
    drains: str = "",
    releases: str = "",
) -> int:
    """Send a request to a run, print its answer, and return the exit code.

    `words`: overrides with which the run would have to be resumed instead. The others are those of Request.
    """
    typed_words = shlex.join(words)
    if not in_use(folder):
        raise config_error(
            "bad-change",
            "RUN",
            str(folder),
            error="not-running",
            run=folder,
            words=typed_words,
        )
    try:
        request = ask(folder, places or {}, drains=drains, releases=releases)
    except OSError as error:
        raise OutputError.of(folder, error) from error
    if request is None:
        raise config_error(
            "bad-change", "RUN", str(folder), error="another", file=folder / REQUEST
        )
    answer = answer_of(folder, request, timeout_s)
    if isinstance(answer, str):
        late = problem(
            "bad-change",
            "RUN",
            str(folder),
            error=answer,
            run=folder,
            words=typed_words,
            seconds=timeout_s,
            longer=max(60.0, 10 * timeout_s),
        )
        print(late.render(), file=sys.stderr)
        return FAILED
    if answer.outcome == "changed":
        print(answer.text)
        return DONE
    print(answer.text, file=sys.stderr)
    return WRONG if answer.outcome == "refused" else FAILED
