"""Saving a run without workers: which checkpoint it goes on with, and how long it waits for one that is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlplace.checkpoints import report_written
from rlplace.checkpoints.checkpoint import read
from rlplace.contract.registry import job_of
from rlplace.execution.loop import Loop
from rlplace.report.summary import SIMULATED, Progress
from rlplace.runtime.prepare import prepare
from rlplace.runtime.saving import Saving

RANKS = {"actor": 2, "env": 1}
LATE_S = 0.3  # more than is waited for a checkpoint that nobody writes


class Workers:
    """The loop's part in saving; `write` is given the folder of each checkpoint."""

    def __init__(self, write: Callable[[Path], object]) -> None:
        self.recovery: Any = SimpleNamespace(faults=[])
        self.version, self.generated, self._write = 1, dict[int, Any](), write

    def write_state(self, part: Path, components: object) -> None:
        self._write(part)

    def read_state(self, folder: Path, kept: object, anew: object) -> dict[str, float]:
        return {}


def write(part: Path) -> None:
    for component, ranks in RANKS.items():
        for rank in range(ranks):
            report_written(part / component, rank, [])


def write_late(part: Path) -> None:
    threading.Timer(LATE_S, write, [part]).start()


def saving(run: Path, workers: Workers) -> tuple[Saving, Progress]:
    job = prepare(
        {
            "cluster": {
                "component_placement": {"actor": "0-1", "env": "2", "rollout": "3"},
                "accelerators_per_node": 4,
                "accelerator": {"kind": "emulated", "memory": "2GiB"},
            },
            "env": {"id": "CartPole-v1", "total_num_envs": 16},
            "checkpoint": {"every": 1, "keep_last": 4},
        }
    )
    progress = Progress(measures=SIMULATED, began=time.perf_counter())
    return Saving(
        job_of(job.config), job.config, job.plan, cast(Loop, workers), run, {}, progress
    ), progress


def test_a_run_goes_on_with_what_it_made_or_was_resumed_from(tmp_path: Path) -> None:
    """An attempt before it has left a checkpoint of a later iteration."""
    earlier, progress = saving(tmp_path, Workers(write))
    assert earlier.newest == tmp_path
    for progress.iterations in (1, 3):
        earlier.last()
    folder = tmp_path / "checkpoints"
    assert earlier.newest == folder / "000003"
    ours, progress = saving(tmp_path, Workers(write))
    ours.load(read(folder / "000001"))
    assert ours.newest == folder / "000001"
    progress.iterations = 2
    ours.last()
    assert ours.newest == folder / "000002"


@pytest.mark.parametrize("lost", [["rollout"], []])
def test_a_checkpoint_that_living_ranks_write_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[str]
) -> None:
    monkeypatch.setattr("rlplace.runtime.saving._DEAD_S", 0.01)
    monkeypatch.setattr("rlplace.checkpoints.store._GIVE_UP_S", 0.01)
    save, progress = saving(tmp_path, Workers(write_late))
    progress.iterations = 1
    save.after_iteration()
    assert save.without_state(lost) == set()
    assert save.newest == tmp_path / "checkpoints" / "000001"


@pytest.mark.parametrize(
    ("lost", "before"), [(["actor", "rollout"], ()), (["rollout"], ("env rank 0",))]
)
def test_a_checkpoint_whose_writers_are_lost_is_given_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: list[str],
    before: tuple[str, ...],
) -> None:
    """`before`: what was lost and replaced earlier, while it was written."""
    monkeypatch.setattr("rlplace.runtime.saving._DEAD_S", 0.01)
    workers = Workers(lambda part: None)
    save, progress = saving(tmp_path, workers)
    progress.iterations = 1
    save.after_iteration()
    workers.recovery.faults.append(SimpleNamespace(replaced=before))
    assert save.without_state(lost) == set(RANKS)
    assert save.newest == tmp_path


def test_the_one_before_is_not_waited_for_where_its_writer_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of env is lost in the evaluation that follows the last iteration."""
    monkeypatch.setattr("rlplace.runtime.saving._DEAD_S", 0.01)
    monkeypatch.setattr("rlplace.checkpoints.store._GIVE_UP_S", 0.01)
    folders: list[Path] = []
    workers = Workers(lambda part: write(part) if folders else folders.append(part))
    save, progress = saving(tmp_path, workers)
    progress.iterations = 1
    save.after_iteration()
    workers.recovery.faults.append(SimpleNamespace(replaced=("env rank 0",)))
    progress.iterations = 2
    save.last()
    assert save.newest == tmp_path / "checkpoints" / "000002"
