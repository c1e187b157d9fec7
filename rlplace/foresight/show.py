"""A prediction in words and as plain values, and beside what a run has measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlplace.foresight.known import foreign
from rlplace.foresight.predict import Prediction

NINE_OF_TEN = 1.64  # standard deviations to both sides
_STAGES = ("rollout", "infer", "learn", "sync", "moves")
_NOTED = 6


def interval(prediction: Prediction) -> tuple[float, float]:
    """Return between what seconds nine of ten iterations are, if they vary as those of the profile did."""
    off = NINE_OF_TEN * prediction.costs.spread
    return max(0.0, prediction.seconds * (1.0 - off)), prediction.seconds * (1.0 + off)


def stage_seconds(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of an iteration and of its stages."""
    found = {stage: numbers.get(f"time/{stage}_s") for stage in ("iteration", *_STAGES)}
    return {stage: seconds for stage, seconds in found.items() if seconds is not None}


def bottleneck(prediction: Prediction) -> str:
    """Say in one sentence what limits an iteration."""
    seconds = stage_seconds(prediction.numbers)
    whole = seconds.pop("iteration")
    longest = max(seconds, key=seconds.__getitem__)
    node, share = max(prediction.processors.items(), key=lambda pair: pair[1])
    if share >= 0.9:
        where = f" of node {node}" if len(prediction.processors) > 1 else ""
        return f"the processors{where} are at work {share:.0%} of the time; {longest} is {seconds[longest] / whole:.0%}"
    work = {
        name.partition("/")[0]: value
        for name, value in prediction.numbers.items()
        if name in ("env/sim_s", "rollout/policy_s") and longest == "rollout"
    }
    if work:
        busiest = max(work, key=work.__getitem__)
        share = work[busiest] / seconds[longest]
        return f"rollout is {seconds[longest] / whole:.0%} of an iteration; {busiest} works in {share:.0%} of it"
    return f"{longest} is {seconds[longest] / whole:.0%} of an iteration"


def notes(prediction: Prediction) -> list[str]:
    """Say what the prediction rests on that was not measured here."""
    costs = prediction.costs
    told = foreign(costs.profile)
    for what, names in (
        ("not measured, counted as nothing", costs.missing),
        ("of other sizes than were measured", costs.stretched),
        ("assumed", sorted(costs.assumed)),
    ):
        shown = [*names][:_NOTED]
        if shown:
            more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
            told.append(f"{what}: {', '.join(shown)}{more}")
    return told


def render_prediction(prediction: Prediction) -> str:
    """Write the seconds of an iteration as a chapter of a plan."""
    low, high = interval(prediction)
    seconds = stage_seconds(prediction.numbers)
    lines = [f"an iteration takes {seconds.pop('iteration'):.3g} s, nine of ten {low:.3g} to {high:.3g} s"]
    lines.append(", ".join(f"{stage} {value:.3g} s" for stage, value in seconds.items()))
    lines += [bottleneck(prediction), *notes(prediction)]
    return "\n".join(["seconds: predicted from the profile", *(f"  {line}" for line in lines)])


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """Return the prediction as plain values."""
    low, high = interval(prediction)
    return {
        "seconds": stage_seconds(prediction.numbers),
        "low_s": low,
        "high_s": high,
        "bottleneck": bottleneck(prediction),
        "queues": dict(prediction.queues),
        "notes": notes(prediction),
    }


def compare_seconds(prediction: Prediction, measured: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the seconds of an iteration and of its stages, predicted and measured."""
    there = stage_seconds(measured)
    return {
        stage: {"predicted": seconds, "measured": there[stage]}
        for stage, seconds in stage_seconds(prediction.numbers).items()
        if stage in there
    }
