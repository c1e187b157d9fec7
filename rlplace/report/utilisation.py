"""What accelerators did with the time of a run, in numbers: at work, idle, in moves, in sync.

::

    one accelerator:   moves | sync | moves | rollout ▓▓▓▓▓▓▓░░░ | moves | learn ▓▓▓▓▓▓▓▓░
                                              at work     idle

At work is the time of ranks inside their methods less the waiting they report (`<component>/wait_s`, `/put_s`). Moves
and sync hold up all components, so they count whole, on every accelerator. A rank that waits for its siblings in a
collective is at work, as it is to the accelerator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.metrics import Metrics
from rlplace.placement.schedule import base_stage
from rlplace.units import counted

WAITING = (
    "wait",
    "infer_wait",
    "accumulate_wait",
    "put",
)  # laps in which a rank waits; it reports them as metrics
_WAITING = tuple(f"{part}_s" for part in WAITING)
SYNC = "sync"
MERGED = "rollout || learn"

Occupancy = Mapping[
    str, Sequence[tuple[int, ...]]
]  # component -> the accelerators of each of its ranks
Work = Mapping[int, Mapping[str, float]]  # accelerator -> component -> seconds at work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """One stage of one iteration, or summed over iterations."""

    stage: str
    moves_s: float  # on entry
    seconds: float  # of the stage itself
    work: Work

    def busy_s(self, accelerator: int) -> float:
        """Return the busy seconds of an accelerator: the sum over its components, at most the whole stage."""
        return min(self.seconds, sum(self.work.get(accelerator, {}).values()))

    def plus(self, other: StageUse) -> StageUse:
        work = {a: dict(row) for a, row in self.work.items()}
        for accelerator, row in other.work.items():
            mine = work.setdefault(accelerator, {})
            for component, seconds in row.items():
                mine[component] = mine.get(component, 0.0) + seconds
        moves_s = self.moves_s + other.moves_s
        seconds = self.seconds + other.seconds
        return StageUse(stage=self.stage, moves_s=moves_s, seconds=seconds, work=work)


class Usage:
    """Collects the busy seconds that ranks report, stage by stage. Owned by the loop; used by one thread."""

    def __init__(self, occupancy: Occupancy, *, merged: bool = False) -> None:
        """`merged`: all stages but sync count as one, because rollout runs ahead and reports its work when it ends."""
        self.accelerators = tuple(
            sorted({a for ranks in occupancy.values() for held in ranks for a in held})
        )
        self.seconds = 0.0  # of all iterations
        self.last: tuple[StageUse, ...] = ()  # of the latest iteration
        self._occupancy = occupancy
        self._merged = merged
        self._work: dict[int, dict[str, float]] = {}  # of the stage that runs
        self._stages: list[StageUse] = []  # of the iteration that runs
        self._totals: dict[str, StageUse] = {}

    def worked(
        self, component: str, seconds: Sequence[float], ranks: Sequence[Metrics]
    ) -> None:
        """Record the seconds that each rank spent inside a method, less the waiting it reports."""
        for held, inside, metrics in zip(
            self._occupancy[component], seconds, ranks, strict=True
        ):
            waited = sum(
                metric.value
                for name, metric in metrics.items()
                if name.rpartition("/")[2] in _WAITING
            )
            busy = max(0.0, inside - waited)
            for accelerator in held:
                row = self._work.setdefault(accelerator, {})
                row[component] = row.get(component, 0.0) + busy

    def stage_ended(self, stage: str, *, moves_s: float, seconds: float) -> None:
        """Close a stage: all work recorded since the last one belongs to it."""
        name = MERGED if self._merged and stage != SYNC else stage
        use = StageUse(stage=name, moves_s=moves_s, seconds=seconds, work=self._work)
        self._work = {}
        if name == MERGED and self._stages and self._stages[-1].stage == MERGED:
            use = self._stages.pop().plus(use)
        self._stages.append(use)

    def begin_again(self) -> None:
        """Drop what was recorded of the iteration that runs."""
        self._work = {}
        self._stages = []

    def iteration_ended(self, seconds: float) -> dict[str, float]:
        """Close an iteration. Return its shares as metrics; none where no accelerator is used."""
        self.last = tuple(self._stages)
        self._stages = []
        self.seconds += seconds
        for use in self.last:
            before = self._totals.get(use.stage)
            self._totals[use.stage] = use if before is None else before.plus(use)
        if not self.accelerators or not seconds:
            return {}
        shares = shares_of(self.last, self.accelerators, seconds)
        return {f"util/{name}_share": value for name, value in shares.items()}

    def record(self, planned: Mapping[str, int]) -> dict[str, Any]:
        """Return the whole run as plain values. `planned`: accelerators at work by stage, according to the plan."""
        if not self.accelerators or not self.seconds:
            return {}
        uses = tuple(self._totals.values())
        many = len(self.accelerators)
        stages: dict[str, dict[str, Any]] = {}
        for use in uses:
            busy_s = sum(use.busy_s(a) for a in self.accelerators)
            stages[use.stage] = {
                "seconds": use.seconds,
                "moves_s": use.moves_s,
                "at_work": busy_s / use.seconds
                if use.seconds
                else 0.0,  # accelerators, on average
                "planned_at_work": planned.get(use.stage),
            }
        return {
            "accelerators": many,
            "accelerator_hours": many * self.seconds / 3600,
            "shares": shares_of(uses, self.accelerators, self.seconds),
            "stages": stages,
            "by_accelerator": {
                str(a): {
                    u.stage: {"busy_s": u.busy_s(a), "idle_s": u.seconds - u.busy_s(a)}
                    for u in uses
                    if u.stage != SYNC
                }
                for a in self.accelerators
            },
        }


def shares_of(
    uses: Sequence[StageUse], accelerators: Sequence[int], seconds: float
) -> dict[str, float]:
    """Divide `seconds` into busy, bubble (idle within a stage), moves and sync; what is left is the driver's."""
    stages = [use for use in uses if use.stage != SYNC]
    everything = len(accelerators) * seconds
    busy = sum(use.busy_s(a) for use in stages for a in accelerators)
    there = len(accelerators) * sum(use.seconds for use in stages)
    return {
        "busy": busy / everything,
        "bubble": (there - busy) / everything,
        "moves": sum(use.moves_s for use in uses) / seconds,
        "sync": sum(use.seconds for use in uses if use.stage == SYNC) / seconds,
    }


def usage_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Render the record for the summary of a run."""
    if not record:
        return []
    shares = record["shares"]
    many = record["accelerators"]
    stages = ", ".join(
        f"{stage} {row['at_work']:.1f}"
        + (f" ({row['planned_at_work']})" if row["planned_at_work"] is not None else "")
        for stage, row in record["stages"].items()
        if stage != SYNC
    )
    whole = (
        f"{shares['busy']:.0%} of the time of {counted(many, 'accelerator')}, idle {shares['bubble']:.0%}, "
        f"moves {shares['moves']:.0%}, sync {shares['sync']:.0%}; {record['accelerator_hours']:.3g} accelerator hours"
    )
    return [
        ("at work", whole),
        ("", f"{stages}   accelerators at work, measured (planned)"),
    ]


# ── the work of an iteration, by the metrics of its components ───────────────────────────────────────────────────────

# Stage -> the metrics of a component that are work, not waiting.
_WORK = {
    "rollout": ("sim_s", "policy_s", "infer_s"),
    "infer": ("infer_s",),
    "learn": ("learn_s",),
}
# The same as laps; and the laps within them in which ranks look whether the others have come as far.
WORKING = ("sim", "policy", "prefill", "decode", "infer", "learn")
MEETING = "exchange"


def longest_works(
    numbers: Mapping[str, float], works: Mapping[str, Sequence[str]]
) -> list[tuple[float, str, str]]:
    """Return seconds, component and stage of the longest work in each stage. `works`: components by stage."""
    each = (
        [
            (numbers.get(f"{c}/{part}", 0.0), c, stage)
            for c in components
            for part in _WORK.get(base_stage(stage), ())
        ]
        for stage, components in works.items()
    )
    return [max(found) for found in each if found]


def overhead(
    numbers: Mapping[str, float],
    works: Mapping[str, Sequence[str]],
    on_cores: Mapping[str, float],
) -> dict[str, float]:
    """Return the seconds and share of an iteration that were neither simulator, policy forward, scoring nor learning.

    Ranks that work in the same stage overlap: what the slowest takes counts as the work of the stage, or, where ranks
    wait for cores at which others work, what all take on these. `on_cores`: that, by stage. An evaluation is work of
    its own, whole.
    """
    stages = sum(
        max(s, on_cores.get(stage, 0.0))
        for s, _, stage in longest_works(numbers, works)
    )
    total = numbers["time/iteration_s"]
    work = stages + numbers.get("time/evaluate_s", 0.0)
    spent = max(0.0, total - work)
    return {
        "time/overhead_s": spent,
        "time/overhead_share": spent / total if total > 0 else 0.0,
    }


def bottleneck(numbers: Mapping[str, float], works: Mapping[str, Sequence[str]]) -> str:
    """Name what took longest of an iteration: one component in one stage, or all in another; and the idle share."""
    longest = [
        (seconds, f"{component} in {stage}")
        for seconds, component, stage in longest_works(numbers, works)
    ]
    longest += [
        (numbers.get(f"time/{part}_s", 0.0), part)
        for part in ("moves", SYNC, "evaluate")
    ]
    seconds, what = max(longest)
    busy = numbers.get("util/busy_share")
    idle = "" if busy is None else f"; accelerators idle {1 - busy:.0%} of it"
    return f"{what}, {seconds:.2f} of {numbers['time/iteration_s']:.2f} s{idle}"
