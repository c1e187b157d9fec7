"""`python -m rlplace.evaluate RUN [episodes=20] [seed=0] [deterministic=true] [video=FILE]`: play a trained policy.

Exit codes: 0 played, 1 a failure while playing, 2 wrong usage or no such policy, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.commands import DONE, answered
from rlplace.errors import ConfigError, did_you_mean, suggestion
from rlplace.trained import Trained, find_trained

STOPPED = 130
FORMATS = ("text", "json")
SUFFIXES = (".mp4", ".gif")  # of videos
_KEY = "RUN"
_DEFAULTS = {"episodes": "20", "seed": "0", "deterministic": "true", "video": ""}
_TRUTH = {"true": True, "false": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One command line."""

    run: str
    form: str
    episodes: int
    seed: int
    deterministic: bool
    video: Path | None


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as one command line says; return the exit code."""

    def command() -> int:
        request = _request(sys.argv[1:] if argv is None else argv)
        report = evaluate(find_trained(request.run, _KEY), request)
        print(json.dumps(report, indent=1) if request.form == "json" else render(report))
        return DONE

    try:
        return answered(command)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C: nothing was summed up", file=sys.stderr)
        return STOPPED


def _request(argv: Sequence[str]) -> Request:
    parser = argparse.ArgumentParser(
        prog="python -m rlplace.evaluate",
        usage="%(prog)s RUN [episodes=20] [seed=0] [deterministic=true] [video=FILE.mp4|.gif] [--format text|json]",
        description="Plays a trained policy in one process, without Ray: returns and lengths of whole episodes.",
        allow_abbrev=False,
    )
    parser.add_argument("words", metavar=_KEY, nargs="*", help="the folder of a run, of a checkpoint, or of an export")
    parser.add_argument("--format", default=FORMATS[0])
    options = parser.parse_intermixed_args(argv)
    named = [word for word in options.words if word.partition("=")[0] not in _DEFAULTS]
    given = dict(word.split("=", 1) for word in options.words if "=" in word and word not in named)
    if len(named) != 1:
        raise _unclear(options.words, named)
    if options.format not in FORMATS:
        near = did_you_mean(options.format, FORMATS) or FORMATS[0]
        raise _wrong("--format", "no such format", options.format, "one of " + ", ".join(FORMATS), f"--format {near}")
    values = _DEFAULTS | given
    video = Path(values["video"]).expanduser() if values["video"] else None
    if video is not None and video.suffix not in SUFFIXES:
        why = "the end of the name says what is written"
        raise _wrong("video", "no such kind of video", values["video"], why, f"video={video.with_suffix(SUFFIXES[0])}")
    if values["deterministic"] not in _TRUTH:
        why = "true: the likeliest action; false: drawn, as in training"
        raise _wrong("deterministic", "neither true nor false", values["deterministic"], why, "deterministic=false")
    return Request(
        run=named[0],
        form=options.format,
        episodes=_number("episodes", values["episodes"], least=1),
        seed=_number("seed", values["seed"], least=0),
        deterministic=_TRUTH[values["deterministic"]],
        video=video,
    )


def _unclear(words: Sequence[str], named: Sequence[str]) -> ConfigError:
    for word in named:
        key, equals, value = word.partition("=")
        if equals and not Path(word).exists():
            near = did_you_mean(key, _DEFAULTS)
            fix = f"{near}={value}" if near else "leave it out"
            return _wrong(key, "no such key" + suggestion(near), word, "it takes " + ", ".join(_DEFAULTS), fix)
    fix = "python -m rlplace.evaluate runs/<config>/<date>_<time>"
    return _wrong(_KEY, "one policy is evaluated at a time", " ".join(words) or None, "a run, or a checkpoint", fix)


def _number(key: str, text: str, *, least: int) -> int:
    if not (text.isdecimal() and text.isascii() and int(text) >= least):
        raise _wrong(key, "no such number", text, f"a whole number from {least} on", f"{key}={_DEFAULTS[key]}")
    return int(text)


def evaluate(trained: Trained, request: Request) -> dict[str, Any]:
    """Play and sum up; return what `--format json` shows. Raises ConfigError, SimulatorError, OutputError."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for torch: with small batches, more threads wait for each other
    from rlplace.envs.play import play
    from rlplace.models.policy import policy_of

    began = time.perf_counter()
    policy, env = policy_of(trained, seed=request.seed, key=_KEY), trained.config.simulator_env
    episodes = play(
        env,
        lambda observations: policy.act(observations, request.deterministic),
        episodes=request.episodes,
        seed=request.seed,
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


def render(report: Mapping[str, Any]) -> str:
    """Write what `evaluate` returned as lines."""

    def spread(of: Mapping[str, float]) -> str:
        return f"{of['mean']:,.1f} ± {of['std']:,.1f}   ({of['min']:,.1f} to {of['max']:,.1f})"

    drawn = "the likeliest actions" if report["deterministic"] else "actions drawn as in training"
    rows = [
        ("policy", report["policy"]),
        ("env", f"{report['env']}, {report['episodes']} episodes, {drawn}, seed {report['seed']}"),
        ("return", f"{spread(report['return'])}   mean ± standard deviation (least to greatest)"),
        ("length", f"{spread(report['length'])}   steps"),
        ("seconds", f"{report['seconds']:.1f}"),
        *([("video", report["video"])] if report["video"] else []),
    ]
    return "\n".join(f"{head:<9}{text}" for head, text in rows)


def _wrong(key: str, what: str, got: str | None, why: str, fix: str) -> ConfigError:
    return ConfigError.of("bad-option", key, what, got, why, fix)


if __name__ == "__main__":
    sys.exit(main())
