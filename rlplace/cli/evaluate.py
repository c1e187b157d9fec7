"""`python -m rlplace.evaluate RUN [episodes=20] [seed=0] [deterministic=true] [video=FILE]`: evaluate a trained policy.

A policy of simulators plays whole episodes; a language model answers held-out prompts, as in the evaluations of a run.

Exit codes: 0 played, 1 a failure while playing, 2 wrong usage or no such policy, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rlplace.codes import config_error
from rlplace.commands import DONE, answered, typed
from rlplace.config.options import OptionParser
from rlplace.config.read import MOST_WHOLE
from rlplace.config.validate import SWITCHES
from rlplace.contract.registry import job_of
from rlplace.contract.requests import Evaluation, EvaluationRequest
from rlplace.contract.trained import find_trained
from rlplace.errors import ConfigError, did_you_mean

STOPPED = 130
FORMATS = ("text", "json")
SUFFIXES = (".mp4", ".gif")  # file endings of videos
_KEY = "RUN"
_DEFAULTS = {
    "episodes": "",
    "seed": "0",
    "deterministic": "true",
    "longest": "100000",
    "video": "",
    "transcripts": "",
}
WORDS = tuple(_DEFAULTS)
# Words of other programs -> our words
_OTHER_NAMES = {
    **dict.fromkeys(
        ("n_eval_episodes", "num_episodes", "n_episodes", "eval_episodes", "n"),
        "episodes",
    ),
    **dict.fromkeys(("save_video", "capture_video", "record", "out"), "video"),
    **dict.fromkeys(("max_steps", "max_episode_steps", "n_timesteps"), "longest"),
}
_EPISODES = 20  # number of episodes that a fix suggests


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The parsed command line.

    `run`: folder of the policy. `form`: output format, text or json. `request`: the settings of the evaluation.
    """

    run: str
    form: str
    request: EvaluationRequest


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate a trained policy, print the result, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """

    def command() -> int:
        line = read_line(sys.argv[1:] if argv is None else argv)
        found = evaluated(line)
        if line.form == "json":
            print(json.dumps(found.report, indent=1))
        else:
            print("\n".join(f"{head:<9}{text}" for head, text in found.rows))
        return DONE

    try:
        return answered(command)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C: nothing was summed up", file=sys.stderr)
        return STOPPED


def evaluated(line: Line) -> Evaluation:
    """Evaluate the trained policy that a command line names, and return the result. Raises ConfigError."""
    trained = find_trained(line.run, _KEY)
    found: Evaluation = job_of(trained.config).evaluate(trained, line.request)
    return found


def read_line(argv: Sequence[str]) -> Line:
    """Parse the words `argv` of a command line, without the program. Raises ConfigError."""
    parser = OptionParser(
        typed("evaluate"),
        word_of=_word_of,
        check=lambda run: find_trained(run, _KEY, verified=False),
        usage="%(prog)s RUN [episodes=20] [seed=0] [deterministic=true] [longest=100000] [video=FILE.mp4|.gif]"
        " [transcripts=FILE] [--format text|json]",
        description="Plays a trained policy in one process, without Ray: returns and lengths of whole episodes; of a"
        " language model the reward of its answers to held-out prompts.",
    )
    parser.add_argument(
        "words",
        metavar=_KEY,
        nargs="*",
        help="the folder of a run, of a checkpoint, or of an export; or a folder of runs such as runs/hopper: its run"
        " that saved last; then arguments such as episodes=100",
    )
    parser.add_argument("--format", default=FORMATS[0], choices=FORMATS)
    options = parser.parse_intermixed_args(argv)
    named = [word for word in options.words if word.partition("=")[0] not in _DEFAULTS]
    given = dict(
        word.split("=", 1)
        for word in options.words
        if "=" in word and word not in named
    )
    for key in _DEFAULTS:
        if key in options.words:
            raise config_error(
                "bad-option", key, key, error="key-without-value", name=key
            )
        if sum(word.startswith(f"{key}=") for word in options.words) > 1:
            raise config_error(
                "bad-option",
                key,
                " ".join(options.words),
                error="key-twice",
                name=key,
                value=given[key],
            )
    if len(named) != 1:
        raise parser.with_missing(_unclear(options.words, named))
    values = _DEFAULTS | given
    video = Path(values["video"]).expanduser() if values["video"] else None
    if video is not None and video.suffix not in SUFFIXES:
        raise config_error(
            "bad-option",
            "video",
            values["video"],
            error="video",
            file=video.with_suffix(SUFFIXES[0]),
        )
    deterministic = SWITCHES.get(values["deterministic"].lower())
    if deterministic is None:
        raise config_error(
            "bad-option",
            "deterministic",
            values["deterministic"],
            error="deterministic",
        )
    transcripts = None
    if values["transcripts"]:
        transcripts = Path(values["transcripts"]).expanduser()
    episodes = None
    if "episodes" in given:
        episodes = _number("episodes", values["episodes"], least=1)
    request = EvaluationRequest(
        key=_KEY,
        episodes=episodes,
        seed=_number("seed", values["seed"], least=0),
        deterministic=deterministic == "true",
        longest=_number("longest", values["longest"], least=1),
        video=video,
        transcripts=transcripts,
    )
    return Line(run=named[0], form=options.format, request=request)


def _word_of(name: str, value: str) -> str | None:
    """Return the word `key=value` that an unknown option probably means; None if this is not clear.

    `name`, `value`: those of the option; the value is "" without one.
    """
    near = _OTHER_NAMES.get(name) or did_you_mean(name, _DEFAULTS)
    if near is None:
        return None
    usual = "true" if near == "deterministic" else "<value>"
    return f"{near}={value or usual}"


def _unclear(words: Sequence[str], named: Sequence[str]) -> ConfigError:
    for word in named:
        key, equals, value = word.partition("=")
        if equals and not Path(word).exists():
            near = did_you_mean(key, _DEFAULTS)
            error = "key-of-evaluation"
            if near:
                error = "misspelt-key-of-evaluation"
            return config_error(
                "bad-option",
                key,
                word,
                error=error,
                keys=", ".join(_DEFAULTS),
                near=near,
                value=value,
            )
    # Propose the newest of the runs that exist
    found = [word for word in named if Path(word).exists()]
    fixed = "runs/<config>/<date>_<time>"
    others = [word for word in words if word not in named]
    if found:
        run = max(found, key=lambda word: Path(word).stat().st_mtime_ns)
        fixed = shlex.join([run, *others])
    return config_error(
        "bad-option", _KEY, " ".join(words) or None, error="policies", words=fixed
    )


def _number(key: str, text: str, *, least: int) -> int:
    if not (
        text.isdecimal()
        and text.isascii()
        and len(text) < 20
        and least <= int(text) <= MOST_WHOLE
    ):
        raise config_error(
            "bad-option",
            key,
            text,
            error="number",
            least=least,
            name=key,
            example=_DEFAULTS[key] or _EPISODES,
        )
    return int(text)
