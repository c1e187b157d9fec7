"""Start sixteen workers: seconds from nothing to all being set up, and the memory that they hold together.

    python benchmarks/start.py [--workers 16] [--repeat 3] [--only fork plain actors forkserver]

In turns, each in a process of its own: the workers of a simulator job as forks and each with its own imports
(`cluster.ray.start`), as many plain Ray actors that import torch and FSDP, and as many processes of Python's
multiprocessing with a forkserver that has imported them. All but the last start Ray; the seconds have that too.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MODULES = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor")
NAMES = {
    "fork": "workers, forks of a template",
    "plain": "workers, each with its own imports",
    "actors": "plain Ray actors that import torch",
    "forkserver": "multiprocessing, forkserver with torch",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=16, help="a multiple of 4")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--one", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(MEASURES[options.one](options.one, options.workers)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    for _ in range(options.repeat):
        for name in options.only:
            command = [
                sys.executable,
                __file__,
                "--one",
                name,
                "--workers",
                str(options.workers),
            ]
            answer = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
            )
            found[name].append(json.loads(answer.stdout.splitlines()[-1]))
    seconds = {
        name: statistics.median(run["seconds"] for run in runs)
        for name, runs in found.items()
    }
    print(f"| {options.workers} of | seconds | of plain actors | MiB together |")
    print("|---|---|---|---|")
    for name, runs in found.items():
        ratio = (
            f"{seconds[name] / seconds['actors']:.2f}" if "actors" in seconds else "-"
        )
        mib = statistics.median(run["mib"] for run in runs)
        print(f"| {NAMES[name]} | {seconds[name]:.1f} | {ratio} | {mib:,.0f} |")


def ours(how: str, workers: int) -> dict[str, float]:
    from rlplace.config import compose
    from rlplace.runtime.launched import job_spec, launch
    from rlplace.runtime.prepare import prepare_composed
    from rlplace.workers.launch.cluster import Cluster
    from rlplace.workers.ray_launch.launcher import RayLauncher

    half = workers // 2
    quarter = workers // 4
    where = (
        f"{{actor: 0-{half - 1}, env: 0-{quarter - 1}, rollout: {quarter}-{half - 1}}}"
    )
    words = [
        f"cluster.component_placement={where}",
        f"cluster.ray.start={how}",
        f"cluster.accelerators_per_node={half}",
    ]
    (composed,) = compose.with_hydra(["--config-name", "hybrid_ppo", *words])
    prepared = prepare_composed(composed)
    job = job_spec(prepared.config, prepared.plan)
    began = time.perf_counter()
    with Cluster.from_config(
        job.config.cluster, job.plan.topology, workers=job.workers.values()
    ) as cluster:
        launch(cluster, job)
        seconds = time.perf_counter() - began
        assert isinstance(cluster._launcher, RayLauncher)
        return measured(
            seconds, [process.pid for process in cluster._launcher._processes.values()]
        )


class Plain:
    """What a user writes who has no launcher."""

    def up(self) -> int:
        return up()


def up() -> int:
    for name in MODULES:
        __import__(name)
    return os.getpid()


def actors(how: str, workers: int) -> dict[str, float]:
    from rlplace.workers.ray_launch.session import ray_environment

    with ray_environment(None):
        began = time.perf_counter()
        import ray

        ray.init(address="local", include_dashboard=False, logging_level=logging.ERROR)
    made: Any = ray.remote(Plain)
    started = [made.options(num_cpus=0).remote() for _ in range(workers)]
    pids = ray.get([actor.up.remote() for actor in started])
    found = measured(time.perf_counter() - began, pids)
    ray.shutdown()
    return found


def forkserver(how: str, workers: int) -> dict[str, float]:
    began = time.perf_counter()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    ready = context.Queue()
    go = context.Event()
    processes = [
        context.Process(target=answer, args=(ready, go)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    pids = [ready.get() for _ in processes]
    found = measured(time.perf_counter() - began, pids)
    go.set()
    for process in processes:
        process.join()
    return found


def answer(ready: Any, go: Any) -> None:
    ready.put(up())
    go.wait()


def measured(seconds: float, pids: list[int]) -> dict[str, float]:
    """Add the memory of processes, what several share divided by their number."""
    rollups = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    kib = sum(
        int(line.split()[1])
        for rollup in rollups
        for line in rollup.splitlines()
        if line.startswith("Pss:")
    )
    return {"seconds": seconds, "mib": kib / 1024}


MEASURES: dict[str, Callable[[str, int], dict[str, float]]] = {
    "fork": ours,
    "plain": ours,
    "actors": actors,
    "forkserver": forkserver,
}

if __name__ == "__main__":
    main()
