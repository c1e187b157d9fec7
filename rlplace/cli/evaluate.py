"""`python -m rlplace.evaluate RUN [episodes=20] [seed=0] [deterministic=true] [video=FILE]`: play a trained policy.

A policy of simulators plays whole episodes; a language model answers held-out prompts, as in the evaluations of a run.

Exit codes: 0 played, 1 a failure while playing, 2 wrong usage or no such policy, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.checkpoints import write_whole
from rlplace.commands import DONE, answered, typed
from rlplace.config.options import OptionParser
from rlplace.config.read import MOST_WHOLE
from rlplace.config.validate import SWITCHES
from rlplace.errors import ConfigError, OutputError, did_you_mean, suggestion
from rlplace.trained import Trained, find_trained

STOPPED = 130
FORMATS = ("text", "json")
SUFFIXES = (".mp4", ".gif")  # of videos
_KEY = "RUN"
_DEFAULTS = {
    "episodes": "",
    "seed": "0",
    "deterministic": "true",
    "longest": "100000",
    "video": "",
    "transcripts": "",
}
_EPISODES = 20  # of simulators; as many prompts as in the evaluations of the run
_CONFIDENCE = (
    1.96  # standard errors to either side of a mean: 95 % of a normal distribution
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One command line."""

    run: str
    form: str
    episodes: int | None
    seed: int
    deterministic: bool
    longest: int  # steps of an episode
    video: Path | None
    transcripts: Path | None


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as one command line says; return the exit code."""

    def command() -> int:
        request = _request(sys.argv[1:] if argv is None else argv)
        trained = find_trained(request.run, _KEY)
        simulated = trained.config.kind == "mlp"
        report = (
            evaluate(trained, request) if simulated else evaluate_text(trained, request)
        )
        text = render if simulated else render_text
        print(json.dumps(report, indent=1) if request.form == "json" else text(report))
        return DONE

    try:
        return answered(command)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C: nothing was summed up", file=sys.stderr)
        return STOPPED


def _request(argv: Sequence[str]) -> Request:
    parser = OptionParser(
        typed("evaluate"),
        word_of=lambda name, value: (
            f"{near}={value or '<value>'}"
            if (near := did_you_mean(name, _DEFAULTS))
            else None
        ),
        usage="%(prog)s RUN [episodes=20] [seed=0] [deterministic=true] [longest=100000] [video=FILE.mp4|.gif]"
        " [transcripts=FILE] [--format text|json]",
        description="Plays a trained policy in one process, without Ray: returns and lengths of whole episodes; of a"
        " language model the reward of its answers to held-out prompts.",
    )
    parser.add_argument(
        "words",
        metavar=_KEY,
        nargs="*",
        help="the folder of a run, of a checkpoint, or of an export",
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
            raise _wrong(
                key,
                "it has no value",
                key,
                "a key and its value are one word",
                f"{key}=<value>",
            )
        if sum(word.startswith(f"{key}=") for word in options.words) > 1:
            raise _wrong(
                key,
                "it is given twice",
                " ".join(options.words),
                "one value counts",
                f"{key}={given[key]}",
            )
    if len(named) != 1:
        raise _unclear(options.words, named)
    values = _DEFAULTS | given
    video = Path(values["video"]).expanduser() if values["video"] else None
    if video is not None and video.suffix not in SUFFIXES:
        why = "the end of the name says what is written"
        raise _wrong(
            "video",
            "no such kind of video",
            values["video"],
            why,
            f"video={video.with_suffix(SUFFIXES[0])}",
        )
    deterministic = SWITCHES.get(values["deterministic"].lower())
    if deterministic is None:
        why = "true: the likeliest action; false: drawn, as in training"
        raise _wrong(
            "deterministic",
            "neither true nor false",
            values["deterministic"],
            why,
            "deterministic=true",
        )
    return Request(
        run=named[0],
        form=options.format,
        episodes=_number("episodes", values["episodes"], least=1)
        if "episodes" in given
        else None,
        seed=_number("seed", values["seed"], least=0),
        deterministic=deterministic == "true",
        longest=_number("longest", values["longest"], least=1),
        video=video,
        transcripts=Path(values["transcripts"]).expanduser()
        if values["transcripts"]
        else None,
    )


def _unclear(words: Sequence[str], named: Sequence[str]) -> ConfigError:
    for word in named:
        key, equals, value = word.partition("=")
        if equals and not Path(word).exists():
            near = did_you_mean(key, _DEFAULTS)
            fix = f"{near}={value}" if near else "leave it out"
            return _wrong(
                key,
                "no such key" + suggestion(near),
                word,
                "it takes " + ", ".join(_DEFAULTS),
                fix,
            )
    found = [word for word in named if Path(word).exists()]
    run = "runs/<config>/<date>_<time>"
    if found:
        run = max(found, key=lambda word: Path(word).stat().st_mtime_ns)
    others = [word for word in words if word not in named]
    fix = " ".join(
        ["python -m rlplace.evaluate", shlex.join([run, *others]) if found else run]
    )
    return _wrong(
        _KEY,
        "one policy is evaluated at a time",
        " ".join(words) or None,
        "a run, or a checkpoint",
        fix,
    )


def _number(key: str, text: str, *, least: int) -> int:
    if not (
        text.isdecimal()
        and text.isascii()
        and len(text) < 20
        and least <= int(text) <= MOST_WHOLE
    ):
        why = f"a whole number from {least} to 2**63 - 1"
        raise _wrong(
            key, "no such number", text, why, f"{key}={_DEFAULTS[key] or _EPISODES}"
        )
    return int(text)


def evaluate(trained: Trained, request: Request) -> dict[str, Any]:
    """Play and sum up; return what `--format json` shows. Raises ConfigError, SimulatorError, OutputError."""
    if request.transcripts is not None:
        why = "simulators say nothing that could be written down"
        fix = "leave out transcripts="
        raise _wrong(
            "transcripts",
            "the policy is one of simulators",
            str(request.transcripts),
            why,
            fix,
        )
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # for torch: with small batches, more threads wait for each other
    from rlplace.envs.play import play
    from rlplace.models.policy import policy_of

    began = time.perf_counter()
    policy = policy_of(trained, seed=request.seed, key=_KEY)
    env = trained.config.simulator_env
    episodes = play(
        env,
        policy.spaces,
        lambda observations, begins: policy.act(
            observations, request.deterministic, begins
        ),
        episodes=request.episodes or _EPISODES,
        seed=request.seed,
        longest=request.longest,
        video=request.video,
    )
    return {
        "policy": trained.text,
        "env": env.id,
        "episodes": len(episodes),
        "deterministic": request.deterministic,
        "seed": request.seed,
        "return": _spread([episode.total for episode in episodes]),
        "length": _spread([episode.length for episode in episodes]),
        "returns": [episode.total for episode in episodes],
        "lengths": [episode.length for episode in episodes],
        "video": None if request.video is None else str(request.video),
        "seconds": time.perf_counter() - began,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "min": min(values),
        "max": max(values),
    }


def evaluate_text(trained: Trained, request: Request) -> dict[str, Any]:
    """Have held-out prompts answered, sum up and write transcripts. Raises ConfigError, OutputError, WorkerError."""
    if request.video is not None:
        raise _wrong(
            "video",
            "the policy is a language model",
            str(request.video),
            "nothing is drawn",
            "leave it out",
        )
    from rlplace.workers.roles.evaluation import answers

    assert trained.checkpoint is not None, (
        "of a language model, only checkpoints are found"
    )
    began = time.perf_counter()
    found = trained.checkpoint
    samples = answers(
        trained.config,
        trained.weights,
        prompts=request.episodes or trained.config.runner.eval_prompts,
        greedy=request.deterministic,
        seed=request.seed,
    )
    file = request.transcripts or found.run / f"evaluation_{found.iteration:06}.jsonl"
    try:
        write_whole(
            file,
            "".join(
                json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples
            ),
        )
    except OSError as error:
        raise OutputError.of(file, error, "transcripts", "a file") from error
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    mean = statistics.fmean(rewards) if rewards else None
    around = (
        _CONFIDENCE * statistics.stdev(rewards) / len(rewards) ** 0.5
        if len(rewards) > 1
        else None
    )
    return {
        "policy": trained.text,
        "task": trained.config.text_env.task,
        "prompts": len(samples),
        "deterministic": request.deterministic,
        "seed": request.seed,
        "reward": mean,
        "confidence_95": None
        if mean is None or around is None
        else [mean - around, mean + around],
        "poisoned": len(samples) - len(rewards),
        "tokens": statistics.fmean(sample["tokens"] for sample in samples),
        "transcripts": str(file),
        "seconds": time.perf_counter() - began,
    }


def render(report: Mapping[str, Any]) -> str:
    """Write what `evaluate` returned as lines."""

    def spread(of: Mapping[str, float]) -> str:
        return f"{of['mean']:,.1f} ± {of['std']:,.1f}   ({of['min']:,.1f} to {of['max']:,.1f})"

    drawn = (
        "the likeliest actions"
        if report["deterministic"]
        else "actions drawn as in training"
    )
    rows = [
        ("policy", report["policy"]),
        (
            "env",
            f"{report['env']}, {report['episodes']} episodes, {drawn}, seed {report['seed']}",
        ),
        (
            "return",
            f"{spread(report['return'])}   mean ± standard deviation (least to greatest)",
        ),
        ("length", f"{spread(report['length'])}   steps"),
        ("seconds", f"{report['seconds']:.1f}"),
        *([("video", report["video"])] if report["video"] else []),
    ]
    return "\n".join(f"{head:<9}{text}" for head, text in rows)


def render_text(report: Mapping[str, Any]) -> str:
    """Write what `evaluate_text` returned as lines."""
    drawn = (
        "the likeliest answers"
        if report["deterministic"]
        else f"answers drawn as in training, seed {report['seed']}"
    )
    between = report["confidence_95"]
    reward = (
        "none: no answer has a reward"
        if report["reward"] is None
        else f"{report['reward']:.3f}"
    )
    if between is not None:
        reward += f"   (95 % confidence: {between[0]:.3f} to {between[1]:.3f})"
    rows = [
        ("policy", report["policy"]),
        ("task", f"{report['task']}, {report['prompts']} held-out prompts, {drawn}"),
        ("reward", reward),
        *(
            [("poisoned", f"{report['poisoned']} left out: not finite")]
            if report["poisoned"]
            else []
        ),
        (
            "answers",
            f"{report['tokens']:,.1f} tokens in the mean; what was said: {report['transcripts']}",
        ),
        ("seconds", f"{report['seconds']:.1f}"),
    ]
    return "\n".join(f"{head:<9}{text}" for head, text in rows)


def _wrong(key: str, what: str, got: str | None, why: str, fix: str) -> ConfigError:
    return ConfigError.of("bad-option", key, what, got, why, fix)
