"""Execute the plan of a job: the run's folder, its workers and their arguments, iterations until done, the summary."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.watchdog import Watchdog, view
from rlplace.config.schema import Config
from rlplace.envs.registry import describe
from rlplace.errors import OutputError
from rlplace.faults import Recovery, faults_of
from rlplace.loop import Loop, make_loop
from rlplace.memory_monitor import MemoryMonitor
from rlplace.placement.channels import participants_of
from rlplace.placement.counts import count_active
from rlplace.placement.flow import DeviceDelivery
from rlplace.placement.language.spec import role_of
from rlplace.placement.memory.case import memory_case, with_share
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.memory.records import record_measurements
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import base_stage
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.text import render_text
from rlplace.placement.show.view import PlanView, render_json
from rlplace.report.sinks import RUN_CONSOLE, SCORED_CONSOLE, TEXT_CONSOLE, Sink, open_sinks
from rlplace.report.summary import SIMULATED, TEXT, Progress, compare_memory, summary, summary_text, waits_of
from rlplace.report.utilisation import render_timeline
from rlplace.workers.arguments import SimulatorArguments, WorkerArguments
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import WorkerGroup
from rlplace.workers.worker import Worker


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Everything that `run` needs of a job; `job_spec` makes it."""

    config: Config
    plan: Plan
    workers: Mapping[str, type[Worker]]  # by component
    arguments: WorkerArguments  # the `config` of every worker
    case: MemoryCase
    progress: Progress


def job_spec(config: Config, plan: Plan) -> JobSpec:
    """Choose workers, arguments and measures of a job by the kind of its model. The clock of the run starts here."""
    simulated, placement = config.kind == "mlp", plan.placement
    progress = Progress(measures=SIMULATED if simulated else TEXT, began=time.perf_counter())
    if not simulated and config.cluster.launcher == "inline":
        import rlplace.models.causal_lm  # noqa: F401  now: threads that import transformers at once find half of it

    spaces = describe(config.simulator_env) if simulated else None
    case = memory_case(plan, config, spaces)
    ranks = {component: placement.world_size(component) for component in placement.components}
    ledger = case.ledger()
    working = {component: ledger.working(component) for component in placement.components}
    if spaces is None:
        arguments = WorkerArguments(
            config=with_share(config, case), ranks=ranks, deliveries=plan.deliveries, working=working
        )
    else:
        arguments = SimulatorArguments(
            config=config,
            ranks=ranks,
            deliveries=plan.deliveries,
            working=working,
            spaces=spaces,
            routes=plan.row_routes,
        )
    workers = {component: worker_of(config, component) for component in placement.components}
    return JobSpec(config=config, plan=plan, workers=workers, arguments=arguments, case=case, progress=progress)


def worker_of(config: Config, component: str) -> type[Worker]:
    """Return the worker class of a component: by role and kind of model, of a reward by how it scores."""
    from rlplace.workers.roles.actor import Critic, LmActor, PolicyActor
    from rlplace.workers.roles.env import VectorEnvWorker
    from rlplace.workers.roles.reward import RewardEndpointWorker, RewardFunctionWorker
    from rlplace.workers.roles.rollout import TextRolloutWorker, VectorRolloutWorker
    from rlplace.workers.roles.scorer import ReferenceWorker, RewardModelWorker
    from rlplace.workers.roles.text_env import TextEnvWorker

    role = role_of(component)
    if role == "reward":
        rewards = {"model": RewardModelWorker, "function": RewardFunctionWorker, "url": RewardEndpointWorker}
        return rewards[config.reward_of(component).kind]
    if config.kind == "mlp":
        return {"actor": PolicyActor, "env": VectorEnvWorker, "rollout": VectorRolloutWorker}[role]
    workers = {"actor": LmActor, "env": TextEnvWorker, "rollout": TextRolloutWorker, "critic": Critic}
    return (workers | {"reference": ReferenceWorker})[role]


def run(job: JobSpec, report: PlanView, *, resolved: Mapping[str, Any]) -> Path:
    """Train until the goal or the end is reached. Return the run's folder.

    Raises ClusterError before anything trains, WorkerError when a worker fails; all processes are gone afterwards.
    """
    began, runner, placement, schedule = time.perf_counter(), job.config.runner, job.plan.placement, job.plan.schedule
    folder = make_folder(Path(runner.output_dir) / report.name)
    write_whole(folder / "config.yaml", yaml.safe_dump(dict(resolved), sort_keys=False))
    write_whole(folder / "plan.txt", render_text(report) + "\n")
    write_whole(folder / "plan.json", json.dumps(render_json(report), indent=1) + "\n")
    write_whole(folder / "plan.svg", render_svg(report))
    workers = ", ".join(f"{placement.world_size(c)} {c}" for c in placement.components)
    print(f"starting {workers} workers", flush=True)
    ledger = job.case.ledger()
    shared_bytes = {node.rank: ledger.shared_bytes(node.rank) for node in job.plan.topology.nodes}
    scored = "infer" in map(base_stage, schedule.stages)
    console = RUN_CONSOLE if job.config.kind == "mlp" else SCORED_CONSOLE if scored else TEXT_CONSOLE
    with (
        Cluster.from_config(job.config.cluster, job.plan.topology, shared_bytes=shared_bytes) as cluster,
        open_sinks(runner.sinks, folder, console) as sinks,
    ):
        groups = launch(cluster, job)
        channels = {name: channel for group in groups.values() for name, channel in group.channels.items()}
        job.progress.start_s = time.perf_counter() - began
        print(f"ready after {job.progress.start_s:.1f} s: {cluster.describe()}", flush=True)
        print(f"files: {folder}", flush=True)
        loop, ready = make_loop(schedule, groups, MemoryMonitor(job.case), runner), time.perf_counter()
        loop.recovery = recovery_of(job, cluster, groups)
        watchdog = Watchdog(channels, stall_s=runner.watchdog_s) if runner.watchdog_s else contextlib.nullcontext()
        try:
            with watchdog:
                _train(job, loop, sinks)
            saved = {"actor": folder / ("policy.safetensors" if job.config.kind == "mlp" else "policy")}
            loop.save(saved | ({"critic": folder / "critic"} if "critic" in placement.components else {}))
        finally:
            usage, held = loop.usage, loop.memory.held
            ended = summary(job.progress, folder) | {
                "memory": compare_memory(ledger, held),
                "waits": waits_of(view(channels)),
                "utilisation": usage.record(count_active(placement, schedule.needs)),
            }
            if loop.recovery is not None:
                ready_s = time.perf_counter() - ready
                ended["faults"] = faults_of(loop.recovery.faults, train_s=ended["train_s"], ready_s=ready_s)
            write_whole(folder / "memory.json", json.dumps(record_measurements(held), indent=1) + "\n")
            if usage.last:
                picture = render_timeline(usage.last, usage.accelerators, placement.components, "last iteration")
                write_whole(folder / "timeline.svg", picture)
            write_whole(folder / "summary.json", json.dumps(ended, indent=1) + "\n")
            print(summary_text(ended), flush=True)
    return folder


def recovery_of(job: JobSpec, cluster: Cluster, groups: Mapping[str, WorkerGroup]) -> Recovery | None:
    """Return what replaces lost workers; None where the first failure ends the run.

    A rollout that runs ahead has samples of several iterations under way, and the actor is always learning some.
    """
    config, plan = job.config, job.plan
    if not (config.faults.restarts and cluster.restarts_workers) or plan.schedule.needs.ahead:
        return None
    kept = [c for c in groups if role_of(c) == "reference" and config.reference.refresh_every]  # it has no other copy
    if any(isinstance(delivery, DeviceDelivery) for delivery in plan.deliveries):
        kept.append("rollout")  # the actor's ranks cannot leave a transfer between devices that lacks a member
    return Recovery(cluster, groups, config.faults, tell=lambda line: print(line, flush=True), kept=kept)


def _train(job: JobSpec, loop: Loop, sinks: Sequence[Sink]) -> None:
    """Run iterations until the last one or the goal, with evaluations on held-out prompts in between."""
    config, progress, runner = job.config, job.progress, job.config.runner
    simulated = config.kind == "mlp"
    eval_every = 0 if simulated else runner.eval_every
    while progress.iterations < runner.total_iterations:
        at = progress.iterations
        numbers = loop.iteration(at, evaluate=bool(eval_every) and at % eval_every == 0)
        if simulated:
            steps = config.simulator_env.total_num_envs * config.algorithm.rollout_steps
            progress.add(numbers, steps)
            numbers["env/steps_per_s"] = steps / numbers["time/iteration_s"]
            numbers |= {} if progress.mean_return is None else {"env/mean_return": progress.mean_return}
        else:
            progress.add(numbers, int(numbers.get("rollout/answers", 0)))
        for sink in sinks:
            sink(progress.iterations, progress.steps, numbers)
        if progress.reached(runner.stop_at_return):
            break
    if eval_every:
        progress.add_evaluation(loop.evaluate(progress.iterations), version=progress.iterations)


def launch(cluster: Cluster, job: JobSpec) -> dict[str, WorkerGroup]:
    """Channels and all worker groups of the plan, started together and verified against it."""
    plan, runner = job.plan, job.config.runner
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
    builders = {}
    for component, placed in slots.items():
        own = {c.name: channels[c.name] for c in plan.channels if component in (c.source, c.target)}
        builders[component] = (job.workers[component].create_group(job.arguments), placed, own)
    return cluster.launch_all(builders, seed=runner.seed)


def make_folder(parent: Path) -> Path:
    """A new folder named by date and time below `parent`; two runs in one second get different ones."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder, more = parent / stamp, itertools.count(1)
        while True:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
            folder = parent / f"{stamp}.{next(more)}"
    except OSError as error:
        raise OutputError.of(parent, error) from error


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
