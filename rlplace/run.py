"""Executes one plan: the run's folder, the launch, the loop until done, the summary."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlplace.comm.channel import ChannelSpec
from rlplace.config import RunConfig
from rlplace.envs import describe
from rlplace.errors import OutputError
from rlplace.loop import Loop
from rlplace.placement import Plan, render_svg
from rlplace.placement.memory import predict, record_measurements
from rlplace.placement.report import PlanReport
from rlplace.placement.report_record import report_record
from rlplace.placement.report_text import render_report
from rlplace.sinks import Sink, make_sinks
from rlplace.summary import Progress, compare_memory, summary, summary_text
from rlplace.workers.cluster import Cluster
from rlplace.workers.group import WorkerGroup
from rlplace.workers.job import Job


def run(config: RunConfig, plan: Plan, report: PlanReport, *, resolved: Mapping[str, Any]) -> Path:
    """Trains until the step budget or the return goal is reached. Returns the run's folder.

    Raises ClusterError before anything trains, WorkerError when a worker fails; all processes are gone afterwards.
    """
    began = time.perf_counter()
    spaces = describe(config.env)
    folder = make_folder(Path(config.runner.output_dir) / report.name)
    write_whole(folder / "config.yaml", yaml.safe_dump(dict(resolved), sort_keys=False))
    write_whole(folder / "plan.txt", render_report(report) + "\n")
    write_whole(folder / "plan.json", json.dumps(report_record(report), indent=1) + "\n")
    write_whole(folder / "plan.svg", render_svg(plan, report.ledger))
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
            memory = compare_memory(predict(plan, config, spaces), loop.held)
            ended = summary(progress, folder) | {"memory": memory}
            write_whole(folder / "memory.json", json.dumps(record_measurements(loop.held), indent=1) + "\n")
            write_whole(folder / "summary.json", json.dumps(ended, indent=1) + "\n")
            print(summary_text(ended), flush=True)
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
