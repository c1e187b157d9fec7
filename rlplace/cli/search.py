"""`python -m rlplace.search --config-name hybrid_ppo`: find the placement with the shortest iterations.

Exit codes: 0 a plan was found, 1 the plan cannot be written, 2 wrong usage, config, placement or profile, 3 no plan is
valid.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlplace.codes import config_error, problem
from rlplace.commands import DONE, answered, typed
from rlplace.config import compose
from rlplace.config.found import value_at
from rlplace.config.keys import PLACEMENT
from rlplace.config.options import OptionParser
from rlplace.config.yaml_text import with_values
from rlplace.errors import (
    OutputError,
    PlacementError,
    did_you_mean,
    one_of,
)
from rlplace.foresight.answer import (
    Result,
    pareto,
    render_json,
    render_svg,
    render_text,
    turns,
)
from rlplace.foresight.known import LAST, foreign, measuring
from rlplace.foresight.probe import Probe, probe
from rlplace.foresight.search import OBJECTIVES, Answer, Found, Search, merged
from rlplace.foresight.show import foreseen
from rlplace.foresight.space import Space
from rlplace.foresight.varied import changed_learning, varied
from rlplace.runtime.prepare import Prepared, planned_only, prepare_composed
from rlplace.units import show_bytes

NOTHING_HOLDS = 3
USAGE = Path(__file__).with_name("search_usage.txt")
FORMATS = ("text", "json", "svg")
# Options of `search` that are not config keys
WORDS = (
    "objective",
    "fix",
    "accelerators",
    "vary",
    "seconds",
)
# Words of other programs -> our words
_OTHER_WORDS = {
    **dict.fromkeys(("time", "timeout", "time_limit", "budget", "max_time"), "seconds"),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus"), "accelerators"),
}
# Unit of a time -> its seconds
_UNITS_OF_TIME = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
}
# Objective -> other words for it
_OBJECTIVES_MEANT = {
    "seconds": ("throughput", "speed", "time", "latency", "fastest", "iteration_time"),
    "accelerator_seconds": (
        *("cost", "gpus", "gpu_hours", "gpu_seconds", "gpu_time", "efficiency"),
        *("cheapest", "price", "money", "accelerator_hours"),
    ),
}
_LONGEST_LIST = 16  # numbers of accelerators that an error lists
# Options of other programs for the most accelerators that a plan may use
_MOST_ACCELERATORS = ("max_gpus", "max_accelerators", "max_devices")
_SECONDS = 60.0
# number of other accelerator counts to try if the requested ones have no plan
_NEAREST = 16
_SPECIAL = ("move_", "direct_")  # prefixes of costs that only some plans need


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The parsed command line of `search`.

    `words`: words for Hydra. `form`: output format. `apply`: file for the config with the best plan; None: no file.
    `objective`: the quantity to minimize. `fixed`: components that keep their placement. `accelerators`: allowed
    numbers of accelerators; empty: any number. `varied`: config keys to vary. `seconds`: time for the search. `probe`:
    how many of the best plans to run; 0: none.
    """

    words: list[str]
    form: str
    apply: Path | None
    objective: str
    fixed: tuple[str, ...]
    accelerators: tuple[int, ...]
    varied: tuple[str, ...]
    seconds: float
    probe: int


def main(argv: Sequence[str] | None = None) -> int:
    """Search for the best placement, print the result, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)

    def command() -> int:
        if not {"--help", "-h"}.isdisjoint(words):
            configs = compose.listed(compose.config_names(), indent="    ")
            print(
                USAGE.read_text(encoding="utf-8").format(
                    program=typed("search"), configs=configs
                ),
                end="",
            )
            return DONE
        try:
            return _search(read_request(words))
        except PlacementError as error:
            if "empty-space" not in error.codes:
                raise
            print(error, file=sys.stderr)
            return NOTHING_HOLDS

    return answered(command)


def read_request(words: Sequence[str]) -> Request:
    """Parse the options of `search`. All words that are not options become the words for Hydra. Raises ConfigError."""
    parser = OptionParser(
        typed("search"),
        word_of=compose.word_of,
        reader=compose.options_meant,
        add_help=False,
    )
    parser.add_argument("--format", nargs="?", const="", default="text")
    parser.add_argument("--apply", nargs="?", const="")
    parser.add_argument("--probe", nargs="?", const="", default="0")
    options, rest = parser.parse_known_args(words)
    if options.format not in FORMATS:
        raise config_error(
            "bad-option",
            "--format",
            options.format,
            error="format",
            formats=", ".join(FORMATS),
            near=did_you_mean(options.format, FORMATS) or "text",
        )
    if options.apply == "":
        raise config_error("bad-option", "--apply", error="apply")
    own: dict[str, str] = {}
    for word, after in itertools.pairwise([*rest, ""]):
        name, _, value = word.lstrip("-").partition("=")
        theirs = name.replace("-", "_")
        if word.startswith("--") and _OTHER_WORDS.get(theirs) == "seconds":
            name = "seconds"
            value = _in_seconds(value or after)
        if word.startswith("--") and _OTHER_WORDS.get(theirs) == "accelerators":
            name = "accelerators"
        if word.startswith("--") and theirs in _MOST_ACCELERATORS:
            name = "accelerators"
            value = _up_to(value or after)
        if word.startswith("-") and name in WORDS:
            value = value or after
            if name == "objective" and value not in OBJECTIVES:
                choices = ", ".join(OBJECTIVES)
                value = _objective_meant(value) or f"<one of {choices}>"
            raise config_error(
                "bad-option",
                word,
                word,
                error="dashed-word",
                name=name,
                value=value or "<a value>",
            )
        near = _OTHER_WORDS.get(name) or did_you_mean(name, WORDS)
        if "=" in word and name not in WORDS and near is not None:
            raise config_error(
                "bad-option",
                name,
                word,
                error="misspelt-word",
                near=near,
                words=", ".join(WORDS),
                value=_in_seconds(value) if near == "seconds" else value,
            )
        if "=" in word and name in WORDS:
            if name in own:
                raise config_error(
                    "bad-option",
                    name,
                    word,
                    error="word-twice",
                    name=name,
                    value=own[name],
                    word=word,
                )
            own[name] = value
    parser.refuse_unknown(rest, compose.FLAGS)
    objective = own.get("objective", OBJECTIVES[0])
    if objective not in OBJECTIVES:
        near = _objective_meant(objective)
        error = "objective"
        if near:
            error = "misspelt-objective"
        raise config_error(
            "bad-option",
            "objective",
            objective,
            error=error,
            objectives=", ".join(OBJECTIVES),
            lines=one_of(f"objective={each}" for each in OBJECTIVES),
            near=near,
        )
    return Request(
        words=[word for word in rest if word.partition("=")[0] not in WORDS],
        form=options.format,
        apply=None if options.apply is None else Path(options.apply),
        objective=objective,
        fixed=_listed(own, "fix", "components that stay as they are", "actor"),
        accelerators=tuple(
            _whole(
                text,
                "accelerators",
                "how many accelerators a plan uses",
                f"accelerators={_counts(own)}",
            )
            for text in _listed(
                own, "accelerators", "how many accelerators a plan uses", "1"
            )
        ),
        varied=_listed(
            own,
            "vary",
            "keys of the config that may have other values",
            "actor.token_budget",
        ),
        seconds=_positive(own.get("seconds", str(_SECONDS))),
        probe=_whole(
            options.probe, "--probe", "how many of the best plans are run", "--probe 4"
        ),
    )


def _objective_meant(word: str) -> str | None:
    """Return the objective that a wrong word probably means; None if this is not clear."""
    for objective, others in _OBJECTIVES_MEANT.items():
        if word.lower().replace("-", "_") in others:
            return objective
    return did_you_mean(word, OBJECTIVES)


def _up_to(text: str) -> str:
    """Return the numbers from 1 to a small number with commas between them; another text is returned as it is."""
    if not text.isdecimal() or not 0 < int(text) <= _LONGEST_LIST:
        return text
    return ",".join(str(number + 1) for number in range(int(text)))


def _in_seconds(text: str) -> str:
    """Return a time as a number of seconds: `10m` and `10min` are 600. Another text is returned as it is."""
    time = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]+)", text)
    unit = _UNITS_OF_TIME.get(time[2]) if time is not None else None
    if time is None or unit is None:
        return text
    return f"{float(time[1]) * unit:g}"


def _listed(
    own: Mapping[str, str], key: str, why: str, example: str
) -> tuple[str, ...]:
    """Return the comma-separated names in the value of an option; empty if the option is not given.

    `own`: name of each given option -> its value. `key`: name of the option. `why`: the option's meaning, for the
    error. `example`: a valid value, which the error suggests. Raises ConfigError if there are no names, or if a name is
    repeated.
    """
    if key not in own:
        return ()
    names = [name for part in own[key].split(",") if (name := part.strip())]
    if not names:
        raise config_error(
            "bad-option",
            key,
            f"{key}={own[key]}",
            error="no-names",
            meaning=why,
            name=key,
            example=example,
        )
    once = list(dict.fromkeys(names))
    if len(once) < len(names):
        raise config_error(
            "bad-option",
            key,
            f"{key}={own[key]}",
            error="name-twice",
            meaning=why,
            name=key,
            once=",".join(once),
        )
    return tuple(names)


def _whole(text: str, key: str, why: str, fix: str) -> int:
    if not (text.isascii() and text.strip().isdigit()):
        raise config_error(
            "bad-option", key, text, error="whole", meaning=why, example=fix
        )
    return int(text)


def _counts(own: Mapping[str, str]) -> str:
    """Return a valid value of the option `accelerators`, for an error: the positive whole numbers that the user gave.

    The numbers are joined by commas; "1" if no number is valid. `own`: name of each given option -> its value.
    """
    # A range means all of its numbers
    ends = re.fullmatch(r"([1-9][0-9]?)-([1-9][0-9]?)", own["accelerators"])
    if ends is not None and int(ends[1]) < int(ends[2]):
        return ",".join(map(str, range(int(ends[1]), int(ends[2]) + 1)))
    return ",".join(re.findall(r"(?<![\d.])[1-9][0-9]*", own["accelerators"])) or "1"


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < math.inf:
        raise config_error("bad-option", "seconds", text, error="seconds")
    return value


def _search(request: Request) -> int:
    result = search_for(request)
    match request.form:
        case "json":
            print(json.dumps(render_json(result), indent=1))
        case "svg":
            print(render_svg(result))
        case _:
            print(render_text(result))
    return DONE


def search_for(request: Request) -> Result:
    """Search for the best plan, write the file that `--apply` names, and return the result.

    Progress is printed to standard error. Raises ConfigError, PlacementError, ClusterError or OutputError.
    """
    jobs = compose.with_hydra(request.words)
    if len(jobs) != 1:
        raise config_error("bad-option", "--multirun", error="search-of-sweep")
    job = prepare_composed(jobs[0])
    if job.not_run:
        print(planned_only(job.not_run), file=sys.stderr)
    if request.apply is not None:
        # Check before the search, which takes long.
        _check_writable(request.apply)
    result = _found(request, job)
    if request.apply is not None:
        _apply(request, job, result)
    return result


def _found(request: Request, job: Prepared) -> Result:
    """Search for the best plan, and return the result with all data that the output of `search` shows."""
    config = job.config
    fixed = request.fixed
    accelerators = request.accelerators
    space, *others = varied(
        config,
        job.plan,
        request.varied,
        fixed=fixed,
        accelerators=accelerators,
        tell=_progress,
    )
    costs = foreseen(config, job.plan, job.case, job.words, _progress).costs
    profile = costs.profile
    if lacking := [
        name for name in costs.missing if not any(part in name for part in _SPECIAL)
    ]:
        raise config_error(
            "profile-lacks",
            "profile",
            config.profile or LAST,
            lacking=", ".join(lacking),
            command=measuring(job.words),
        )
    began = time.monotonic()

    def over(share: float = 1.0) -> bool:
        return time.monotonic() - began > request.seconds * share

    def searched() -> tuple[dict[Space, Search], Answer]:
        """Search each space of plans, one after the other. Return (space -> its search, the merged result).

        The time is divided evenly over the spaces. Time that a space does not use goes to the next space.
        """
        searches = {one: Search(one, profile) for one in (space, *others)}
        answers = list[Answer]()
        for number, search in enumerate(searches.values(), 1):
            share = 0.8 * number / len(searches)
            rivals = merged(answers).found if answers else ()
            answers.append(
                search.run(
                    objective=request.objective,
                    rivals=rivals,
                    over=functools.partial(over, share),
                )
            )
        return searches, merged(answers)

    searches, answer = searched()
    probed: Sequence[Probe] = ()
    if request.probe and answer.best is not None:
        probed, profile = probe(
            job.mapping, answer.found[: request.probe], profile, _progress
        )
        began = time.monotonic()
        searches, answer = searched()
    best = answer.best
    if best is None:
        raise _nothing(request, job, searches[space], answer)
    seconds, space, search = time.monotonic() - began, best.space, searches[best.space]
    plans = [*answer.all_found]
    for count in sorted(
        {size.accelerators for s in space.sizes(space.now).values() for size in s}
    ):
        if count < best.used and not space.counts and not over(0.9):
            plans += search.run(most=count, keep=1, over=lambda: over(0.9)).all_found
    found = []
    if len(answer.found) > 1 and not over(0.9):

        def value(plan: Found, seconds: float) -> float:
            if request.objective == "accelerator_seconds":
                return seconds * plan.used
            return seconds

        found = list(turns(search, best, answer.found[1:], value, over))
    return Result(
        name=job.view.name,
        search=search,
        answer=answer,
        front=pareto(plans),
        turns=found,
        seconds=seconds,
        notes=(*foreign(profile), *changed_learning(best)),
        probed=probed,
        unmeasured=search.unmeasured(),
        ranged=search.ranged(best),
    )


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _nothing(
    request: Request, job: Prepared, search: Search, answer: Answer
) -> PlacementError:
    """Return the error for a search without a valid plan: the reasons, and a suggested command.

    If plans were refused for lack of memory, the command shows the plan that lacks the fewest bytes.

    `search`: the search of the first space of plans. `answer`: the merged result of all searches.
    """
    reasons = list[str]()
    plans = answer.counts["refused by memory"]
    if plans:
        reasons.append("memory")
    refused = [
        f"{number} are refused: {code}"
        for code, number in sorted(answer.refused.items())
    ]
    if refused:
        reasons.append("refused")
    if answer.lacking:
        reasons.append("profile")
    fix: str | None = None
    if answer.nearest is not None:
        nearest, layout = answer.nearest
        fix = _planning(request.words, nearest.changes(layout))
    elif answer.lacking:
        # Measure placements with and without shared accelerators.
        fix = measuring(job.words)
    # Without this limit, at least the plan of the config itself is valid
    elif request.accelerators:
        # Suggest a search without fixed components or limits.
        fix = shlex.join(["python", "-m", "rlplace.search", *request.words])
        reasons.append("accelerators")
        asked = max(request.accelerators)
        near = sorted(
            range(1, job.plan.topology.num_accelerators + 1),
            key=lambda n: (abs(n - asked), n),
        )[:_NEAREST]
        spaces = (
            Space(job.config, job.plan, fixed=request.fixed, accelerators=[n])
            for n in near
        )
        held = (Search(space, search.profile).run(keep=1).best for space in spaces)
        fix = next((f"accelerators={best.used}" for best in held if best), fix)
    found = problem(
        "empty-space",
        "search",
        reasons=reasons or ["none"],
        plans=plans,
        lacks=show_bytes(answer.lacks_bytes),
        refused="\n".join(refused),
        lacking=", ".join(sorted(answer.lacking)),
        accelerators=" or ".join(map(str, request.accelerators)),
        command=fix,
    )
    return PlacementError([found])


def _planning(words: Sequence[str], changes: Mapping[str, object]) -> str | None:
    """Return a command `python -m rlplace.plan ...` with `changes` (config key -> value) as overrides.

    `words`: words of the command line. Return None if a value in `changes` is None, which means to remove the key: an
    override cannot do this.
    """
    if None in changes.values():
        return None
    plan = shlex.join(["python", "-m", "rlplace.plan", *words])
    return " ".join(
        [plan, *(compose.override(key, value) for key, value in changes.items())]
    )


def _check_writable(file: Path) -> None:
    """Raise OutputError if `file` cannot be written, since its folder cannot be created or is not writable."""
    try:
        there = next(folder for folder in file.absolute().parents if folder.exists())
    except OSError as error:
        raise OutputError.of(file, error, "--apply", "a file") from error
    code = 0 if os.access(there, os.W_OK | os.X_OK) else errno.EACCES
    if code := code if there.is_dir() else errno.ENOTDIR:
        raise OutputError.of(
            file, OSError(code, os.strerror(code)), "--apply", "a file"
        )


def _apply(request: Request, job: Prepared, result: Result) -> None:
    """Write the config with the changes of the best plan to the file that `--apply` names.

    Then check that the file gives the best plan, and print the command that trains with this file.
    """
    assert request.apply is not None
    line = compose.CommandLine.of(request.words)
    file = request.apply.with_suffix(".yaml")
    changes = result.best.changes
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(with_values(line.text, changes), encoding="utf-8")
    except OSError as error:
        raise OutputError.of(file, error, "--apply", "a file") from error
    kept = [
        word
        for word in line.overrides
        if not _overruled(word.partition("=")[0], changes)
    ]
    words = ["--config-dir", str(file.parent), "--config-name", file.stem, *kept]
    (composed,) = compose.with_hydra(words)
    applied = prepare_composed(composed)
    if applied.plan.placement.canonical() != result.best.plan.placement.canonical():
        raise config_error(
            "bad-option", "--apply", str(file), error="applied-placement"
        )
    others = {
        key: value for key, value in changes.items() if not key.startswith(PLACEMENT)
    }
    if key := next(
        (
            key
            for key, value in others.items()
            if value_at(applied.mapping, key) != value
        ),
        None,
    ):
        raise config_error(
            "bad-option",
            "--apply",
            str(file),
            error="applied-value",
            name=key,
            value=value_at(applied.mapping, key),
            wanted=others[key],
        )
    run = shlex.join([word for word in words if not word.startswith("profile=")])
    print(f"wrote {file}: python -m rlplace.train {run}", file=sys.stderr)


def _overruled(key: str, changes: Sequence[str] | dict[str, object]) -> bool:
    # Hydra's prefix of a key
    name = key.lstrip("+~")
    return any(name == changed or name.startswith(f"{changed}.") for changed in changes)
