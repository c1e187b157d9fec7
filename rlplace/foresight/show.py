"""A prediction as text, plain values and picture, and compared with measured seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rlplace.codes import problem
from rlplace.errors import ConfigError
from rlplace.foresight.known import (
    LAST,
    NOTHING_MEASURED,
    find_profile,
    foreign,
    last_profile,
)
from rlplace.foresight.predict import Prediction, can_predict, predict
from rlplace.foresight.scaling import listed
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import base_stage
from rlplace.report.timeline import render_timeline
from rlplace.report.utilisation import bottleneck
from rlplace.tables import chapter

NINE_OF_TEN = 1.64  # standard deviations to each side that contain nine of ten values
STAGES = ("rollout", "infer", "learn", "sync", "moves")
_NOTED = 6  # names of costs that a note lists
_BUSY = 0.9  # busy share from which a node's processors are reported


def foreseen(
    config: Any,
    plan: Plan,
    case: MemoryCase,
    words: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> Prediction:
    """Return the prediction of a plan, from the profile that its config names or else from the job's newest profile.

    `words`: the words of the job's command line; errors propose a command made from them. `tell`: called with a line of
    text that names the file, if the newest profile is used. Raises ConfigError if there is no profile of this job, or
    if the job cannot be predicted.
    """
    if not can_predict(config):
        problems = []
        for key, (reason, line) in config.missing.items():
            missing = problem(
                "plan-only", key, error="prediction", reason=reason, line=line
            )
            problems.append(missing)
        raise ConfigError(problems)
    profile = None
    if config.profile not in (None, LAST):
        profile = find_profile(config, plan, case, words)
    if profile is None:
        file, profile = last_profile(config, plan, words)
        tell(f"profile={file}, the last of this job")
    return predict(config, plan, case, profile, ranged=True)


def interval(prediction: Prediction) -> tuple[float, float]:
    """Return the least and the most seconds of an iteration. Nine of ten iterations are expected between them.

    The range follows from the measured variation of costs. If the scaling of costs with the number of ranks is assumed,
    the range covers all assumptions, and the most seconds may be infinite.
    """
    off = NINE_OF_TEN * prediction.costs.spread
    least_s = most_s = prediction.seconds
    if prediction.least_s is not None and prediction.most_s is not None:
        least_s = prediction.least_s
        most_s = prediction.most_s
    return max(0.0, least_s * (1.0 - off)), most_s * (1.0 + off)


def show_interval(prediction: Prediction) -> str:
    """Return a text with the least and the most seconds of an iteration, and the reason for this range.

    Return "" if they are equal.
    """
    low, high = interval(prediction)
    if high <= low:
        return ""
    until = "s or more" if math.isinf(high) else f"to {high:.3g} s"
    if prediction.costs.scaled:
        return f"{low:.3g} {until}, by how ranks share their work"
    return f"nine of ten {low:.3g} {until}"


def stage_seconds(
    numbers: Mapping[str, float], stages: Iterable[str] = STAGES
) -> dict[str, float]:
    """Return stage -> its seconds, and "iteration" -> the seconds of the iteration.

    `numbers`: metric -> value. Stages without a metric are left out.
    """
    found = {}
    for stage in ("iteration", *stages):
        metric = f"time/{stage.replace(' ', '_')}_s"
        if metric in numbers:
            found[stage] = numbers[metric]
    return found


def stages_of(prediction: Prediction) -> tuple[str, ...]:
    """Return the stages in the order in which they are printed: the usual stages, then other stages of a custom job."""
    own = [base_stage(stage) for stage in prediction.active]
    return tuple(dict.fromkeys([*STAGES, *own]))


def predicted_seconds(prediction: Prediction) -> dict[str, float]:
    """Return stage -> its predicted seconds, and "iteration" -> the predicted seconds of the iteration."""
    return stage_seconds(prediction.numbers, stages_of(prediction))


def limit(prediction: Prediction) -> str:
    """Return a line of text that names the bottleneck of an iteration: the component or stage that limits it."""
    longest = bottleneck(prediction.numbers, prediction.active)
    return f"bottleneck {longest}{crowded(prediction)}"


def crowded(prediction: Prediction) -> str:
    """Return the last part of a sentence, about the node with the busiest processors.

    Return "" if processors are not busy on any node.
    """
    node, share = max(prediction.processors.items(), key=lambda pair: pair[1])
    if share < _BUSY:
        return ""
    where = ""
    if len(prediction.processors) > 1:
        where = f" of node {node}"
    return f"; processors{where} at work {share:.0%}"


def notes(prediction: Prediction) -> list[str]:
    """Return lines of text about uncertain costs, such as missing, assumed, or measured on another machine."""
    costs = prediction.costs
    told = foreign(costs.profile)
    if NOTHING_MEASURED in told:
        # Every cost is assumed.
        return told
    told += scaling_notes(prediction)
    busy = "measured on a busy machine, or no line is near; to be measured again"
    for what, costs_of_kind in (
        ("not measured, counted as nothing", costs.missing),
        ("of other sizes than were measured", costs.stretched),
        ("assumed", sorted(costs.assumed)),
        (busy, costs.noisy),
    ):
        names = list(costs_of_kind)
        if not names:
            continue
        note = f"{what}: {', '.join(names[:_NOTED])}"
        if len(names) > _NOTED:
            note += f" and {len(names) - _NOTED} more"
        told.append(note)
    return told


def scaling_notes(prediction: Prediction) -> list[str]:
    """Return a list with one line of text: the calls for which the scaling with the number of ranks is assumed.

    The list is empty if nothing is assumed.
    """
    calls = []
    for call, (known, asked) in prediction.costs.scaled.items():
        calls.append(f"{call} (measured with {listed(known)}, here {asked})")
    if not calls:
        return []
    shown = ", ".join(calls[:_NOTED])
    if len(calls) > _NOTED:
        shown += f" and {len(calls) - _NOTED} more"
    return [f"assumed, not measured: that ranks share the work of {shown}"]


def render_prediction(prediction: Prediction) -> str:
    """Return a chapter of a printed plan: the predicted seconds of an iteration and of its stages."""
    seconds = predicted_seconds(prediction)
    whole = f"an iteration takes {seconds.pop('iteration'):.3g} s"
    shown = show_interval(prediction)
    if shown:
        whole += f", {shown}"
    stages = [f"{stage} {value:.3g} s" for stage, value in seconds.items()]
    lines = [whole, ", ".join(stages), limit(prediction), *notes(prediction)]
    return chapter("seconds: predicted from the profile", lines)


def draw_prediction(prediction: Prediction, plan: Plan, name: str) -> str:
    """Return an SVG document of a predicted iteration: a row for each accelerator, time from left to right.

    `name`: name of the job, for the title.
    """
    placement = plan.placement
    accelerators = sorted(placement.used)
    title = f"{name}, predicted"
    return render_timeline(
        prediction.iterations, accelerators, placement.components, title
    )


def prediction_parts(prediction: Prediction, plan: Plan, name: str) -> list[str]:
    """Return parts of an HTML page: a heading, the picture of a predicted iteration, and its seconds as text."""
    title, _, text = render_prediction(prediction).partition("\n")
    picture = draw_prediction(prediction, plan, name)
    return [
        f"<h2>{title.capitalize()}</h2>",
        f'<div class="plan">{picture}</div>',
        f"<pre>{escape(text)}</pre>",
    ]


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as plain values for JSON."""
    low, high = interval(prediction)
    # Begin and end of each stage, in seconds from the start of the iteration
    last = prediction.iterations[-1]
    stages = []
    for stage in last.stages:
        began_s = stage.began_s - last.began_s
        stages.append([stage.stage, began_s, stage.ended_s - last.began_s])
    return {
        "seconds": predicted_seconds(prediction),
        "low_s": low,
        # JSON has no infinite number.
        "high_s": None if math.isinf(high) else high,
        "bottleneck": limit(prediction),
        "queues": dict(prediction.queues),
        "notes": notes(prediction),
        "stages": stages,
    }


def compare_seconds(
    prediction: Prediction, measured: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return stage, or "iteration" -> its "predicted" and "measured" seconds. `measured`: metric -> seconds."""
    there = stage_seconds(measured, stages_of(prediction))
    compared = {}
    for stage, seconds in predicted_seconds(prediction).items():
        if stage in there:
            compared[stage] = {"predicted": seconds, "measured": there[stage]}
    return compared
