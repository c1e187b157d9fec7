"""A run in this process whose actor and engines wait for each other, so that answers begin as early as they may."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rlplace.config import compose
from rlplace.metrics import Metrics
from rlplace.placement import Plan
from rlplace.runtime.launched import job_spec
from rlplace.runtime.prepare import prepare_composed
from rlplace.runtime.run import run
from rlplace.tokens import Sample
from rlplace.workers.arguments import REQUESTS
from rlplace.workers.roles.actor import LmActor
from rlplace.workers.roles.rollout import TextRolloutWorker
from tests.e2e.language import INLINE, tiny
from tests.e2e.training import placed

LIMIT_S = 60.0
EARLY = 3  # steps of an iteration that are made before the next weights are waited for


class Events:
    """One for each number, made when somebody asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[int, threading.Event] = defaultdict(threading.Event)

    def of(self, number: int) -> threading.Event:
        with self._lock:
            return self._events[number]

    def wait(self, number: int) -> None:
        assert self.of(number).wait(LIMIT_S), f"waited for {number}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """What a run has learned from, each sample with the version that learned it, and what it said of itself."""

    learned: list[tuple[int, Sample]]
    metrics: list[dict[str, Any]]

    def of(self, version: int) -> list[Sample]:
        return [sample for learning, sample in self.learned if learning == version]


def witness(
    model: Path, output: Path, *overrides: str, ahead: int, iterations: int
) -> Witnessed:
    """Learning of version j ends after the answers of iteration j + ahead have begun, which after some steps wait for
    the version after j: that is as old as their first tokens may be, and what follows is by newer weights."""
    begun, pushed = Events(), Events()
    learned: list[tuple[int, Sample]] = []

    class Actor(LmActor):
        version = -1

        def push_weights(self, version: int) -> Metrics:
            metrics = super().push_weights(version)
            pushed.of(version).set()
            return metrics

        def learn(self, iteration: int, version: int) -> Metrics:
            self.version = version
            if iteration + ahead < iterations:
                begun.wait(iteration + ahead)
            return super().learn(iteration, version)

        def _receive(self, iteration: int, part: int) -> Any:
            share, experience = super()._receive(iteration, part)
            groups = [] if experience is None else experience.groups
            learned.extend(
                (self.version, sample) for group in groups for sample in group
            )
            return share, experience

    class Engines(TextRolloutWorker):
        iteration, steps = -1, 0

        def generate(self, iteration: int) -> Metrics:
            self.iteration, self.steps = iteration, 0
            requests, ends = self.context.channels[REQUESTS], time.monotonic() + LIMIT_S
            while (
                requests.stats().depth_items < self.config.prompts
            ):  # all begin before the first step
                assert time.monotonic() < ends, (
                    f"waited for the requests of iteration {iteration}"
                )
                time.sleep(0.001)
            return super().generate(iteration)

        def _step(self, tally: Any) -> None:
            if self.steps == EARLY:
                begun.of(self.iteration).set()
                if self.iteration >= ahead:
                    pushed.wait(self.iteration - ahead + 1)
            self.steps += 1
            super()._step(tally)

    asked = (
        f"algorithm.max_staleness={ahead}",
        f"runner.total_iterations={iterations}",
    )
    words = [
        "--config-name",
        "disaggregated_grpo_llm",
        *tiny(model),
        *INLINE,
        *placed("0", "1", "2"),
        *asked,
    ]
    (composed,) = compose.with_hydra(
        [*words, f"runner.output_dir={output}", *overrides]
    )
    prepared = prepare_composed(composed)
    config, layout = prepared.config, prepared.plan
    assert isinstance(layout, Plan)
    job = job_spec(config, layout)
    job = dataclasses.replace(
        job, workers={**job.workers, "actor": Actor, "rollout": Engines}
    )
    folder = run(job, prepared.view, resolved=composed.mapping)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return Witnessed(learned=learned, metrics=[json.loads(line) for line in lines])
