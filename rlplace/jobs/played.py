"""The result of an evaluation on simulators: returns and lengths of whole episodes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlplace.codes import config_error
from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.contract.requests import Evaluation, EvaluationRequest
from rlplace.envs.contract import Spaces
from rlplace.trained import Trained

_EPISODES = 20


def played_episodes(
    trained: Trained,
    request: EvaluationRequest,
    env: SimulatorEnvConfig,
    spaces: Spaces,
    act: Callable[[Any, Any], Any],
    states: Sequence[Mapping[str, Any]] = (),
) -> Evaluation:
    """Play whole episodes with a trained policy. Return the returns (sums of rewards) and lengths of the episodes.

    `act`: function (observations, whether an episode begins with each) -> actions. `states`: saved states of
    simulators, whose statistics a simulator that normalizes takes over.

    Raises ConfigError, SimulatorError, OutputError.
    """
    from rlplace.envs.play import play

    began = time.perf_counter()
    episodes = play(
        env,
        spaces,
        act,
        episodes=request.episodes or _EPISODES,
        seed=request.seed,
        longest=request.longest,
        video=request.video,
        states=states,
    )
    report: dict[str, Any] = {
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
    return Evaluation(report=report, rows=_rows(report))


def refuse_transcripts(request: EvaluationRequest) -> None:
    """Raise ConfigError if the answers of a language model are asked for."""
    if request.transcripts is not None:
        raise config_error(
            "bad-option",
            "transcripts",
            str(request.transcripts),
            error="transcripts-of-simulators",
        )


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "min": min(values),
        "max": max(values),
    }


def _rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:

    def spread(of: Mapping[str, float]) -> str:
        return f"{of['mean']:,.1f} ± {of['std']:,.1f}   ({of['min']:,.1f} to {of['max']:,.1f})"

    drawn = (
        "the most likely actions"
        if report["deterministic"]
        else "actions drawn as in training"
    )
    episodes = "1 episode"
    if report["episodes"] != 1:
        episodes = f"{report['episodes']} episodes"
    rows = [
        ("policy", report["policy"]),
        ("env", f"{report['env']}, {episodes}, {drawn}, seed {report['seed']}"),
        (
            "return",
            f"{spread(report['return'])}   mean ± standard deviation (lowest to highest)",
        ),
        ("length", f"{spread(report['length'])}   steps"),
        ("seconds", f"{report['seconds']:.1f}"),
        *([("video", report["video"])] if report["video"] else []),
    ]
    return rows
