"""One training iteration as prose; owns the policy version and the clock of the stages.

::

    sync ──▶ rollout ──▶ learn ──▶ sync ...          on entry to a stage: releases | barrier | acquires
     │          │           └ actor: PPO update, version + 1
     │          └ env || rollout: observations ⇄ actions, trajectories into their channel
     └ actor pushes weights, rollout pulls them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlplace.errors import WorkerError
from rlplace.metrics import Metrics, reduce_metrics
from rlplace.placement.schedule import Move, Residency, Schedule, Transition
from rlplace.workers.group import Pending, WorkerGroup, wait_all
from rlplace.workers.worker import MoveReport


class Loop:
    """Runs iterations over launched groups. `version` is the policy version the rollout ranks hold after sync."""

    def __init__(self, schedule: Schedule, groups: Mapping[str, WorkerGroup], *, stage_timeout_s: float) -> None:
        self.version = 0
        self.held: dict[
            str, dict[Residency, int]
        ] = {}  # measured bytes per accelerator of each component's fullest rank
        self._schedule = schedule
        self._groups = groups
        self._timeout_s = stage_timeout_s
        self._entered = False
        self._stage = ""
        self._bodies: Mapping[str, Callable[[int], list[Metrics]]] = {
            "sync": self._sync,
            "rollout": self._rollout,
            "evaluate": self._evaluate,
            "learn": self._learn,
        }

    def iteration(self, index: int, *, evaluate: bool = False) -> dict[str, float]:
        """All stages once. Returns the reduced metrics of all components with the seconds of stages and moves.

        `evaluate`: the policy first answers held-out prompts, which env must know how to ask. Raises WorkerError with
        stage and version; TimeoutError when a stage exceeds its deadline.
        """
        works: dict[str, Sequence[str]] = {stage: (stage,) for stage in self._schedule.stages}
        if evaluate:
            works["rollout"] = ("evaluate", "rollout")
        numbers = self._through(works, index)
        return numbers | overhead(numbers)

    def evaluate(self, index: int) -> dict[str, float]:
        """Held-out prompts under the last weights, after an iteration; then everything is where learning left it."""
        return self._through({"sync": ("sync",), "rollout": ("evaluate",), "learn": ()}, index)

    def _through(self, works: Mapping[str, Sequence[str]], index: int) -> dict[str, float]:
        """Stage by stage, with what is done in each."""
        reports: list[Metrics] = []
        numbers: dict[str, float] = {"time/moves_s": 0.0}
        began = time.perf_counter()
        for stage, bodies in works.items():
            with self._in(stage):
                entered = time.perf_counter()
                self._enter(stage)
                ready = time.perf_counter()
                numbers["time/moves_s"] += ready - entered
                for body in bodies:
                    reports += self._bodies[body](index)
                    numbers[f"time/{body}_s"] = time.perf_counter() - ready
                    ready = time.perf_counter()
        numbers["time/iteration_s"] = time.perf_counter() - began
        numbers.update(reduce_metrics(reports))
        numbers["policy/version"] = float(self.version)
        return numbers

    def _enter(self, stage: str) -> None:
        """Moves on entry: every release is awaited before the first acquire starts."""
        transition: Transition = self._schedule.entries[stage] if self._entered else self._schedule.first
        self._entered = True
        self._move(transition.releases)
        self._move(transition.acquires)

    def _move(self, moves: Sequence[Move]) -> None:
        """Starts all moves together, waits for all and keeps what they left on the accelerators."""
        pending = [self._groups[move.component].move(move.after) for move in moves]
        for move, ranks in zip(moves, self._wait(pending), strict=True):
            reports: list[MoveReport] = ranks
            fullest = max(report.accelerator_bytes for report in reports)
            held = self.held.setdefault(move.component, {})
            held[move.after] = max(fullest, held.get(move.after, 0))

    def _sync(self, index: int) -> list[Metrics]:
        push = self._groups["actor"].push_weights(self.version)
        pull = self._groups["rollout"].pull_weights(self.version)
        return self._gather([push, pull])

    def _rollout(self, index: int) -> list[Metrics]:
        stepping = self._groups["env"].run(index)
        answering = self._groups["rollout"].generate(index)
        return self._gather([stepping, answering])

    def _evaluate(self, index: int) -> list[Metrics]:
        asking = self._groups["env"].evaluate(index)
        answering = self._groups["rollout"].generate(index)
        asked, _ = self._wait([asking, answering])  # what generating took is no number of an iteration
        return asked

    def _learn(self, index: int) -> list[Metrics]:
        learned = self._gather([self._groups["actor"].learn(index, self.version)])
        self.version += 1
        return learned

    def _gather(self, pending: Sequence[Pending]) -> list[Metrics]:
        return [rank for group in self._wait(pending) for rank in group]

    def _wait(self, pending: Sequence[Pending]) -> list[list[Any]]:
        return wait_all(pending, timeout_s=self._timeout_s) if pending else []

    @contextmanager
    def _in(self, stage: str) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            raise error.at(stage=stage, version=self.version) from error.cause


def overhead(numbers: Mapping[str, float]) -> dict[str, float]:
    """What of an iteration was neither simulator, policy forward nor learning, in seconds and as a share.

    env and rollout overlap, so the slower of the two counts as the work of the rollout stage.
    """
    simulating, deciding = numbers.get("env/sim_s", 0.0), numbers.get("rollout/policy_s", 0.0)
    work = max(simulating, deciding) + numbers.get("actor/learn_s", 0.0)
    total = numbers["time/iteration_s"]
    spent = max(0.0, total - work)
    return {"time/overhead_s": spent, "time/overhead_share": spent / total if total > 0 else 0.0}
