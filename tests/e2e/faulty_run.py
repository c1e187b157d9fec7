"""A run of which workers are killed or stopped at given moments; its arguments as JSON. For tests of what it outlasts.

`python -m tests.e2e.faulty_run '{"config": ..., "overrides": [...], "faults": [["env", 0, 2, 0.1, "SIGKILL"], ...]}'`:
rank 0 of env gets SIGKILL 0.1 s after env and rollout began iteration 2; for other components the iteration counts.
With null in place of 0.1 the rank stands still before it is called, and gets the signal after: on no machine, however
slow or busy, has it ended its work by then. The checkpoint before is whole then, so there is one to go back to.
The actor writes down what it learns: `tests.e2e.recorded`.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import threading
import time
from collections.abc import Collection
from typing import Any

import psutil

import rlplace.runtime.launched
from rlplace.execution.loop import Loop
from rlplace.execution.overlap import Overlap
from rlplace.runtime.saving import Saving
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.off_policy.actor import OffPolicyActor
from rlplace.workers.ray_launch.launcher import RayLauncher
from rlplace.workers.roles.actor import PolicyActor
from rlplace.workers.roles.supervised import SupervisedActor
from tests.e2e.recorded import RecordedLmActor, RecordedPolicyActor

HELD_S = 0.1  # how long a rank stands still before it gets its signal, meanwhile the loop calls it


def process_of(cluster: Cluster, name: str, rank: int) -> psutil.Process:
    """Return the process of a rank, which may be starting again at this moment."""
    launcher = cluster._launcher
    assert isinstance(launcher, RayLauncher)
    while True:
        for slot, process in dict(launcher._processes).items():
            if (slot.component, slot.rank) == (name, rank) and process.is_running():
                return process
        time.sleep(0.01)


def hurt(cluster: Cluster, name: str, rank: int, after_s: float, number: str) -> None:
    time.sleep(after_s)
    process_of(cluster, name, rank).send_signal(signal.Signals[number])
    print(f"sent {number} to {name} rank {rank}", flush=True)


def main(config: str, overrides: list[str], faults: list[list[Any]]) -> int:
    launched, iterate = rlplace.runtime.launched.launch, Loop.iteration
    doing = {kind: kind._do for kind in (Loop, Overlap)}

    def launch(cluster: Cluster, job: Any, staying: Collection[str] = ()) -> Any:
        clusters.append(cluster)
        if job.workers["actor"] in (OffPolicyActor, SupervisedActor):
            return launched(cluster, job, staying)
        recorded = (
            RecordedPolicyActor
            if job.workers["actor"] is PolicyActor
            else RecordedLmActor
        )
        return launched(
            cluster,
            dataclasses.replace(job, workers={**job.workers, "actor": recorded}),
            staying,
        )

    def iteration(self: Loop, index: int) -> dict[str, float]:
        begin(
            [
                fault
                for fault in faults
                if fault[2] == index and fault[0] not in ("env", "rollout")
            ]
        )
        return iterate(self, index)

    def method_of(kind: type[Loop]) -> Any:
        """Return the method of a kind of loop that makes the calls of a step; faults of the rollout begin with it."""

        def do(self: Loop, stage: str, step: Any, index: int) -> Any:
            if stage in ("rollout", "train", "read"):
                begin(
                    [
                        fault
                        for fault in faults
                        if fault[2] == index and fault[0] in ("env", "rollout")
                    ]
                )
            return doing[kind](self, stage, step, index)

        return do

    def begin(due: list[list[Any]]) -> None:
        for name, rank, at, after_s, number in due:
            faults.remove(
                [name, rank, at, after_s, number]
            )  # once, should the run come here again
            if after_s is None:
                process_of(clusters[0], name, rank).suspend()
            threading.Thread(
                target=hurt,
                args=(clusters[0], name, rank, after_s or HELD_S, number),
                daemon=True,
            ).start()

    def after_iteration(self: Saving, *, best: bool = False) -> None:
        saved(self, best=best)
        if any(
            after_s is None and at == self._progress.iterations
            for _, _, at, after_s, _ in faults
        ):
            self._finish()

    clusters: list[Cluster] = []
    saved, Saving.after_iteration = Saving.after_iteration, after_iteration
    rlplace.runtime.launched.launch, Loop.iteration = launch, iteration
    for kind in doing:
        kind._do = method_of(kind)
    from rlplace.cli.train import main as train

    return train(["--config-name", config, *overrides])


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
