"""`python -m rlplace.plan --config-name hybrid_ppo [key=value ...]`: show the plan of a config, without Ray, torch or a
GPU.

Exit codes: 0 the plan is valid and fits as far as is known, 2 wrong usage, config or placement, 3 the plan does not
fit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rlplace.codes import codes, config_error
from rlplace.commands import answered, typed
from rlplace.config import compose
from rlplace.config.options import OptionParser
from rlplace.config.paths import names_config, names_file
from rlplace.config.validate import config_schema
from rlplace.errors import ConfigError, did_you_mean
from rlplace.json_text import parsed
from rlplace.placement.memory.ledger import Measurements
from rlplace.placement.memory.records import read_measurements
from rlplace.placement.memory.solve import Knob, render_solution, solve
from rlplace.placement.show.explain import (
    explain_accelerator,
    explain_component,
    explain_pair,
)
from rlplace.placement.show.html import render_html
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.text import diff_record, render_diff, render_text
from rlplace.placement.show.view import render_json
from rlplace.runtime.prepare import Prepared, planned_only, prepare_composed

FITS = 0
DOES_NOT_FIT = 3
USAGE = Path(__file__).with_name("plan_usage.txt")

FORMATS = ("text", "json", "svg", "html", "timeline")
# Another format -> the nearest
_FORMS = dict.fromkeys(("png", "pdf", "jpg", "dot", "mermaid"), "svg")
_COMMANDS = ("explain", "solve", "schema", "import")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The parsed command line of `plan`.

    `words`: the words for Hydra: config name and overrides. `form`: output format. `diff`: overrides or config of a
    second plan to compare with; None: no comparison. `measured`: component -> residency -> bytes per accelerator, as an
    earlier run measured them. `simulator`: whether to create a simulator, to count the policy's weights.
    """

    words: list[str]
    form: str
    diff: str | None
    measured: Measurements
    simulator: bool

    def jobs(self, words: Sequence[str] | None = None) -> list[Prepared]:
        """Return the prepared job of each config that the words name: several jobs for a sweep (`--multirun`).

        `words`: words for Hydra; None: the words of the parsed command line.
        """
        composed = compose.with_hydra(self.words if words is None else words)
        return [
            prepare_composed(c, self.measured, simulator=self.simulator)
            for c in composed
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `plan` or one of its subcommands (explain, solve, schema, import), and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    return answered(lambda: _answer(words))


def _answer(words: list[str]) -> int:
    if ("--help" in words or "-h" in words) and words[0] != "import":
        found = {
            "configs": compose.config_names(),
            "tasks": compose.group_names(compose.TASK),
            "placements": compose.group_names(compose.PLACEMENT),
            "clusters": compose.group_names(compose.CLUSTER),
        }
        texts = {
            kind: compose.listed(names, indent="    ") for kind, names in found.items()
        }
        print(
            USAGE.read_text(encoding="utf-8").format(program=typed("plan"), **texts),
            end="",
        )
        return FITS
    match words:
        case ["schema"]:
            print(json.dumps(config_schema(), indent=1))
            return FITS
        case ["schema", word, *_]:
            raise config_error(
                "bad-option",
                "schema",
                word,
                error="word",
                takes="the schema is that of all configs",
                word=word,
            )
        case ["import", *rest]:
            from rlplace.imports.command import run_import

            return run_import(rest)
        case ["explain", one, rank, other, another, *rest] if (
            rank.isdecimal() and another.isdecimal()
        ):
            return _explain_pair([(one, int(rank)), (other, int(another))], rest)
        case ["explain", config, topic, *rest] if (
            config in compose.config_names() and topic not in compose.config_names()
        ):
            command = shlex.join(["explain", topic, config, *rest])
            raise config_error(
                "bad-option", "explain", config, error="topic-first", command=command
            )
        case ["explain", topic, *rest]:
            return _explain(topic, rest)
        case ["explain"]:
            raise config_error("unknown-topic", "explain", error="none")
        case ["solve", *rest]:
            return _solve(rest)
        case [word, *rest] if "=" not in word and (near := _misspelt_command(word)):
            raise config_error(
                "bad-option",
                "plan",
                word,
                error="misspelt-command",
                near=near,
                commands=", ".join(_COMMANDS),
                command=shlex.join([near, *rest]),
            )
        case _:
            told = _other_order(words)
            if told is not None:
                raise told
            return _plan(_request(words))


def _other_order(words: Sequence[str]) -> ConfigError | None:
    """Return the error about a subcommand behind the config, or about two configs without --diff; else None.

    `words`: words of the command line.
    """
    if "--diff" in words:
        return None
    plain = [w for w in words if not w.startswith("-") and names_config(w)]
    known = {*compose.config_names(), *compose.group_names(compose.TASK)}
    configs = [word for word in plain if word in known or names_file(word)]
    others = [word for word in plain if word not in configs]
    # hybrid_ppo explain actor, --solve prompts, solve=prompts
    for word in words:
        name, _, value = word.lstrip("-").partition("=")
        is_plain = word == name
        near = did_you_mean(name, _COMMANDS) if is_plain else name
        if near not in ("explain", "solve") or not configs:
            continue
        topics = [value] if value else others
        rest = [w for w in words if w not in (word, *topics, *configs)]
        topics = [topic for topic in topics if topic != word]
        command = shlex.join([near, *topics, *configs, *rest])
        return config_error(
            "bad-option",
            "plan",
            word,
            error="command-first",
            commands=", ".join(_COMMANDS),
            command=command,
        )
    # hybrid_ppo vs disaggregated_ppo, diff hybrid_ppo disaggregated_ppo
    named = {*others} <= {"vs", "diff", "and", "with", "compare"}
    if len(configs) == 2 and named:
        first, second = configs
        rest = [word for word in words if word not in plain]
        command = shlex.join([first, "--diff", second, *rest])
        return config_error(
            "bad-option", "plan", second, error="two-configs", command=command
        )
    return None


def _misspelt_command(word: str) -> str | None:
    """Return the subcommand of `plan` that `word` probably misspells.

    Return None if `word` is or resembles the name of a config, or if it does not resemble a subcommand.
    """
    names = [*compose.config_names(), *compose.group_names(compose.TASK)]
    is_config = (
        word in names
        or Path(word).suffix
        or Path(f"{word}.yaml").is_file()
        or did_you_mean(word, names)
    )
    if is_config:
        return None
    return did_you_mean(word, _COMMANDS)


def _request(words: Sequence[str]) -> Request:
    """Parse the options of `plan`. All words that are not options become the words for Hydra. Raises ConfigError."""
    parser = OptionParser(
        typed("plan"),
        word_of=compose.word_of,
        reader=compose.options_meant,
        formats=FORMATS,
        add_help=False,
    )
    for option in ("--diff", "--measured"):
        parser.add_argument(option, nargs="?", const="")
    parser.add_argument("--format", nargs="?", const="", default="text")
    parser.add_argument("--simulator", action="store_true")
    options, rest = parser.parse_known_args(words)
    for word, after in itertools.pairwise([*rest, ""]):
        name, _, value = word.partition("=")
        file = value or after
        if name in ("-o", "--out", "--output") and file:
            form = Path(file).suffix.removeprefix(".")
            raise config_error(
                "bad-option",
                name,
                file,
                error="printed",
                form=form if form in FORMATS else "text",
                file=shlex.quote(file),
            )
    parser.refuse_unknown(rest, compose.FLAGS)
    form = options.format
    diff = options.diff
    measured = options.measured
    if form not in FORMATS:
        raise config_error(
            "bad-option",
            "--format",
            form,
            error="format",
            formats=", ".join(FORMATS),
            near=_FORMS.get(form) or did_you_mean(form, FORMATS) or "text",
        )
    if diff == "":
        raise config_error("bad-option", "--diff", error="diff")
    if diff and form not in ("text", "json"):
        raise config_error("bad-option", "--format", form, error="drawn-diff")
    numbers = {} if measured is None else _measurements(measured)
    return Request(
        words=rest, form=form, diff=diff, measured=numbers, simulator=options.simulator
    )


def _measurements(file: str) -> Measurements:
    """Read component -> residency -> measured bytes per accelerator from `file`, the `memory.json` of an earlier run.

    Raises ConfigError.
    """
    try:
        record = parsed(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise config_error(
            "not-measurements",
            "--measured",
            file,
            error="file",
            cause=f"{type(error).__name__}: {error}",
        ) from error
    return read_measurements(record, key=file)


def _plan(request: Request) -> int:
    jobs = request.jobs()
    if request.diff is None:
        for job in jobs:
            _show(job, request.form)
            if job.not_run:
                print(
                    planned_only(job.not_run),
                    file=sys.stdout if request.form == "text" else sys.stderr,
                )
        return _verdict(jobs)
    try:
        others = request.jobs(_other_words(request.words, request.diff))
    except ConfigError as error:
        # Its name is given by another option
        raise ConfigError(
            [
                dataclasses.replace(
                    told,
                    key=told.key.replace("--config-name", "--diff"),
                    fix=told.fix and told.fix.replace("--config-name", "--diff"),
                )
                for told in error.problems
            ]
        ) from error
    if len(jobs) != 1 or len(others) != 1:
        raise config_error("bad-option", "--diff", request.diff, error="diff-of-sweep")
    left = jobs[0].view
    right = others[0].view
    if left.name == right.name:
        right = dataclasses.replace(right, name=request.diff)
    print(
        json.dumps(diff_record(left, right), indent=1)
        if request.form == "json"
        else render_diff(left, right)
    )
    return _verdict([jobs[0], others[0]])


def _show(job: Prepared, form: str) -> None:
    """Print the plan of a job. Predicted seconds are added if the config names a profile of measured costs.

    `form`: output format. The format "timeline" is a drawing of the predicted seconds; if the config does not name a
    profile, it uses the latest profile.
    """
    view = job.view
    seconds = job.config.profile is not None
    # Imported here: only predictions load NumPy.
    if seconds or form == "timeline":
        from rlplace.foresight import show

        tell = functools.partial(print, file=sys.stderr)
        predicted = functools.partial(
            show.foreseen, job.config, job.plan, job.case, job.words, tell
        )
    match form:
        case "svg":
            print(render_svg(view))
        case "timeline":
            print(show.draw_prediction(predicted(), job.plan, view.name))
        case "html":
            print(
                render_html(
                    view,
                    show.prediction_parts(predicted(), job.plan, view.name)
                    if seconds
                    else (),
                )
            )
        case "json":
            record = (
                {"prediction": show.prediction_record(predicted())} if seconds else {}
            )
            print(json.dumps(render_json(view) | record, indent=1))
        case _:
            print(
                render_text(view)
                + (f"\n\n{show.render_prediction(predicted())}" if seconds else "")
                + (f"\n\n{job.changes_text}" if job.changes else "")
            )


def _other_words(words: Sequence[str], other: str) -> list[str]:
    """Return the words for Hydra that give the second plan of `--diff`.

    `words`: words of the first plan. `other`: overrides to add to `words`, or a config to use instead of the first one.
    """
    if "=" in other and not names_file(other):
        return [*words, *shlex.split(other)]
    kept = [
        f"--config-dir={folder}"
        for folder in compose.CommandLine.of(words).folders[:-1]
    ]
    kept.append(f"--config-name={other}")
    return [*kept, *(word for word in words if word.startswith("cluster="))]


def _verdict(jobs: Sequence[Prepared]) -> int:
    """Print the jobs that do not fit in memory to standard error, and return the exit code."""
    if short := [job.shortages for job in jobs if job.shortages]:
        print("\n".join(short), file=sys.stderr)
    if any(job.refused for job in jobs):
        return DOES_NOT_FIT
    return FITS


def _explain(topic: str, words: Sequence[str]) -> int:
    if topic in codes():
        print(codes()[topic].render())
        return FITS
    request = _request(words)
    if "-" in topic and compose.CommandLine.of(request.words).name is None:
        near = did_you_mean(topic, codes())
        error = "code"
        if near:
            error = "misspelt-code"
        raise config_error(
            "unknown-topic",
            "explain",
            topic,
            error=error,
            count=len(codes()),
            near=near,
        )
    for job in request.jobs():
        components = job.plan.placement.components
        count = job.plan.placement.topology.num_accelerators
        if topic in components:
            print(explain_component(job.view, topic))
        elif topic.isdecimal() and int(topic) < count:
            print(explain_accelerator(job.view, int(topic)))
        else:
            near = did_you_mean(topic, [*components, *codes()])
            error = "word"
            if near:
                error = "misspelt-word"
            raise config_error(
                "unknown-topic",
                "explain",
                topic,
                error=error,
                components=", ".join(components),
                last=count - 1,
                near=near,
            )
    return FITS


def _explain_pair(ranks: Sequence[tuple[str, int]], words: Sequence[str]) -> int:
    for job in _request(words).jobs():
        placement = job.plan.placement
        for component, rank in ranks:
            if component not in placement.components:
                near = did_you_mean(component, placement.components)
                error = "component"
                if near:
                    error = "misspelt-component"
                raise config_error(
                    "unknown-topic",
                    "explain",
                    component,
                    error=error,
                    components=", ".join(placement.components),
                    near=near,
                )
            count = placement.world_size(component)
            if rank >= count:
                raise config_error(
                    "unknown-topic",
                    "explain",
                    f"{component} {rank}",
                    error="rank",
                    component=component,
                    last=count - 1,
                )
        print(explain_pair(job.plan, *ranks))
    return FITS


def _solve(words: Sequence[str]) -> int:
    named = [w for w in words[:2] if not w.startswith("-") and "=" not in w]
    knobs = {knob.value: knob for knob in Knob}
    if not named or named[0] not in knobs:
        got = None
        near = None
        error = "solve"
        if named:
            got = named[0]
            near = did_you_mean(got, knobs)
            error = "solved-size"
        raise config_error(
            "bad-option",
            "solve",
            got,
            error=error,
            sizes=", ".join(knobs),
            near=near or next(iter(knobs)),
        )
    # The first word names the config, not a component.
    if len(named) > 1 and compose.CommandLine.of(named[1:]).file.is_file():
        del named[1]
    knob = knobs[named[0]]
    component = named[1] if len(named) > 1 else None
    code = FITS
    for job in _request(words[len(named) :]).jobs():
        solution = solve(job.case, knob, component)
        print(render_solution(job.case, knob, component, solution))
        code = code if solution is not None else DOES_NOT_FIT
    return code
