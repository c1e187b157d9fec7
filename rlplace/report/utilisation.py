"""What accelerators did in the time of a run, in numbers: at work, idle, in moves, in sync.

::

    one accelerator:   moves | sync | moves | rollout ▓▓▓▓▓▓▓░░░ | moves | learn ▓▓▓▓▓▓▓▓░
                                              at work     idle

Time at work is the time that ranks spend inside their methods, minus the waiting that they report
(`<component>/wait_s`, `/put_s`). Sync is the sending of weights, in a stage of any name. During moves and sync all
components have to wait, so these times count fully, for every accelerator. A rank that waits for other ranks in a
collective operation counts as at work, because its accelerator is busy meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.metrics import Metrics
from rlplace.placement.schedule import base_stage
from rlplace.units import counted

# Laps in which a rank waits; it reports them as metrics.
WAITING = ("wait", "infer_wait", "accumulate_wait", "put")
_WAITING = tuple(f"{part}_s" for part in WAITING)
SYNC = "sync"
MERGED = "rollout || learn"

# Component -> the accelerators of each of its ranks.
Occupancy = Mapping[str, Sequence[tuple[int, ...]]]
# Accelerator -> component -> seconds at work.
Work = Mapping[int, Mapping[str, float]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """The use of accelerators in one stage, in one iteration or summed over several iterations.

    `moves_s`: seconds of the moves before the stage. `seconds`: duration of the stage without these moves. `sync_s`: of
    this duration, the seconds in which weights were sent. `work`: accelerator -> component -> seconds at work.
    """

    stage: str
    moves_s: float
    seconds: float
    sync_s: float = 0.0
    work: Work

    @property
    def within_s(self) -> float:
        """Seconds in which the components of the stage work: those of the stage without the sending of weights."""
        return self.seconds - self.sync_s

    @property
    def only_sync(self) -> bool:
        """Whether the stage sends weights and does nothing else."""
        return only_sync(self.seconds, self.sync_s)

    def busy_s(self, accelerator: int) -> float:
        """Return the seconds in which an accelerator was at work.

        They are the sum over its components, but at most `within_s`.
        """
        return min(self.within_s, sum(self.work.get(accelerator, {}).values()))

    def plus(self, other: StageUse) -> StageUse:
        """Return the sum of this use and `other`, which is a use of the same stage."""
        work = {accelerator: dict(row) for accelerator, row in self.work.items()}
        for accelerator, row in other.work.items():
            mine = work.setdefault(accelerator, {})
            for component, seconds in row.items():
                mine[component] = mine.get(component, 0.0) + seconds
        return StageUse(
            stage=self.stage,
            moves_s=self.moves_s + other.moves_s,
            seconds=self.seconds + other.seconds,
            sync_s=self.sync_s + other.sync_s,
            work=work,
        )


def only_sync(seconds: float, sync_s: float) -> bool:
    """Return whether a stage of `seconds` did nothing but send weights. `sync_s`: its seconds of sending."""
    return sync_s > 0.0 and sync_s >= seconds


class Usage:
    """Collects the seconds at work that ranks report, stage by stage. It belongs to the loop."""

    def __init__(self, occupancy: Occupancy, *, merged: bool = False) -> None:
        """Begin without any work.

        `occupancy`: component -> accelerators of each of its ranks. `merged`: whether all stages that do more than send
        weights count as one stage. This is needed if rollout runs ahead of learning, because it then reports its work
        only when it ends.
        """
        used: set[int] = set()
        for ranks in occupancy.values():
            used.update(*ranks)
        self.accelerators = tuple(sorted(used))
        # Seconds of all iterations
        self.seconds = 0.0
        # Stages of the latest iteration
        self.last: tuple[StageUse, ...] = ()
        self._occupancy = occupancy
        self._merged = merged
        # Work in the stage under way
        self._work: dict[int, dict[str, float]] = {}
        # Stages of the iteration under way
        self._stages: list[StageUse] = []
        self._totals: dict[str, StageUse] = {}

    def worked(
        self,
        component: str,
        seconds: Sequence[float],
        metrics: Sequence[Metrics],
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Add the work of a component's ranks: their seconds inside a method minus the waiting that they report.

        `seconds`: for each rank, its seconds inside the method. `metrics`: for each rank, its metrics, which contain
        its waiting. `ranks`: the ranks; None: all ranks of the component.
        """
        places = self._occupancy[component]
        if ranks is not None:
            places = [places[rank] for rank in ranks]
        for held, inside, reported in zip(places, seconds, metrics, strict=True):
            waited = 0.0
            for name, metric in reported.items():
                if name.rpartition("/")[2] in _WAITING:
                    waited += metric.value
            busy = max(0.0, inside - waited)
            for accelerator in held:
                row = self._work.setdefault(accelerator, {})
                row[component] = row.get(component, 0.0) + busy

    def stage_ended(
        self, stage: str, *, moves_s: float, seconds: float, sync_s: float = 0.0
    ) -> None:
        """End a stage. All work that was added since the previous stage ended belongs to this stage.

        `moves_s`: seconds of the moves before the stage. `seconds`: duration of the stage without these moves.
        `sync_s`: of this duration, the seconds in which weights were sent.
        """
        name = stage
        if self._merged and not only_sync(seconds, sync_s):
            name = MERGED
        use = StageUse(
            stage=name,
            moves_s=moves_s,
            seconds=seconds,
            sync_s=sync_s,
            work=self._work,
        )
        self._work = {}
        if name == MERGED and self._stages and self._stages[-1].stage == MERGED:
            use = self._stages.pop().plus(use)
        self._stages.append(use)

    def begin_again(self) -> None:
        """Drop all records of the present iteration, which is repeated."""
        self._work = {}
        self._stages = []

    def iteration_ended(self, seconds: float) -> dict[str, float]:
        """End an iteration that took `seconds`. Return the shares of its time as metrics: busy, bubble, moves and sync.

        Return {} if no accelerator is used.
        """
        self.last = tuple(self._stages)
        self._stages = []
        self.seconds += seconds
        for use in self.last:
            if use.stage in self._totals:
                use = self._totals[use.stage].plus(use)
            self._totals[use.stage] = use
        if not self.accelerators or not seconds:
            return {}
        shares = shares_of(self.last, self.accelerators, seconds)
        return {f"util/{name}_share": value for name, value in shares.items()}

    def record(self, planned: Mapping[str, int]) -> dict[str, Any]:
        """Return the use of accelerators in the whole run, as plain values for JSON; {} if no accelerator was used.

        `planned`: stage -> number of accelerators at work, according to the plan.
        """
        if not self.accelerators or not self.seconds:
            return {}
        uses = tuple(self._totals.values())
        count = len(self.accelerators)
        stages: dict[str, dict[str, Any]] = {}
        for use in uses:
            # Accelerators at work, on average over the seconds in which components work.
            at_work = 0.0
            if use.within_s:
                busy_s = sum(use.busy_s(a) for a in self.accelerators)
                at_work = busy_s / use.within_s
            stages[use.stage] = {
                "seconds": use.seconds,
                "sync_s": use.sync_s,
                "moves_s": use.moves_s,
                "at_work": at_work,
                "planned_at_work": planned.get(use.stage),
            }
        return {
            "accelerators": count,
            "accelerator_hours": count * self.seconds / 3600,
            "shares": shares_of(uses, self.accelerators, self.seconds),
            "stages": stages,
            "by_accelerator": {str(a): self._seconds_of(a) for a in self.accelerators},
        }

    def _seconds_of(self, accelerator: int) -> dict[str, dict[str, float]]:
        """Return stage -> seconds in which an accelerator was at work (`busy_s`) and idle (`idle_s`), without sync."""
        found = {}
        for stage, use in self._totals.items():
            if not use.only_sync:
                busy_s = use.busy_s(accelerator)
                found[stage] = {"busy_s": busy_s, "idle_s": use.within_s - busy_s}
        return found


def shares_of(
    uses: Sequence[StageUse], accelerators: Sequence[int], seconds: float
) -> dict[str, float]:
    """Return name -> share of `seconds`: busy, bubble (idle within a stage), moves and sync.

    The shares do not add up to 1, because the driver also takes time. `uses`: the use in each stage within `seconds`.
    `accelerators`: the accelerators over which busy and bubble are averaged.
    """
    # Seconds of all accelerators at work
    busy = 0.0
    # Seconds of all stages without the sending of weights
    within_s = 0.0
    moves_s = 0.0
    sync_s = 0.0
    for use in uses:
        moves_s += use.moves_s
        sync_s += use.sync_s
        if use.only_sync:
            continue
        within_s += use.within_s
        for accelerator in accelerators:
            busy += use.busy_s(accelerator)
    everything = len(accelerators) * seconds
    within = len(accelerators) * within_s
    return {
        "busy": busy / everything,
        "bubble": (within - busy) / everything,
        "moves": moves_s / seconds,
        "sync": sync_s / seconds,
    }


def usage_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (head, text) of each line about accelerators in a run's summary.

    `record`: the result of `Usage.record`.
    """
    if not record:
        return []
    stages = []
    for stage, row in record["stages"].items():
        if only_sync(row["seconds"], row["sync_s"]):
            continue
        text = f"{stage} {row['at_work']:.1f}"
        if row["planned_at_work"] is not None:
            text += f" ({row['planned_at_work']})"
        stages.append(text)

    shares = record["shares"]
    accelerators = counted(record["accelerators"], "accelerator")
    whole = (
        f"{shares['busy']:.0%} of the time of {accelerators}, idle {shares['bubble']:.0%}, "
        f"moves {shares['moves']:.0%}, sync {shares['sync']:.0%}; "
        f"{record['accelerator_hours']:.3g} accelerator hours"
    )
    note = "accelerators at work, measured (planned)"
    return [("at work", whole), ("", f"{', '.join(stages)}   {note}")]


# ── the work of an iteration, by the metrics of its components ───────────────────────

# Stage -> the metrics of a component that are work, not waiting.
_WORK = {
    "rollout": ("sim_s", "policy_s", "infer_s"),
    "infer": ("infer_s",),
    "learn": ("learn_s",),
}
# Names of laps that are work; and the name of laps within work in which a rank checks the progress of others.
WORKING = ("sim", "policy", "prefill", "decode", "infer", "learn")
MEETING = "exchange"


def longest_works(
    numbers: Mapping[str, float], works: Mapping[str, Sequence[str]]
) -> list[tuple[float, str, str]]:
    """Return (seconds, component, stage) for each stage: the component that works longest in it.

    `numbers`: the metrics of an iteration. `works`: stage -> components at work.
    """
    longest = []
    for stage, components in works.items():
        found = []
        for component in components:
            for part in _WORK.get(base_stage(stage), ()):
                seconds = numbers.get(f"{component}/{part}", 0.0)
                found.append((seconds, component, stage))
        if found:
            longest.append(max(found))
    return longest


def overhead(
    numbers: Mapping[str, float],
    works: Mapping[str, Sequence[str]],
    on_cores: Mapping[str, float],
) -> dict[str, float]:
    """Return metrics with the overhead of an iteration, in seconds and as a share of the iteration.

    Overhead is the time that is not spent on simulators, forward passes of the policy, scoring or learning.
    Ranks in the same stage work at the same time, so a stage's work is the work of its slowest rank; or, if that is
    longer, the time that the work of all ranks takes on the cores that they share.

    `numbers`: the metrics of the iteration. `works`: stage -> components at work. `on_cores`: stage -> seconds that the
    work of all ranks takes on the cores that they share.
    """
    work = 0.0
    for seconds, _, stage in longest_works(numbers, works):
        work += max(seconds, on_cores.get(stage, 0.0))
    total = numbers["time/iteration_s"]
    spent = max(0.0, total - work)
    share = 0.0
    if total > 0:
        share = spent / total
    return {"time/overhead_s": spent, "time/overhead_share": share}


def bottleneck(numbers: Mapping[str, float], works: Mapping[str, Sequence[str]]) -> str:
    """Return a text about the longest part of an iteration: its name and seconds, and the idle share of accelerators.

    `numbers`: the metrics of the iteration. `works`: stage -> components at work. A part is one component in one stage,
    or all moves, or sync. A stage also counts as a part if the work of its components is not known, as in a
    custom job.
    """
    longest = []
    known = {SYNC}
    for seconds, component, stage in longest_works(numbers, works):
        longest.append((seconds, f"{component} in {stage}"))
        if seconds:
            known.add(stage)
    for stage in works:
        # A stage that sends weights and works counts the sending for itself.
        sending = f"{stage} weights"
        for part in (stage, sending):
            metric = f"time/{part.replace(' ', '_')}_s"
            if part not in known and metric in numbers:
                longest.append((numbers[metric], part))
    for part in ("moves", SYNC):
        longest.append((numbers.get(f"time/{part}_s", 0.0), part))
    seconds, what = max(longest)
    text = f"{what}, {seconds:.2f} of {numbers['time/iteration_s']:.2f} s"
    busy = numbers.get("util/busy_share")
    if busy is not None:
        text += f"; accelerators idle {1 - busy:.0%} of it"
    return text
