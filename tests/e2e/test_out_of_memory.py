"""A component that keeps more than the plan foresees: the next one is refused with names and bytes, the run ends."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from rlplace.config import compose
from rlplace.errors import AcceleratorOutOfMemory, WorkerError
from rlplace.metrics import Metrics
from rlplace.placement import Plan
from rlplace.placement.schedule import Residency
from rlplace.placement.show.view import view_plan
from rlplace.runtime.launched import job_spec
from rlplace.runtime.prepare import prepare_composed
from rlplace.runtime.run import run
from rlplace.workers.roles.env import VectorEnvWorker
from rlplace.workers.roles.rollout import VectorRolloutWorker
from rlplace.workers.worker import MoveReport
from tests.e2e.training import INLINE, placed, train

MIB = 1 << 20
MEMORY = 330 * MIB  # env 256 and rollout 64 MiB are there together
ACTOR_FULL = 109_000  # bytes, a little less than its state with the optimizer's


class LeavingRollout(VectorRolloutWorker):
    """Sets `left` when it is offloaded: it and the env leave at the same time."""

    left = threading.Event()

    def move(self, to: Residency) -> MoveReport:
        report = super().move(to)
        if to is Residency.OFF:
            self.left.set()
        return report


class KeepingEnv(VectorEnvWorker):
    """Once it has played, it gives back all but `kept` bytes."""

    kept = MEMORY - ACTOR_FULL
    _played = False

    def run(self, iteration: int) -> Metrics:
        self._played = True
        LeavingRollout.left.clear()
        return super().run(iteration)

    def move(self, to: Residency) -> MoveReport:
        report = super().move(to)
        if to is Residency.OFF and self._played:
            assert LeavingRollout.left.wait(
                60.0
            )  # what it keeps is more than the rollout leaves it room for
            self.context.device.acquire(self.kept, "textures")
        return dataclasses.replace(
            report, accelerator_bytes=self.context.device.held_bytes()
        )


class KeepingLessEnv(KeepingEnv):
    """Leaves room for the actor's state, not for the gradients it computes with."""

    kept = MEMORY - 120_000


def run_with(env: type[VectorEnvWorker], output: Path) -> None:
    overrides = [
        *INLINE,
        *placed("0", "0", "0"),
        f"cluster.accelerator.memory={MEMORY}",
        f"runner.output_dir={output}",
    ]
    (composed,) = compose.with_hydra(["--config-name", "collocated_ppo", *overrides])
    prepared = prepare_composed(composed)
    config, plan = prepared.config, prepared.plan
    assert isinstance(plan, Plan)
    job = job_spec(config, plan)
    job = dataclasses.replace(
        job, workers={**job.workers, "env": env, "rollout": LeavingRollout}
    )
    run(job, view_plan(plan, job.case, name="out_of_memory"), resolved=composed.mapping)


def test_a_component_without_room_is_refused_with_what_was_measured(
    tmp_path: Path,
) -> None:
    with pytest.raises(AcceleratorOutOfMemory) as refused:
        run_with(KeepingEnv, tmp_path)
    problem = refused.value.problem
    assert (problem.code, problem.key) == ("accelerator-out-of-memory", "actor")
    assert problem.what == "accelerator 0 has no room for it on entry to learn"
    assert "env rank 0: off 330 MiB" in (problem.why or "")
    assert "predicted 0 bytes" in (problem.why or "")
    assert problem.fix
    _ended(tmp_path)


def test_an_error_while_computing_shows_the_measured_bytes_of_all(
    tmp_path: Path,
) -> None:
    with pytest.raises(WorkerError) as failed:
        run_with(KeepingLessEnv, tmp_path)
    cause = failed.value.cause
    assert isinstance(cause, AcceleratorOutOfMemory)
    assert (failed.value.component, failed.value.method, failed.value.stage) == (
        "actor",
        "learn",
        "learn",
    )
    assert cause.accelerator == 0
    assert "env rank 0: textures 330 MiB" in (cause.problem.why or "")
    assert "measured after its last move: env rank 0: off 330 MiB" in (
        cause.problem.why or ""
    )
    _ended(tmp_path)


def test_a_forced_job_ends_where_the_plan_said(tmp_path: Path) -> None:
    words = [*INLINE, *placed("0", "0", "0"), "cluster.accelerator.memory=200MiB"]
    assert train("collocated_ppo", tmp_path / "refused", *words).code == 3
    forced = train("collocated_ppo", tmp_path / "forced", *words, "memory.check=warn")
    assert forced.code == 1
    assert "memory.check: warn forces the job" in forced.err
    assert "accelerator-out-of-memory" in forced.err
    assert "env rank 0" in forced.err


def _ended(output: Path) -> None:
    """The run left its summary, and no thread of a worker."""
    (folder,) = output.glob("*/*")
    assert (
        json.loads((folder / "summary.json").read_text(encoding="utf-8"))["memory"][
            "env"
        ]["off"]["predicted"]
        == 0
    )
    for thread in [
        t
        for t in threading.enumerate()
        if t.name.startswith(("actor rank", "env rank", "rollout rank"))
    ]:
        thread.join(5.0)
        assert not thread.is_alive()
