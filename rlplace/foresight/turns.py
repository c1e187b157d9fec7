"""Predict what several runs do together on accelerators that they use in turns.

The rule of the real arbiter leases accelerators on a simulated clock to runs whose stages take their predicted seconds.
"""

from __future__ import annotations

import dataclasses
import heapq
import statistics
from collections.abc import Mapping, Sequence

from rlplace.execution.arbiter import Arbiter, Share
from rlplace.foresight.predict import Prediction

# Iterations that each run could do in the simulated time if the runs came one after the other
_ITERATIONS = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """A stage of a run. `seconds`: of the stage with its moves, if the run is alone."""

    stage: str
    accelerators: frozenset[int]
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSeconds:
    """The stages of an iteration of a run, in order, and its share of the accelerators."""

    name: str
    stages: Sequence[StageSeconds]
    share: Share

    @property
    def alone_s(self) -> float:
        """Seconds of an iteration of the run alone."""
        return sum(stage.seconds for stage in self.stages)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A stage of a run that works from `began_s` to `ended_s`."""

    run: str
    stage: str
    accelerators: frozenset[int]
    began_s: float
    ended_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What runs do together.

    `turns`: in the order of their beginnings. `seconds`: run -> seconds of an iteration while all runs work. `gain`:
    work that the runs do together in some time, divided by the work that they do in this time one after the other.
    """

    turns: Sequence[Turn]
    seconds: Mapping[str, float]
    gain: float


def seconds_of(
    prediction: Prediction, accelerators: Mapping[str, frozenset[int]]
) -> list[StageSeconds]:
    """Return the stages of a predicted iteration. `accelerators`: stage -> those on which it works."""
    seconds: dict[str, list[float]] = {stage: [] for stage in accelerators}
    # The first iteration differs, since all components come to their places in it
    for iteration in prediction.iterations[1:]:
        for one in iteration.stages:
            seconds[one.stage].append(one.ended_s - one.began_s)
    return [
        StageSeconds(
            stage=stage,
            accelerators=accelerators[stage],
            seconds=statistics.fmean(found) if found else 0.0,
        )
        for stage, found in seconds.items()
    ]


def predict_turns(runs: Sequence[RunSeconds]) -> Turns:
    """Return what runs do together, from the seconds of their stages. Each run takes some time for an iteration."""
    assert all(run.alone_s > 0 for run in runs), "an iteration takes time"
    arbiter = Arbiter({run.name: run.share for run in runs})
    by_name = {run.name: run for run in runs}
    # Run -> number of the stage that it is in, or waits for
    at = dict.fromkeys(by_name, 0)
    work_s = dict.fromkeys(by_name, 0.0)
    ends: list[tuple[float, str]] = []
    turns: list[Turn] = []
    until_s = _ITERATIONS * sum(run.alone_s for run in runs)
    now_s = 0.0

    def asks(name: str) -> None:
        stage = by_name[name].stages[at[name]]
        arbiter.ask(name, stage.accelerators, stage.stage, now_s)

    def grant() -> None:
        for name in arbiter.granted(now_s):
            stage = by_name[name].stages[at[name]]
            ended_s = now_s + stage.seconds
            heapq.heappush(ends, (ended_s, name))
            turns.append(
                Turn(
                    run=name,
                    stage=stage.stage,
                    accelerators=stage.accelerators,
                    began_s=now_s,
                    ended_s=ended_s,
                )
            )

    for name in by_name:
        asks(name)
    grant()
    while ends[0][0] <= until_s:
        now_s, name = heapq.heappop(ends)
        stages = by_name[name].stages
        work_s[name] += stages[at[name]].seconds
        at[name] = (at[name] + 1) % len(stages)
        asks(name)
        # Runs that end a stage at the same time ask before any of them is given more
        if not ends or ends[0][0] > now_s:
            grant()
    seconds = {}
    for name, run in by_name.items():
        iterations = work_s[name] / run.alone_s
        seconds[name] = until_s / iterations if iterations else float("inf")
    return Turns(turns=turns, seconds=seconds, gain=sum(work_s.values()) / until_s)
