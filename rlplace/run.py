"""Executes one plan: the run's folder, the launch, the loop until done, the summary."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlplace.comm.channel import ChannelSpec
from rlplace.config import RunConfig
from rlplace.envs import describe
from rlplace.errors import OutputError
from rlplace.loop import Loop
from rlplace.placement import Plan, render_json, render_svg, render_text
from rlplace.sinks import Sink, make_sinks
from rlplace.workers.cluster import Cluster
from rlplace.workers.group import WorkerGroup
from rlplace.workers.job import Job

RETURN_WINDOW = 100  # episodes in "the mean return"


@dataclasses.dataclass(slots=True)
class Progress:
    """What the run has seen so far. Owned by `run`."""

    began: float
    start_s: float = 0.0  # until all workers were ready
    env_steps: int = 0
    iterations: int = 0
    first_return: float | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    episodes: deque[tuple[float, float]] = dataclasses.field(default_factory=deque)  # (mean return, episodes)

    def add(self, numbers: Mapping[str, float], env_steps: int) -> None:
        self.iterations += 1
        self.env_steps += env_steps
        for name, value in numbers.items():
            if name.startswith("time/") and name.endswith("_s"):
                self.seconds[name] = self.seconds.get(name, 0.0) + value
        if "env/return" in numbers:
            self.episodes.append((numbers["env/return"], numbers["env/episodes"]))
            while sum(n for _, n in self.episodes) - self.episodes[0][1] >= RETURN_WINDOW:
                self.episodes.popleft()
            if self.first_return is None:
                self.first_return = numbers["env/return"]

    @property
    def mean_return(self) -> float | None:
        """Over the last RETURN_WINDOW finished episodes, by whole iterations; None before the first has finished."""
        total = sum(n for _, n in self.episodes)
        return sum(r * n for r, n in self.episodes) / total if total else None

    def reached(self, goal: float | None) -> bool:
        enough = sum(n for _, n in self.episodes) >= RETURN_WINDOW
        return goal is not None and enough and self.mean_return is not None and self.mean_return >= goal


def run(config: RunConfig, plan: Plan, *, name: str, resolved: Mapping[str, Any]) -> Path:
    """Trains until the step budget or the return goal is reached. Returns the run's folder.

    Raises ClusterError before anything trains, WorkerError when a worker fails; all processes are gone afterwards.
    """
    began = time.perf_counter()
    spaces = describe(config.env)
    folder = make_folder(Path(config.runner.output_dir) / name)
    write_whole(folder / "config.yaml", yaml.safe_dump(dict(resolved), sort_keys=False))
    write_whole(folder / "plan.txt", render_text(plan) + "\n")
    write_whole(folder / "plan.json", json.dumps(render_json(plan), indent=1) + "\n")
    write_whole(folder / "plan.svg", render_svg(plan))
    job = Job(config=config, spaces=spaces, routes=plan.routes)
    progress = Progress(began=began)
    with Cluster.from_config(config.cluster, plan.topology) as cluster, sinks_of(config, folder) as sinks:
        groups = launch(cluster, plan, job)
        progress.start_s = time.perf_counter() - began
        print(f"ready after {progress.start_s:.1f} s: {cluster.describe()}", flush=True)
        print(f"files: {folder}", flush=True)
        loop = Loop(plan.schedule, groups, stage_timeout_s=config.runner.stage_timeout_s)
        steps = config.env.total_num_envs * config.algorithm.rollout_steps
        try:
            while progress.env_steps < config.runner.total_env_steps:
                numbers = loop.iteration(progress.iterations)
                progress.add(numbers, steps)
                numbers["env/steps_per_s"] = steps / numbers["time/iteration_s"]
                if progress.mean_return is not None:
                    numbers["env/mean_return"] = progress.mean_return
                for sink in sinks:
                    sink.write(progress.iterations, progress.env_steps, numbers)
                if progress.reached(config.runner.stop_at_return):
                    break
            groups["actor"].save_policy(str(folder / "policy.safetensors")).wait(config.runner.stage_timeout_s)
        finally:
            report = summary(progress, folder)
            write_whole(folder / "summary.json", json.dumps(report, indent=1) + "\n")
            print(summary_text(report), flush=True)
    return folder


def launch(cluster: Cluster, plan: Plan, job: Job) -> dict[str, WorkerGroup]:
    """Channels and all worker groups of the plan, started together and verified against it."""
    from rlplace.workers.actor import FSDPActor
    from rlplace.workers.env import EnvWorker
    from rlplace.workers.rollout import RolloutWorker

    workers = {"actor": FSDPActor, "env": EnvWorker, "rollout": RolloutWorker}
    runner = job.config.runner
    channels = {
        c.name: cluster.channel(
            ChannelSpec(name=c.name, capacity_items=c.capacity_items, keys=c.keys, timeout_s=runner.channel_timeout_s)
        )
        for c in plan.channels
    }
    builders = {
        component: (workers[component].create_group(job), plan.placement.get_strategy(component), channels)
        for component in plan.placement.components
    }
    return cluster.launch_all(builders, seed=runner.seed)


def make_folder(parent: Path) -> Path:
    """A new folder named by date and time below `parent`; two runs in one second get different ones."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for suffix in itertools.chain([""], (f".{i}" for i in itertools.count(1))):
            folder = parent / (stamp + suffix)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise OutputError.of(parent, error) from error
    raise AssertionError("unreachable")


def write_whole(file: Path, text: str) -> None:
    """The file with all of `text`, or not at all."""
    part = file.with_name(file.name + ".part")
    try:
        with open(part, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputError.of(file, error) from error


@contextlib.contextmanager
def sinks_of(config: RunConfig, folder: Path) -> Iterator[list[Sink]]:
    sinks = make_sinks(config.runner.sinks, folder)
    try:
        yield sinks
    finally:
        for sink in sinks:
            sink.close()


def summary(progress: Progress, folder: Path) -> dict[str, Any]:
    """The run in numbers; seconds are summed over iterations."""
    stages = progress.seconds
    total = stages.get("time/iteration_s", 0.0)
    return {
        "iterations": progress.iterations,
        "env_steps": progress.env_steps,
        "return_first": progress.first_return,
        "return_last": progress.mean_return,
        "wall_s": time.perf_counter() - progress.began,
        "start_s": progress.start_s,
        "train_s": total,
        "env_steps_per_s": progress.env_steps / total if total else 0.0,
        "seconds": {name.removeprefix("time/").removesuffix("_s"): value for name, value in stages.items()},
        "overhead_share": stages.get("time/overhead_s", 0.0) / total if total else 0.0,
        "folder": str(folder),
    }


def summary_text(report: Mapping[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "no episode finished" if value is None else f"{value:,.1f}"

    seconds, rate = report["seconds"], report["env_steps_per_s"]
    first, last = number(report["return_first"]), number(report["return_last"])
    stages = ", ".join(f"{s} {seconds.get(s, 0.0):.1f}" for s in ("rollout", "learn", "sync", "moves"))
    return "\n".join(
        [
            "",
            f"return     {first} -> {last}   (first iteration, last {RETURN_WINDOW} episodes)",
            f"env steps  {report['env_steps']:,} in {report['iterations']} iterations, {rate:,.0f} per second",
            f"seconds    {report['wall_s']:.1f} in all: start {report['start_s']:.1f}, "
            f"training {report['train_s']:.1f} ({stages})",
            f"overhead   {report['overhead_share']:.0%} of training was neither simulator, policy nor learning",
            f"files      {report['folder']}",
        ]
    )
