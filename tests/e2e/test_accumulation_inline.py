"""Whole runs whose actor makes gradients of the first groups while the last ones are generated."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rlplace.config import compose
from rlplace.metrics import Metrics
from rlplace.placement import Plan
from rlplace.runtime.launched import job_spec
from rlplace.runtime.prepare import prepare_composed
from rlplace.runtime.run import run
from rlplace.workers.roles.actor import LmActor
from rlplace.workers.roles.rollout import TextRolloutWorker
from tests.e2e.language import INLINE, tiny
from tests.e2e.training import placed

LIMIT_S = 60.0
GROUPS, SAMPLES = 4, 8


def run_once(model: Path, output: Path, *, early: bool) -> list[dict[str, Any]]:
    """Return the metrics by iteration. With `early` the last group waits until there are gradients of others."""
    begun = threading.Semaphore(0)

    class Actor(LmActor):
        def _next_wave(self, coming: Any, iteration: int) -> Any:
            if self._accumulated:  # the first wave has been learned from
                begun.release()
            return super()._next_wave(coming, iteration)

    class Engine(TextRolloutWorker):
        def generate(self, iteration: int) -> Metrics:
            self.held = early
            return super().generate(iteration)

        def _step(self, counts: Any) -> None:
            if self.held and counts.answers >= (GROUPS - 1) * SAMPLES:
                assert begun.acquire(timeout=LIMIT_S), (
                    "the actor has not begun before the last answers"
                )
                self.held = False
            super()._step(counts)

    asked = (
        "rollout.step_sequences=8",
        "rollout.seed=3",
        "actor.token_budget=64",
        "runner.total_iterations=3",
    )
    words = [
        "--config-name",
        "disaggregated_grpo_llm",
        *tiny(model),
        *INLINE,
        *placed("0", "1", "2"),
        *asked,
    ]
    words.append(f"algorithm.accumulate_early={str(early).lower()}")
    (composed,) = compose.with_hydra([*words, f"runner.output_dir={output}"])
    prepared = prepare_composed(composed)
    assert isinstance(prepared.plan, Plan)
    job = job_spec(prepared.config, prepared.plan)
    job = dataclasses.replace(
        job, workers={**job.workers, "actor": Actor, "rollout": Engine}
    )
    folder = run(job, prepared.view, resolved=composed.mapping)
    return [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.slow
def test_the_actor_begins_before_the_last_answer_and_makes_the_same_update(
    model: Path, tmp_path: Path
) -> None:
    early, late = (
        run_once(model, tmp_path / str(early), early=early) for early in (True, False)
    )
    assert all(line["actor/accumulate_s"] > 0 for line in early)
    assert all("actor/accumulate_s" not in line for line in late)
    for name in (
        "actor/reward",
        "actor/samples",
        "actor/tokens_learned",
        "actor/grad_norm",
        "actor/optimizer_steps",
    ):
        assert early[0][name] == pytest.approx(late[0][name], rel=1e-3), name
    assert [line["actor/optimizer_steps"] for line in early] == [1] * 3
