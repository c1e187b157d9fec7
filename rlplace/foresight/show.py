"""A prediction in words and as plain values, and beside what a run has measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from rlplace.config.schema import Config
from rlplace.errors import ConfigError, Problem
from rlplace.foresight.known import (
    LAST,
    NOTHING_MEASURED,
    find_profile,
    foreign,
    last_profile,
)
from rlplace.foresight.predict import Prediction, can_predict, predict
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.report.timeline import render_timeline
from rlplace.report.utilisation import bottleneck

NINE_OF_TEN = 1.64  # standard deviations to both sides
STAGES = ("rollout", "infer", "learn", "sync", "moves")
_NOTED = 6
_BUSY = 0.9


def foreseen(
    config: Config,
    plan: Plan,
    case: MemoryCase,
    words: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> Prediction:
    """Predict a plan from the profile that its config names, or from the last one, whose file is told.

    `words`: a command line of the job, for the command that measures it. Raises ConfigError where no profile is of it.
    """
    if not can_predict(config):
        what = "is required to predict seconds"
        missing = config.missing.items()
        raise ConfigError(
            [
                Problem(code="plan-only", key=k, what=what, why=why, fix=fix)
                for k, (why, fix) in missing
            ]
        )
    profile = (
        find_profile(config, plan, case, words)
        if config.profile not in (None, LAST)
        else None
    )
    if profile is None:
        file, profile = last_profile(config, plan, words)
        tell(f"profile={file}, the last of this job")
    return predict(config, plan, case, profile)


def interval(prediction: Prediction) -> tuple[float, float]:
    """Return between what seconds nine of ten iterations are, if they vary as those of the profile did."""
    off = NINE_OF_TEN * prediction.costs.spread
    return max(0.0, prediction.seconds * (1.0 - off)), prediction.seconds * (1.0 + off)


def stage_seconds(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of an iteration and of its stages."""
    found = {stage: numbers.get(f"time/{stage}_s") for stage in ("iteration", *STAGES)}
    return {stage: seconds for stage, seconds in found.items() if seconds is not None}


def limit(prediction: Prediction) -> str:
    """Say in one line what limits an iteration."""
    return f"bottleneck {bottleneck(prediction.numbers, prediction.active)}{crowded(prediction)}"


def crowded(prediction: Prediction) -> str:
    """Return the end of a sentence: on which node the processors are at work nearly always; "" for none."""
    node, share = max(prediction.processors.items(), key=lambda pair: pair[1])
    where = f" of node {node}" if len(prediction.processors) > 1 else ""
    if share >= _BUSY:
        return f"; processors{where} at work {share:.0%}"
    return ""


def notes(prediction: Prediction) -> list[str]:
    """Say what the prediction rests on that was not measured here."""
    costs = prediction.costs
    told = foreign(costs.profile)
    if told == [NOTHING_MEASURED]:
        return told
    for what, names in (
        ("not measured, counted as nothing", costs.missing),
        ("of other sizes than were measured", costs.stretched),
        ("assumed", sorted(costs.assumed)),
        (
            "measured on a busy machine, or no line is near; to be measured again",
            costs.noisy,
        ),
    ):
        shown = [*names][:_NOTED]
        if shown:
            more = (
                f" and {len(names) - len(shown)} more"
                if len(names) > len(shown)
                else ""
            )
            told.append(f"{what}: {', '.join(shown)}{more}")
    return told


def render_prediction(prediction: Prediction) -> str:
    """Write the seconds of an iteration as a chapter of a plan."""
    low, high = interval(prediction)
    seconds = stage_seconds(prediction.numbers)
    varies = f", nine of ten {low:.3g} to {high:.3g} s" if high > low else ""
    lines = [f"an iteration takes {seconds.pop('iteration'):.3g} s{varies}"]
    lines.append(
        ", ".join(f"{stage} {value:.3g} s" for stage, value in seconds.items())
    )
    lines += [limit(prediction), *notes(prediction)]
    return "\n".join(
        ["seconds: predicted from the profile", *(f"  {line}" for line in lines)]
    )


def draw_prediction(prediction: Prediction, plan: Plan, name: str) -> str:
    """Draw an iteration as an SVG document: accelerators down, seconds across, as the report of a run does."""
    accelerators = sorted(plan.placement.used)
    return render_timeline(
        prediction.iterations,
        accelerators,
        plan.placement.components,
        f"{name}, predicted",
    )


def prediction_parts(prediction: Prediction, plan: Plan, name: str) -> list[str]:
    """Write the seconds of an iteration and their picture as parts of an HTML page."""
    title, _, text = render_prediction(prediction).partition("\n")
    picture = draw_prediction(prediction, plan, name)
    return [
        f"<h2>{title.capitalize()}</h2>",
        f'<div class="plan">{picture}</div>',
        f"<pre>{escape(text)}</pre>",
    ]


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """Return the prediction as plain values."""
    low, high = interval(prediction)
    last = prediction.iterations[-1]
    return {
        "seconds": stage_seconds(prediction.numbers),
        "low_s": low,
        "high_s": high,
        "bottleneck": limit(prediction),
        "queues": dict(prediction.queues),
        "notes": notes(prediction),
        "stages": [
            [stage.stage, stage.began_s - last.began_s, stage.ended_s - last.began_s]
            for stage in last.stages
        ],
    }


def compare_seconds(
    prediction: Prediction, measured: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return the seconds of an iteration and of its stages, predicted and measured."""
    there = stage_seconds(measured)
    return {
        stage: {"predicted": seconds, "measured": there[stage]}
        for stage, seconds in stage_seconds(prediction.numbers).items()
        if stage in there
    }
