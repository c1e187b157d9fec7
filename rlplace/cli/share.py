"""`python -m rlplace.share A [key=value ...] B [key=value ...]`: train several runs that use accelerators in turns.

The stages of one run use accelerators while those of the others leave them idle. All runs are proven together before
anything starts. Exit codes: 0 all runs are done, 2 wrong usage, config or placement, 3 the runs do not fit together,
128 + number of the signal that stopped them, else the first exit code of a run that is not 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlplace.cli.train import config_of_the_run
from rlplace.codes import config_error
from rlplace.commands import DONE, answered, typed
from rlplace.config import compose
from rlplace.config.options import OptionParser
from rlplace.config.paths import names_config
from rlplace.errors import ConfigError, PlacementError
from rlplace.execution.arbiter import Share
from rlplace.foresight.turns import RunSeconds, Turn, Turns, predict_turns
from rlplace.placement.memory.joint import JointProof
from rlplace.report.record import CONFIG
from rlplace.runtime.joint_plan import (
    PlannedRun,
    check,
    listed,
    proof_of,
    shortages,
)
from rlplace.runtime.prepare import Prepared, check_run, prepare_composed
from rlplace.runtime.sharing import Ended, SharedRun, Sharing
from rlplace.tables import chapter, table
from rlplace.units import show_bytes

DOES_NOT_FIT = 3
_SHARED = "cluster.shared=true"
_TIMEOUT_S = 3600.0
_PICTURE = 60  # characters of the picture of turns
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A run of the command line. `given`: its words as typed. `words`: those for `rlplace train`."""

    given: Sequence[str]
    words: Sequence[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `share`, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    parser = OptionParser(
        typed("share"),
        description="Trains several runs that use the same accelerators in turns, proven together.",
    )
    parser.add_argument(
        "words",
        metavar="RUN [OVERRIDE ...]",
        nargs="+",
        help="a config or the folder of a run, and its overrides; then the next run",
    )
    parser.add_argument(
        "--plan", action="store_true", help="show the joint plan; start nothing"
    )
    parser.add_argument(
        "--weights",
        metavar="NUMBER,...",
        help="accelerator-seconds of the runs, relative to each other (1,1)",
    )
    parser.add_argument(
        "--priorities",
        metavar="NUMBER,...",
        help="a run with a higher number goes first (0,0)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help=f"longest wait of a run for its turn ({_TIMEOUT_S:g})",
    )
    return answered(lambda: _share(parser.parse_intermixed_args(argv)))


def _share(options: argparse.Namespace) -> int:
    named = _runs_of(options.words)
    shares = _shares(options, len(named))
    jobs = [_planned(run.words) for run in named]
    names = _names([job.view.name for job in jobs])
    runs = [
        PlannedRun(name=name, job=job, share=share)
        for name, job, share in zip(names, jobs, shares, strict=True)
    ]
    by_name = dict(zip(names, named, strict=True))
    wrong = [*check(runs)]
    for run in runs:
        if not options.plan:
            wrong += check_run(run.job)
    if wrong:
        raise ConfigError(wrong)
    proof = proof_of(runs)
    print(_text(runs, proof), flush=True)

    def planning(name: str, more: Sequence[str]) -> Prepared:
        return _planned([*by_name[name].words, *more])

    def command(more: Mapping[str, Sequence[str]]) -> str:
        words = []
        for name, run in by_name.items():
            words += [*run.given, *more.get(name, ())]
        return f"{typed('share')} {shlex.join(words)}"

    lacking = [*shortages(runs, proof, planning, command)]
    for run in runs:
        lacking += run.job.all_shortages
    if lacking:
        print(f"\n{PlacementError(lacking)}", file=sys.stderr)
        return DOES_NOT_FIT
    if options.plan:
        return DONE
    print(flush=True)
    return _run(runs, by_name, options.timeout)


def _run(
    runs: Sequence[PlannedRun], named: Mapping[str, Named], timeout_s: float
) -> int:
    """Train the runs, and return the exit code."""
    sharing = Sharing(
        [
            SharedRun(
                name=run.name, words=[*named[run.name].words, _SHARED], share=run.share
            )
            for run in runs
        ],
        timeout_s,
        tell=_tell,
    )
    ended = sharing.run()
    _tell(_ends(ended))
    codes = [each.code for each in ended if each.code]
    if sharing.asked is not None and codes:
        return 128 + sharing.asked
    return next(iter(codes), DONE)


def _tell(line: str) -> None:
    print(line, flush=True)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _runs_of(words: Sequence[str]) -> list[Named]:
    """Return the runs that a command line names. Raises ConfigError for fewer than two."""
    found: list[list[str]] = []
    for word in words:
        if names_config(word):
            found.append([word])
        elif found:
            found[-1].append(word)
        else:
            raise config_error(
                "cannot-share",
                "RUN",
                word,
                error="no-run",
                program=typed("share"),
                word=shlex.quote(word),
            )
    if len(found) < 2:
        raise config_error(
            "cannot-share",
            "RUN",
            error="one-run",
            program=typed("share"),
            words=shlex.join(words),
            other=f"{shlex.quote(words[0])} runner.seed=1",
        )
    return [Named(given=run, words=_words_of(run)) for run in found]


def _words_of(run: Sequence[str]) -> list[str]:
    """Return the words of a run for `rlplace train`. The folder of a run is resumed."""
    first, *overrides = run
    if (Path(first) / CONFIG).is_file():
        return [f"resume={first}", *overrides]
    return [*run]


def _planned(words: Sequence[str]) -> Prepared:
    """Return the planned job of a run that shares accelerators. Raises ConfigError."""
    argv = [*words, _SHARED]
    jobs = compose.with_hydra([*argv, *config_of_the_run(argv)])
    if len(jobs) != 1:
        raise config_error("cannot-share", "RUN", error="sweep", run=words[0])
    # With a simulator, since the weights of a policy count
    return prepare_composed(jobs[0], simulator=True)


def _names(titles: Sequence[str]) -> list[str]:
    """Return a name for each run: the title of its plan, with a number behind it if others have the same."""
    names = []
    for number, title in enumerate(titles):
        name = title
        if titles.count(title) > 1:
            name = f"{title}-{titles[: number + 1].count(title)}"
        names.append(name)
    return names


def _shares(options: argparse.Namespace, count: int) -> list[Share]:
    """Return the share of each run. Raises ConfigError for wrong numbers."""
    weights = _numbers("--weights", options.weights, count, 1.0)
    priorities = _numbers("--priorities", options.priorities, count, 0.0)
    if min(weights) <= 0:
        raise _numbers_error("--weights", options.weights, count, 1.0)
    return [
        Share(weight=weight, priority=int(priority))
        for weight, priority in zip(weights, priorities, strict=True)
    ]


def _numbers(option: str, text: str | None, count: int, usual: float) -> list[float]:
    if text is None:
        return [usual] * count
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count:
        raise _numbers_error(option, text, count, usual)
    return found


def _numbers_error(option: str, text: str, count: int, usual: float) -> ConfigError:
    # With another sign between them: 2:1
    numbers = re.findall(r"[0-9]+(?:\.[0-9]+)?", text)
    is_list = re.fullmatch(r"[\s\[(]*[0-9.]+(?:[\s,;:/]+[0-9.]+)*[\s\])]*", text)
    if is_list is None or len(numbers) != count:
        numbers = [f"{usual:g}"] * count
    line = ",".join(numbers)
    return config_error(
        "cannot-share",
        option,
        text,
        error="number",
        option=option,
        runs=count,
        line=line,
    )


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _text(runs: Sequence[PlannedRun], proof: JointProof) -> str:
    """Return the joint plan as text: stages, memory, and turns with their predicted seconds."""
    notes: list[str] = []
    seconds = [run.seconds(notes.append) for run in runs]
    known = [found for found in seconds if found is not None]
    title = f"{len(runs)} runs in turns on {runs[0].job.view.machines}"
    chapters = [title, _stages(runs, seconds), _memory(proof)]
    if len(known) == len(runs):
        chapters.append(_turns(known, predict_turns(known)))
    else:
        notes.append(
            "seconds are predicted from a profile: rlplace profile CONFIG cluster.shared=true, or a run"
        )
    if notes:
        chapters.append("\n".join(notes))
    return "\n\n".join(chapters)


def _stages(runs: Sequence[PlannedRun], seconds: Sequence[RunSeconds | None]) -> str:
    rows = [("run", "weight", "priority", "stage", "accelerators", "seconds")]
    for run, predicted in zip(runs, seconds, strict=True):
        first = (run.name, f"{run.share.weight:g}", str(run.share.priority))
        took = {}
        if predicted is not None:
            took = {each.stage: f"{each.seconds:.3f}" for each in predicted.stages}
        for stage, accelerators in run.stages.items():
            place = listed(accelerators) or "none"
            rows.append((*first, stage, place, took.get(stage, "-")))
            first = ("", "", "")
    return chapter("stages, each with the accelerators that it waits for", table(rows))


def _memory(proof: JointProof) -> str:
    """Return the joint memory proof as text."""
    if not proof.accelerators:
        return "memory: the runs have no accelerator in common"
    rows = [("accelerators", "works", "needs", "the others keep", "together", "room")]
    for each in proof.accelerators:
        keep = sum(sum(sizes.values()) for sizes in each.staying.values())
        rows.append(
            (
                listed(each.numbers),
                each.works,
                show_bytes(each.work_bytes),
                show_bytes(keep),
                show_bytes(each.total_bytes),
                show_bytes(each.room_bytes) if each.room_bytes else "not known",
            )
        )
    lines = table(rows)
    lines.append("")
    lines.append(
        "the runs fit together" if proof.fits else "the runs do not fit together"
    )
    return chapter("memory of each accelerator", lines)


def _turns(runs: Sequence[RunSeconds], turns: Turns) -> str:
    """Return the predicted turns as text: a picture, and the seconds of an iteration."""
    longest = max(run.alone_s for run in runs)
    # The first cycle differs: all runs begin at once
    began_s = 2.0 * sum(run.alone_s for run in runs)
    column_s = 3.0 * longest / _PICTURE
    letters = dict(zip([run.name for run in runs], _LETTERS, strict=False))
    lines = []
    accelerators = sorted({n for turn in turns.turns for n in turn.accelerators})
    pictures: dict[str, list[int]] = {}
    for number in accelerators:
        picture = _drawn(number, turns.turns, letters, began_s, column_s)
        pictures.setdefault(picture, []).append(number)
    width = max((len(listed(each)) for each in pictures.values()), default=0)
    for picture, numbers in pictures.items():
        lines.append(f"{listed(numbers).ljust(width)}  {picture}".rstrip())
    lines.append(f"one column is {column_s:.3g} s; a dot: nothing works there")
    lines.append("")
    rows = [("", "run", "iteration alone", "iteration in turns")]
    for run in runs:
        together_s = turns.seconds[run.name]
        rows.append(
            (letters[run.name], run.name, f"{run.alone_s:.3f} s", f"{together_s:.3f} s")
        )
    lines += table(rows)
    lines.append(
        f"in turns, the runs do {turns.gain:.2f} times the work of one after the other"
    )
    return chapter("turns, predicted", lines)


def _drawn(
    number: int,
    turns: Sequence[Turn],
    letters: Mapping[str, str],
    began_s: float,
    column_s: float,
) -> str:
    """Return a character for each time: the letter of the run that works on an accelerator, or a dot."""
    there = [turn for turn in turns if number in turn.accelerators]
    found = []
    for column in range(_PICTURE):
        at_s = began_s + (column + 0.5) * column_s
        now = [turn.run for turn in there if turn.began_s <= at_s < turn.ended_s]
        found.append(letters[now[0]] if now else ".")
    return "".join(found)


def _ends(ended: Sequence[Ended]) -> str:
    """Return the table of how the runs ended."""
    rows = [("run", "exit code", "accelerator-seconds")]
    for each in ended:
        rows.append((each.name, str(each.code), f"{each.used_s:.0f}"))
    return chapter("runs", table(rows))
