"""Metrics: named numbers of ranks, each with the way in which it is reduced over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

# Metric of a component of a custom job: the number of values in its results that cannot be metrics. Its notes list
# these values.
NOT_METRICS = "not_metrics"
# Metric of env and of evaluations: the number of prompts that were too long and left out. Its note says so.
DROPPED_PROMPTS = "prompts_dropped"
# Metric of env in a run on written answers: the number of rows that are cut at the limit of tokens. Its note says so.
CUT_ROWS = "rows_cut"
# Metric of learned samples and of evaluations: the number of answers to which no reward applies. Its note says so.
UNREWARDED = "unrewarded"
# Metric of env and of evaluations: the number of answers that are in no mean, since their rewards failed or are not
# finite. Its note says so.
LEFT_OUT = "left_out"
# Metric of a machine that cannot fully confine code of answers, without its component
UNCONFINED = "unconfined"
# Metric of evaluations on simulators: 1 if episodes did not end. Its note says so.
ENDLESS_EPISODES = "eval/endless"
# Number of episodes of an evaluation; its notes say what is unusual about their simulators
PLAYED_EPISODES = "eval/episodes"
# Mean difference of log-probabilities in rollout and actor; of simulators, its notes say that it is too large
MISMATCH = "actor/mismatch"
MISMATCH_MAX = "actor/mismatch_max"
# 1 if the KL ended the updates of an iteration early; its notes say what is unusual about the samples or the policy
KL_STOP = "actor/kl_stop"
Reduction = Literal["mean", "sum", "max", "min"]
_REDUCE: Mapping[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A number from one rank, and how the numbers of all ranks are reduced to a single number.

    `reduce`: mean, sum, max or min. `weight`: weight of the number in a mean, such as the number of samples or
    episodes. With weight 0, the rank has no data: its number is left out of any reduction. `notes`: lines of text about
    the events that the number counts, or about the first of them. Ranks that count the same event must have equal
    notes about it.
    """

    value: float
    reduce: Reduction = "mean"
    weight: float = 1.0
    notes: tuple[str, ...] = ()


Metrics = Mapping[
    str, Metric
]  # "component/name" -> metric; names of seconds end in _s, those of bytes in _bytes


def reduce_metrics(ranks: Iterable[Metrics]) -> dict[str, float]:
    """Return name of each metric -> its number, reduced over all ranks that have data.

    `ranks`: the metrics of each rank. Raises ValueError if ranks have different reductions for a metric.
    """
    by_name: dict[str, list[Metric]] = {}
    for metrics in ranks:
        for name, metric in metrics.items():
            by_name.setdefault(name, []).append(metric)
    reduced: dict[str, float] = {}
    for name, metrics_of_name in by_name.items():
        reductions = {m.reduce for m in metrics_of_name}
        if len(reductions) > 1:
            raise ValueError(
                f"metric {name}: reduced as {' and '.join(sorted(reductions))}"
            )
        seen = [m for m in metrics_of_name if m.weight > 0]
        if not seen:
            continue
        if reductions == {"mean"}:
            reduced[name] = sum(m.value * m.weight for m in seen) / sum(
                m.weight for m in metrics_of_name
            )
        else:
            reduced[name] = _REDUCE[reductions.pop()]([m.value for m in seen])
    return reduced


def notes_of(ranks: Iterable[Metrics]) -> dict[str, list[str]]:
    """Return name of each metric -> the notes of all ranks about the metric, without repetition.

    `ranks`: the metrics of each rank. Metrics without notes are left out.
    """
    found: dict[str, dict[str, None]] = {}
    for metrics in ranks:
        for name, metric in metrics.items():
            if metric.notes:
                found.setdefault(name, {}).update(dict.fromkeys(metric.notes))
    return {name: list(notes) for name, notes in found.items()}
