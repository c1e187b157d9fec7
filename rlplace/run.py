"""Executes one plan: the run's folder, the launch, the loop until done, the summary."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.watchdog import Watchdog, view
from rlplace.errors import OutputError
from rlplace.job import JobSpec
from rlplace.loop import Loop
from rlplace.memory_monitor import MemoryMonitor
from rlplace.overlap import make_loop
from rlplace.placement.channels import participants_of
from rlplace.placement.dedicated import count_active
from rlplace.placement.memory.measured import record_measurements
from rlplace.placement.show.json import render_json
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.text import render_text
from rlplace.placement.show.view import PlanView
from rlplace.report.sinks import Sink, make_sinks
from rlplace.report.summary import compare_memory, summary, summary_text, waits_of
from rlplace.report.timeline import render_timeline
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import WorkerGroup


def run(job: JobSpec, report: PlanView, *, resolved: Mapping[str, Any]) -> Path:
    """Trains until the goal or the end is reached. Returns the run's folder.

    Raises ClusterError before anything trains, WorkerError when a worker fails; all processes are gone afterwards.
    """
    began, runner = time.perf_counter(), job.runner
    folder = make_folder(Path(runner.output_dir) / report.name)
    write_whole(folder / "config.yaml", yaml.safe_dump(dict(resolved), sort_keys=False))
    write_whole(folder / "plan.txt", render_text(report) + "\n")
    write_whole(folder / "plan.json", json.dumps(render_json(report), indent=1) + "\n")
    write_whole(folder / "plan.svg", render_svg(report))
    placed = job.plan.placement
    print(f"starting {', '.join(f'{placed.world_size(c)} {c}' for c in placed.components)} workers", flush=True)
    shared_bytes = {node.rank: job.ledger.shared_bytes(node.rank) for node in job.plan.topology.nodes}
    with (
        Cluster.from_config(job.cluster, job.plan.topology, shared_bytes=shared_bytes) as cluster,
        sinks_of(job, folder) as sinks,
    ):
        groups = launch(cluster, job)
        channels = {name: channel for group in groups.values() for name, channel in group.channels.items()}
        start_s = time.perf_counter() - began
        job.driver.progress.start_s = start_s
        print(f"ready after {start_s:.1f} s: {cluster.describe()}", flush=True)
        print(f"files: {folder}", flush=True)
        loop = make_loop(
            job.plan.schedule,
            groups,
            MemoryMonitor(job.case),
            stage_timeout_s=runner.stage_timeout_s,
            iterations=runner.total_iterations,
        )
        try:
            with _watched(channels, runner.watchdog_s):
                job.driver.train(loop, sinks)
            loop.save({component: folder / name for component, name in job.saved.items()})
        finally:
            held = loop.memory.held
            ended = summary(job.driver.progress, folder) | {
                "memory": compare_memory(job.ledger, held),
                "waits": waits_of(view(channels)),
                "utilisation": loop.usage.record(count_active(job.plan.placement, job.plan.schedule.needs).at_work),
            }
            write_whole(folder / "memory.json", json.dumps(record_measurements(held), indent=1) + "\n")
            if loop.usage.last:
                write_whole(folder / "timeline.svg", timeline_of(loop, job))
            write_whole(folder / "summary.json", json.dumps(ended, indent=1) + "\n")
            print(summary_text(ended), flush=True)
    return folder


def timeline_of(loop: Loop, job: JobSpec) -> str:
    usage = loop.usage
    return render_timeline(usage.last, usage.accelerators, job.plan.placement.components, "last iteration")


def _watched(channels: Mapping[str, Channel], stall_s: float) -> AbstractContextManager[object]:
    return Watchdog(channels, stall_s=stall_s) if stall_s else contextlib.nullcontext()


def launch(cluster: Cluster, job: JobSpec) -> dict[str, WorkerGroup]:
    """Channels and all worker groups of the plan, started together and verified against it."""
    plan, runner = job.plan, job.runner
    slots = {component: tuple(plan.placement.slots(component)) for component in plan.placement.components}
    cluster.reserve([slot for placed in slots.values() for slot in placed])
    channels = {
        c.name: cluster.channel(
            ChannelSpec(
                name=c.name,
                capacity_items=c.capacity_items,
                keys=c.keys,
                participants=participants_of(c, plan.placement),
                timeout_s=runner.channel_timeout_s,
            ),
            c.locations(),
        )
        for c in plan.channels
    }
    ends = {
        component: {c.name: channels[c.name] for c in plan.channels if component in (c.source, c.target)}
        for component in plan.placement.components
    }
    builders = {
        component: (job.workers[component].create_group(job.arguments), slots[component], own)
        for component, own in ends.items()
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
def sinks_of(job: JobSpec, folder: Path) -> Iterator[list[Sink]]:
    sinks = make_sinks(job.runner.sinks, folder, job.console)
    try:
        yield sinks
    finally:
        for sink in sinks:
            sink.close()
