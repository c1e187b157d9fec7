"""The pilot of a run (`cluster.elastic`): searches beside the run, and advises or chooses other placements.

::

    iterations ─▶ profile of the latest ones ─▶ search, in its own process ─▶ decide ─▶ advise: words to paste
         ▲                                                                       └────▶ on: change ─▶ measure ─▶ keep
         └────────────────────────────────────────────────────────────────────────────────────────────── or go back

`foresight/decide.py` has the rule. Each decision is a line of elastic.jsonl in the run's folder.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.checks.changes import KEY
from rlplace.config.compose import override
from rlplace.config.keys import PLACEMENT
from rlplace.errors import ClusterError, OutputError, ProblemsError
from rlplace.foresight.decide import (
    Case,
    Decision,
    Left,
    Level,
    Verdict,
    decide,
    judge,
    level_of,
)
from rlplace.foresight.drift import carried
from rlplace.foresight.observe import WARM
from rlplace.foresight.probe import changed
from rlplace.foresight.profile import Profile
from rlplace.placement.schedule import Residency
from rlplace.placement.show.view import PlanView
from rlplace.runtime.changes import differing, moved
from rlplace.runtime.draining import nodes_of
from rlplace.runtime.launched import JobSpec, Launched, job_spec
from rlplace.runtime.prepare import check_launch, prepare
from rlplace.runtime.replace import Change, PlanFrom
from rlplace.runtime.search_beside import (
    Option,
    Reply,
    SearchFailed,
    SearchProcess,
    key_of,
    request_of,
)
from rlplace.units import counted

FILE = "elastic.jsonl"
_ITERATION = "time/iteration_s"
_RECENT = 8  # iterations that count for a profile and for the level of an iteration
_LEAST = 4  # measured iterations from which on their noise is known
_TRIAL = 6  # measured iterations from which on a change is judged
_STATE_BYTES_PER_S = (
    1 << 30
)  # assumed of saving and loading, before a change was measured
_SAME = (
    1e-6  # relative difference of predictions below which two placements count as alike
)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Place:
    """A placement that the run has left.

    `changes`: config key -> value, relative to the config of the run. `left`: when the run has left it; None: the next
    search will tell what the work was.
    """

    changes: Mapping[str, Any]
    left: Left | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class _Step:
    """A change that the pilot has chosen.

    `plan`: the plan after it. `changes`: config key -> value of that plan, relative to the config of the run. `back`:
    whether it takes the change before back. `prepare_s`: seconds in which the plan was prepared.
    `event`: the record of the decision.
    """

    plan: PlanFrom
    changes: Mapping[str, Any]
    back: bool
    prepare_s: float
    event: dict[str, Any]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Trial:
    """A change whose gain is measured.

    `before`: seconds of the iterations before it. `decision`: why it was made. `changes`, `plan`: those of the
    placement before. `key`: of the placement that is tried. `first_s`: seconds of the iterations that are not measured.
    """

    before: Sequence[float]
    decision: Decision
    changes: Mapping[str, Any]
    plan: PlanFrom
    key: str
    first_s: list[float] = dataclasses.field(default_factory=list)


class Pilot:
    """Searches beside a run, and says or chooses which placement comes next. It belongs to the run's driver."""

    def __init__(
        self,
        job: JobSpec,
        view: PlanView,
        mapping: Mapping[str, Any],
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        """Prepare; nothing is started yet.

        `job`, `view`: the run's start. `mapping`: its composed config. `folder`: the run's folder. `tell`: called with
        lines of text.
        """
        # Nodes that were drained: no plan uses them
        self.barred: frozenset[int] = frozenset()
        self._settings = job.config.cluster.elastic
        self._start = job
        self._name = view.name
        self._mapping = mapping
        self._file = folder / FILE
        self._tell = tell
        # The present plan, and the changes from the config to its placement
        self._plan: PlanFrom | None = None
        self._changes: Mapping[str, Any] = {}
        # By `key_of` of their plans
        self._left: dict[str, _Place] = {}
        self._known: Profile | None = None
        self._process = SearchProcess(self._settings.share)
        self._searching = False
        self._step: _Step | None = None
        self._trial: _Trial | None = None
        # Of the iterations from which the search predicts
        self._level: Level | None = None
        # Error of the predictions for placements that were tried; halved by each search
        self._error = 0.0
        self._start_s: Mapping[str, float] = {}
        # Measured seconds of changes
        self._costs: list[float] = []
        # Iterations until the next search
        self._until = self._settings.warmup
        self._advised: str | None = None
        self._searches = 0
        self._searched_s = 0.0
        # Processor seconds of the process of searches; seconds of the driver for the pilot
        self._cpu_s = 0.0
        self._driver_s = 0.0
        self._failed: str | None = None
        # Why the placement stayed at the latest search
        self._stayed: str | None = None
        self._events: list[dict[str, Any]] = []

    @property
    def changes(self) -> bool:
        """Whether the pilot may change the placement."""
        return bool(self._settings.mode == "on")

    def started(self, seconds: Mapping[str, float]) -> None:
        """Take the seconds of each part of the run's start, from which the cost of a change is predicted."""
        self._start_s = dict(seconds)

    def due(self, now: Launched, plan: PlanFrom) -> PlanFrom | None:
        """Return the plan that is to replace the present one before the next iteration; None if there is none.

        It is called before each iteration. `now`: what is launched. `plan`: its plan.
        """
        began = time.perf_counter()
        try:
            return self._due(now, plan)
        finally:
            self._driver_s += time.perf_counter() - began

    def _due(self, now: Launched, plan: PlanFrom) -> PlanFrom | None:
        if self._step is not None:
            # The change was not made: state was lost meanwhile, and the run has gone back
            self._give_up("workers were lost before the change")
        if plan is not self._plan:
            self._follow(plan)
        self._until -= 1
        seconds = now.observed.series(_ITERATION)
        if self._trial is not None:
            return self._tried(now, plan, seconds)
        if self._searching:
            return self._answered(now, plan, seconds)
        if self._until < 0 and len(seconds) >= _LEAST:
            self._look(now)
        return None

    def changed(self, change: Change) -> None:
        """Take the result of a change: of the one that `due` has asked for, or of one that the user has asked for."""
        step = self._step
        if change.kept:
            if step is not None:
                self._give_up(change.kept)
            return
        self._costs.append(change.seconds)
        if step is None:
            return
        self._step = None
        self._costs[-1] += step.prepare_s
        self._plan = step.plan
        self._changes = step.changes
        self._write(step.event | {"change_s": change.seconds})
        if step.back:
            self._trial = None

    def close(self) -> None:
        """End the process of searches."""
        self._process.close()

    def record(self) -> dict[str, Any]:
        """Return what the pilot did, for summary.json."""
        return {
            "mode": self._settings.mode,
            "searches": self._searches,
            "search_s": self._searched_s,
            "search_cpu_s": self._cpu_s,
            "driver_s": self._driver_s,
            "stayed": self._stayed,
            "failed": self._failed,
            "events": self._events,
        }

    def _follow(self, plan: PlanFrom) -> None:
        """Take a plan that the pilot has not chosen as the present one: the first plan, or one that the user chose."""
        places = moved(self._start.plan, plan.job.plan)
        self._plan = plan
        self._changes = {
            f"{PLACEMENT}.{name}": new for name, (_, new) in places.items()
        }
        self._trial = None
        if self._searching:
            # It is about the placement before
            self._process.close()
        self._searching = False
        self._until = max(self._until, self._settings.warmup)

    # ── searching ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look(self, now: Launched) -> None:
        """Start a search with the profile of the latest iterations."""
        self._until = self._settings.every
        self._level = level_of(now.observed.series(_ITERATION)[-_RECENT:])
        self._learn(now)
        assert self._known is not None, "_learn sets it"
        left = [place.changes for place in self._left.values()]
        request = request_of(
            self._mapping,
            self._start.plan,
            self._known,
            name=self._name,
            now=self._changes,
            left=left,
        )
        try:
            self._process.ask(request)
            self._searching = True
        except SearchFailed as failed:
            self._note(failed)

    def _note(self, failed: SearchFailed) -> None:
        """Tell that a search has failed, unless the one before has failed in the same way."""
        if self._failed != str(failed):
            self._tell(f"elastic: a search has failed: {failed}")
        self._failed = str(failed)

    def _learn(self, now: Launched) -> None:
        """Add the latest iterations to the profile of the run."""
        self._known = carried(self._known, now.observed.profile(_RECENT))

    def _answered(
        self, now: Launched, plan: PlanFrom, seconds: Sequence[float]
    ) -> PlanFrom | None:
        """Decide if the search has ended. Return the plan to change to; None: the placement stays."""
        try:
            reply = self._process.reply()
        except SearchFailed as failed:
            self._searching = False
            self._note(failed)
            return None
        if reply is None:
            return None
        self._searching = False
        self._searches += 1
        self._searched_s += reply.took_s
        self._cpu_s = reply.cpu_s
        self._error /= 2
        for place in self._left.values():
            if place.left is None:
                place.left = Left(work=reply.work)
        level = self._level
        assert level is not None, "a search has it"
        cost_s, known = self._cost_s(now)
        option, decision = self._decided(plan, reply, level, cost_s)
        event = _event(plan, level, reply, option, decision)
        event |= {"cost_s": cost_s, "cost": known}
        if option is None or decision is None or decision.verdict is Verdict.STAY:
            self._stayed = event["why"]
            self._write(event)
            return None
        if not self.changes:
            self._advise(option, event)
            return None
        return self._change(now, plan, option, decision, event, seconds)

    def _decided(
        self, plan: PlanFrom, reply: Reply, level: Level, cost_s: float
    ) -> tuple[Option | None, Decision | None]:
        """Return the placement to change to, or else the best one, with the decision about it."""
        best: Option | None = None
        about: Decision | None = None
        progress = plan.job.progress
        total: int = plan.job.config.runner.total_iterations
        for option in reply.options:
            decision = decide(
                Case(
                    level=level,
                    predicted_s=reply.now_s,
                    best_s=option.seconds,
                    left=self._left_as(option, reply),
                    work=reply.work,
                    error=self._error,
                    cost_s=cost_s,
                    pay_back=self._settings.pay_back,
                    iterations=total - progress.iterations,
                )
            )
            if best is None or decision.verdict is Verdict.CHANGE:
                best = option
                about = decision
            if decision.verdict is Verdict.CHANGE:
                break
        return best, about

    def _left_as(self, option: Option, reply: Reply) -> Left | None:
        """Return when the run has left this placement, or one that is predicted to be just as fast; None: never."""
        latest = zip(self._left.items(), reply.left_s, strict=True)
        for (key, place), seconds in latest:
            alike = math.isclose(seconds, option.seconds, rel_tol=_SAME)
            if key == option.key or alike:
                return place.left
        return None

    def _cost_s(self, now: Launched) -> tuple[float, str]:
        """Return the seconds of a change, and how they are known."""
        if self._costs:
            return statistics.median(self._costs[-3:]), "measured"
        started = sum(self._start_s.get(part, 0.0) for part in ("workers", "setup"))
        return started + 2 * _state_bytes(now.job) / _STATE_BYTES_PER_S, "predicted"

    # ── deciding ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _advise(self, option: Option, event: dict[str, Any]) -> None:
        """Tell the user of a better placement, unless it was told before."""
        event["decision"] = "advise"
        event["words"] = words_of(option.changes)
        self._write(event)
        if self._advised == option.key:
            return
        self._advised = option.key
        self._tell(advice(event, option.changes))

    def _change(
        self,
        now: Launched,
        plan: PlanFrom,
        option: Option,
        decision: Decision,
        event: dict[str, Any],
        seconds: Sequence[float],
    ) -> PlanFrom | None:
        """Return the plan of a better placement; None if it is refused."""
        began = time.perf_counter()
        found = self._planned(plan, option.changes)
        if isinstance(found, str):
            self._leave(option.key, option.changes)
            self._write(event | {"decision": "refused", "why": found})
            return None
        self._tell(
            f"elastic: {shown_moves(option.moves)}: {decision.why}, and pays back in "
            f"{counted(math.ceil(decision.pays_back), 'iteration')}"
        )
        # What the present placement costs is not measured any more from now on
        self._learn(now)
        self._trial = _Trial(
            before=seconds[-_RECENT:],
            decision=decision,
            changes=self._changes,
            plan=plan,
            key=option.key,
        )
        self._step = _Step(
            plan=found,
            changes=option.changes,
            back=False,
            prepare_s=time.perf_counter() - began,
            event=event,
        )
        return found

    def _planned(self, plan: PlanFrom, changes: Mapping[str, Any]) -> PlanFrom | str:
        """Return the plan with these changes, checked and proven like one of a new job; or why it is refused."""
        progress = plan.job.progress
        try:
            job = prepare(
                changed(self._mapping, changes),
                name=self._name,
                topology=self._start.plan.topology,
            )
            lacking = job.not_run or check_launch(job.config, job.plan, job.sources)
            wrong = [*lacking, *job.all_shortages]
            if wrong:
                return wrong[0].what
            spec = job_spec(job.config, job.plan)
            if drained := nodes_of(spec) & self.barred:
                return f"node {min(drained)} was drained"
        except ProblemsError as error:
            return error.problems[0].what
        except ClusterError as error:
            return error.problem.what
        # All plans of a run count in the same Progress
        spec = dataclasses.replace(spec, progress=progress)
        return PlanFrom(after=progress.iterations, job=spec, view=job.view)

    def _tried(
        self, now: Launched, plan: PlanFrom, seconds: Sequence[float]
    ) -> PlanFrom | None:
        """Judge the last change as soon as it was measured. Return the plan before it if it has to be taken back."""
        trial = self._trial
        assert trial is not None
        if len(trial.first_s) < WARM and now.loop.log.iterations:
            trial.first_s.append(now.loop.log.iterations[-1].seconds)
        if not seconds:
            return None
        judged = judge(trial.before, seconds, apart=WARM + 1, least=_TRIAL)
        verdict = judged.verdict
        if verdict is Verdict.WAIT:
            return None
        after_s = judged.level.seconds
        # What the first iterations took more is part of the cost
        more_s = sum(trial.first_s) - len(trial.first_s) * after_s
        self._costs[-1] += max(0.0, more_s)
        expected_s = judged.due_s * (1.0 - trial.decision.gain)
        off = abs(expected_s / after_s - 1.0)
        self._error = max(self._error, off)
        self._until = self._settings.every
        event: dict[str, Any] = {
            "iteration": plan.job.progress.iterations,
            "decision": verdict.value,
            "why": judged.why,
            "moved": differing(trial.plan.job.plan, plan.job.plan),
            "predicted": {"before": judged.due_s, "after": expected_s},
            "measured": {"before": level_of(trial.before).seconds, "after": after_s},
            "error": off,
            "cost_s": self._costs[-1],
        }
        self._tell(f"elastic: the change is {_JUDGED[verdict]}: {judged.why}")
        if verdict is Verdict.KEEP:
            self._trial = None
            self._leave(key_of(trial.plan.job.plan), trial.changes)
            self._write(event)
            return None
        self._learn(now)
        self._leave(trial.key, self._changes)
        before = dataclasses.replace(trial.plan, after=plan.job.progress.iterations)
        self._step = _Step(
            plan=before, changes=trial.changes, back=True, prepare_s=0.0, event=event
        )
        return before

    def _leave(self, key: str, changes: Mapping[str, Any]) -> None:
        """Note that the run has left a placement, or cannot have it."""
        self._left[key] = _Place(changes=changes)

    def _give_up(self, why: str) -> None:
        """Note that a change was not made, and that the present plan stays."""
        step = self._step
        assert step is not None
        self._step = None
        self._trial = None
        if not step.back:
            self._leave(key_of(step.plan.job.plan), step.changes)
        self._until = self._settings.every
        self._write(step.event | {"decision": "failed", "why": why})

    def _write(self, event: Mapping[str, Any]) -> None:
        """Add an event to the file of the run's folder; those that are no decision to stay are also kept. Raises
        OutputError.
        """
        if event["decision"] != Verdict.STAY.value:
            self._events.append(dict(event))
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        except OSError as error:
            raise OutputError.of(self._file, error) from error


_JUDGED = {Verdict.KEEP: "kept", Verdict.BACK: "taken back"}
_NO_OTHER = "no other placement is predicted to be faster"


def _event(
    plan: PlanFrom,
    level: Level,
    reply: Reply,
    option: Option | None,
    decision: Decision | None,
) -> dict[str, Any]:
    """Return the record of a decision after a search. Without another placement, `option` and `decision` are None."""
    event: dict[str, Any] = {
        "iteration": plan.job.progress.iterations,
        "decision": Verdict.STAY.value,
        "why": _NO_OTHER,
        "measured": {"before": level.seconds},
        "predicted": {"before": reply.now_s},
        "model_error": abs(reply.now_s / level.seconds - 1.0),
        "noise": level.noise,
        "search_s": reply.took_s,
        "proven": reply.proven,
    }
    if option is None or decision is None:
        return event
    event["decision"] = decision.verdict.value
    event["why"] = decision.why
    event["moved"] = dict(option.moves)
    event["predicted"]["after"] = option.seconds
    event["expected_s"] = decision.expected_s
    event["gain"] = decision.gain
    event["error"] = decision.error
    # JSON has no infinite number
    event["pays_back"] = None
    if math.isfinite(decision.pays_back):
        event["pays_back"] = decision.pays_back
    return event


def words_of(changes: Mapping[str, Any]) -> str:
    """Return overrides for a command line that make these changes. `changes`: key -> value; None: it is removed."""
    words = []
    for key, value in changes.items():
        words.append(f"~{key}" if value is None else override(key, value))
    return " ".join(words)


def as_change(changes: Mapping[str, Any], after: int) -> str | None:
    """Return the override of `cluster.changes` with these changes; None if it cannot have them.

    `after`: number of iterations before the change.
    """
    places = {}
    for key, value in changes.items():
        name = key.removeprefix(f"{PLACEMENT}.")
        if name == key or value is None:
            return None
        places[name] = value
    return override(KEY, [{"after": after, "component_placement": places}])


def advice(event: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """Return the text about a better placement. `event`: the record of the decision. `changes`: as in `words_of`."""
    after = event["iteration"]
    now_s = event["measured"]["before"]
    pays_back = counted(math.ceil(event["pays_back"]), "iteration")
    lines = [
        f"elastic, after iteration {after}: {shown_moves(event['moved'])}",
        f"  an iteration takes {now_s:.3g} s, and would take {event['expected_s']:.3g} s: {-event['gain']:+.1%}; "
        f"the model is off by {event['model_error']:.1%}, the noise is {event['noise']:.1%}",
        f"  a change costs {event['cost_s']:.1f} s ({event['cost']}), and pays back in {pays_back}",
        f"  from the start: {words_of(changes)}",
    ]
    during = as_change(changes, after)
    if during is not None:
        lines.append(f"  or from now on: {during}")
    return "\n".join(lines)


def shown_moves(moves: Mapping[str, Sequence[str]]) -> str:
    """Return moves as text. `moves`: component -> what it has before and after."""
    return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in moves.items())


def _state_bytes(job: JobSpec) -> int:
    """Return an upper bound of the bytes that a change saves and loads: all that the workers with state hold."""
    ledger = job.case.ledger()
    most = 0
    for component in job.job.stateful(job.config, job.plan):
        ranks = job.plan.placement.world_size(component)
        most += ranks * ledger.bytes(component, Residency.FULL)
        most += ranks * ledger.host_bytes(component, Residency.FULL)
    return most
