"""A run in which a rank is killed in the middle of each change of the placement. For tests; arguments as JSON.

`python -m tests.e2e.hurt_change '{"config": ..., "overrides": [...], "moment": "load", "rank": ["actor", 0]}'`. The
moments are "save", after the ranks were asked to save and before their files are waited for; "setup", before the new
workers are set up; "load", before the new workers load; "follow", before the workers that stay follow the next plan.
With `rank` null, the driver kills itself. With the moment "", none is killed, and a line before each iteration has the
process ids of all ranks. `copied_bytes` replaces the limit up to which the state of those that stay is saved.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from rlplace.checkpoints.store import Saver
from rlplace.execution.loop import Loop
from rlplace.runtime import replace
from rlplace.runtime.replace import PlanFrom, Replacing
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.ray_launch.launcher import RayLauncher
from tests.e2e.faulty_run import process_of


def main(
    config: str,
    overrides: list[str],
    moment: str,
    rank: tuple[str, int] | None,
    copied_bytes: int | None = None,
) -> int:
    if copied_bytes is not None:
        replace._COPIED_BYTES = copied_bytes
    clusters: list[Cluster] = []
    changing: list[Replacing] = []
    # Iterations before the changes that were hurt: an attempt after a return to a checkpoint is left alone
    hurt_in = set[int]()

    def hurt() -> None:
        if not changing:
            return
        if rank is None:
            folder = clusters[0]._launcher.shared_folder({0})
            print(f"state in {folder}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            return
        process = process_of(clusters[0], *rank)
        process.kill()
        process.wait()
        print(f"sent SIGKILL to {rank[0]} rank {rank[1]}", flush=True)
        changing.clear()

    def begin(replacing: Replacing, plan: object, due: PlanFrom, *_: object) -> None:
        if due.after not in hurt_in:
            hurt_in.add(due.after)
            changing.append(replacing)

    def before(kind: type, name: str, act: Callable[..., None]) -> None:
        method = getattr(kind, name)

        def replaced(self: Any, *arguments: Any, **more: Any) -> Any:
            act(self, *arguments)
            return method(self, *arguments, **more)

        setattr(kind, name, replaced)

    before(Cluster, "start", lambda cluster: clusters.append(cluster))

    def tell_processes(*_: object) -> None:
        launcher = clusters[0]._launcher
        assert isinstance(launcher, RayLauncher)
        found = {slot.owner: it.pid for slot, it in launcher._processes.items()}
        print(f"processes: {json.dumps(found)}", flush=True)

    if moment == "":
        before(Loop, "iteration", tell_processes)
    if moment == "save":
        before(Replacing, "save", begin)
        before(Saver, "start", lambda *_: hurt())
    elif moment:
        before(Replacing, "replace", lambda it, *_: changing.append(it))
    if moment == "setup":
        before(Cluster, "_set_up", lambda *_: hurt())
    if moment == "follow":
        before(Cluster, "follow", lambda *_: hurt())
    if moment == "load":
        before(Loop, "read_state", lambda *_: hurt())
    from rlplace.cli.train import main as train

    return train(["--config-name", config, *overrides])


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
