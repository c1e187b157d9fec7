"""What a call to eight workers costs, beside eight plain Ray actors, whose methods do nothing either.

    python benchmarks/calls.py [rounds]

A round calls all eight and waits for the last. Both sides take turns, five times each; printed are the medians of a
round, and of the processor time that a call takes of the driver and of its worker. Read ratios, not absolutes.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray

from rlplace.config.blocks.machines import AcceleratorConfig
from rlplace.placement.language.slots import FlexiblePlacementStrategy
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.worker import Worker

WORKERS = 8
REPETITIONS = 5


class Idle(Worker):
    """Does nothing."""

    def setup(self) -> None:
        """Need nothing."""

    def spent(self) -> float:
        """Return the processor seconds of this process."""
        return time.process_time()


class Plain:
    """Does nothing."""

    def spent(self) -> float:
        return time.process_time()


class Costs(NamedTuple):
    round_ms: float
    driver_ms: float  # processor time of a call
    worker_ms: float


def measured(rounds: int, call: Callable[[], list[float]]) -> Costs:
    """Call all workers again and again."""
    before = call()
    began = time.perf_counter()
    driver = time.process_time()
    for _ in range(rounds - 1):
        call()
    after = call()
    wall = time.perf_counter() - began
    own = time.process_time() - driver
    calls = rounds * WORKERS
    theirs = sum(after) - sum(before)
    return Costs(wall / rounds * 1e3, own / calls * 1e3, theirs / calls * 1e3)


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    accelerators = FlexiblePlacementStrategy([[number] for number in range(WORKERS)])
    with Cluster(
        1,
        WORKERS,
        accelerator=AcceleratorConfig(kind="emulated", memory=1),
        launcher="ray",
    ) as cluster:
        group = Idle.create_group().launch(
            cluster, name="idle", placement_strategy=accelerators
        )
        plain: Any = ray.remote(num_cpus=0)(Plain)
        actors = [plain.remote() for _ in range(WORKERS)]
        sides: dict[str, Callable[[], list[float]]] = {
            "worker group": lambda: group.spent().wait(),
            "plain Ray actors": lambda: ray.get(
                [actor.spent.remote() for actor in actors]
            ),
        }
        found: dict[str, list[Costs]] = {name: [] for name in sides}
        for _ in range(REPETITIONS):
            for name, call in sides.items():
                found[name].append(measured(rounds, call))
    print(
        f"{os.cpu_count()} cores, {WORKERS} workers, ms{'':8}{'round':>8}{'driver':>9}{'worker':>9}"
    )
    for name, costs in found.items():
        print(
            f"{name:32}"
            + "".join(
                f"{statistics.median(values):9.3f}"
                for values in zip(*costs, strict=True)
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
