"""What belongs to one plan of a run: the launched groups, their channels, the loop, its saving and its recovery.

A run has one `Launched` at a time. If the placement changes, the next one continues from the state of the one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlplace.checkpoints.checkpoint import RUN, Checkpoint
from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.watchdog import Watchdog, view
from rlplace.contract.job import Job
from rlplace.contract.registry import job_of
from rlplace.contract.stages import Work
from rlplace.execution.faults import History, Recovery, StateLost
from rlplace.execution.loop import Loop
from rlplace.execution.memory_monitor import MemoryMonitor
from rlplace.execution.overlap import loop_of
from rlplace.foresight.observe import Observations
from rlplace.foresight.performance import Performance
from rlplace.foresight.profile import Profile
from rlplace.placement.channels import participants_of
from rlplace.placement.flow import DeviceDelivery
from rlplace.placement.language.slots import Slot
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency
from rlplace.report.summary import Progress
from rlplace.runtime.saving import Saving
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import WorkerGroup, wait_all
from rlplace.workers.launch.heartbeat import Heartbeat
from rlplace.workers.worker import Worker


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Everything about a job that the function `run` needs; made by `job_spec`.

    `workers`: component -> worker class. `arguments`: component -> config of its workers. `work`: the calls of an
    iteration. `case`: the memory of the job. `performance`: profiles and predictions of the run. `given`: the profile
    from which to predict; None: the profile that the run itself measures. `progress`: iterations, training time and
    score so far.
    """

    job: Job
    config: Any  # config of the job's own type
    plan: Plan
    workers: Mapping[str, type[Worker]]  # by component
    arguments: Mapping[str, Any]  # the `config` of the workers, by component
    work: Work  # the calls of an iteration
    case: MemoryCase
    performance: Performance  # profiles and predictions of the run
    given: Profile | None  # profile to predict from; None: the run's own
    progress: Progress


def job_spec(config: Any, plan: Plan) -> JobSpec:
    """Return the JobSpec of a planned job. The time of the run is counted from this call."""
    job = job_of(config)
    progress = Progress(measures=job.measures(config), began=time.perf_counter())
    case = job.memory(config, plan, build=True)
    workers = job.workers(config, plan)
    performance = Performance(config, plan, case)
    return JobSpec(
        job=job,
        config=config,
        plan=plan,
        workers={
            component: workers[component] for component in plan.placement.components
        },
        arguments=job.arguments(config, plan, case),
        work=job.work(config, plan.needs),
        case=case,
        performance=performance,
        given=performance.given_profile(),
        progress=progress,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A plan at work.

    `job`: the job with this plan. `groups`: component -> its workers. `channels`: by name. `observed`: measured calls
    of the iterations with this plan.
    """

    job: JobSpec
    groups: Mapping[str, WorkerGroup]
    channels: Mapping[str, Channel]
    loop: Loop
    saving: Saving
    observed: Observations


def launched(
    cluster: Cluster,
    job: JobSpec,
    folder: Path,
    texts: Mapping[str, str],
    history: History,
    staying: Mapping[str, Residency] | None = None,
) -> Launched:
    """Launch the workers of a plan, and return them with the loop that continues after `job.progress.iterations`.

    No state is loaded. `folder`: the run's folder. `texts`: file name -> text that is written into each checkpoint.
    `history`: gets a record of each fault. `staying`: component -> its residency, for components whose workers have
    stayed on the cluster; they follow this plan. Raises the errors of `Cluster.launch_all`.
    """
    progress = job.progress
    held = staying or {}
    groups = launch(cluster, job, held)
    schedule = job.plan.schedule
    loop = loop_of(schedule)(
        schedule,
        groups,
        _monitor(job),
        job.config.runner,
        job.work,
        first=progress.iterations,
        held=held,
    )
    saving = Saving(
        job.job,
        job.config,
        job.plan,
        loop,
        folder,
        texts,
        progress,
        job.arguments,
    )
    for outlasted in history.ready(progress.train_s):
        loop.count(outlasted)
        _tell(outlasted)
    loop.recovery = recovery_of(job, cluster, groups, saving, history)
    channels = {
        name: channel
        for group in groups.values()
        for name, channel in group.channels.items()
    }
    return Launched(
        job=job,
        groups=groups,
        channels=channels,
        loop=loop,
        saving=saving,
        observed=job.performance.observations(lambda: view(channels)),
    )


def loaded(
    now: Launched, state: Checkpoint, staying: Collection[str] = ()
) -> Mapping[str, int] | None:
    """Make the workers load the checkpoint `state`, and tell the user. Those of the components `staying` have it.

    If a worker with state is lost meanwhile, take the run back to its newest checkpoint, which loads state again.
    Return None if this was not necessary; else return metric file -> its size in bytes at the time of the newest
    checkpoint.
    """
    try:
        more = now.saving.load(state, staying)
        _tell(f"continues after iteration {state.iteration}{more}")
    except StateLost:
        return went_back(now)
    return None


def went_back(now: Launched) -> Mapping[str, int]:
    """Take the run back to its newest checkpoint, or to its start if it has no checkpoint.

    Return metric file -> its size in bytes at that point of the run.
    """
    recovery = now.loop.recovery
    assert recovery is not None, "without it, no state is lost for the run to outlast"
    while True:
        with contextlib.suppress(StateLost):
            return now.saving.go_back(recovery)


@contextlib.contextmanager
def watched(cluster: Cluster, now: Launched) -> Iterator[None]:
    """Return a context manager in which stalled channels are reported, and workers that do not answer are detected.

    Workers that are threads of this process are not checked.
    """
    config = now.job.config
    stall_s = config.runner.watchdog_s
    heartbeat_s = config.faults.heartbeat_s
    with ExitStack() as watching:
        if stall_s:
            watching.enter_context(Watchdog(now.channels, stall_s=stall_s))
        if heartbeat_s and cluster.restarts_workers:
            watching.enter_context(Heartbeat(tuple(now.groups.values()), heartbeat_s))
        yield


def with_state(job: JobSpec, state: Checkpoint, config: Mapping[str, Any]) -> JobSpec:
    """Return the job with the arguments of workers that continue from the checkpoint `state`.

    `config`: the config with which the state was saved.
    """
    arguments = job.job.resumed_arguments(
        job.arguments, state.values(RUN).get("job", {}), config, state.iteration
    )
    return dataclasses.replace(job, arguments=arguments)


def slots_of(plan: Plan) -> list[Slot]:
    """Return the slots of all components of a plan."""
    placement = plan.placement
    return [slot for c in placement.components for slot in placement.slots(c)]


def _monitor(job: JobSpec) -> MemoryMonitor:
    return MemoryMonitor(
        job.case,
        verify=job.config.memory.verify,
        tell=lambda found: _tell(found.render()),
    )


def recovery_of(
    job: JobSpec,
    cluster: Cluster,
    groups: Mapping[str, WorkerGroup],
    saving: Saving,
    history: History,
) -> Recovery | None:
    """Return the object that replaces lost workers during the run; None if the first failure ends the run.

    `groups`: component -> its workers. `saving`: knows the newest checkpoint. `history`: gets a record of each fault.
    """
    config = job.config
    plan = job.plan
    if not (config.faults.restarts and cluster.restarts_workers):
        return None
    kept = set(job.job.replaced_by_going_back(config, plan))
    # A rank can neither leave a GPU transfer group nor join it later.
    joined = set[str]()
    for delivery in plan.deliveries:
        if isinstance(delivery, DeviceDelivery):
            joined |= {delivery.source, delivery.target}
    return Recovery(
        cluster,
        groups,
        config.faults,
        history,
        tell=_tell,
        patience_s=config.runner.stage_timeout_s,
        replaceable=job.job.replaceable(config, plan),
        kept=kept | joined,
        joined=joined,
        without_state=saving.without_state,
    )


def launch(
    cluster: Cluster, job: JobSpec, staying: Collection[str] = ()
) -> dict[str, WorkerGroup]:
    """Launch all worker groups of the plan together, with its channels. Return component -> its group.

    `staying`: components whose workers are on the cluster already, and follow this plan.
    """
    plan = job.plan
    slots = {
        component: tuple(plan.placement.slots(component))
        for component in plan.placement.components
    }
    cluster.start()
    cluster.reserve([slot for placed in slots.values() for slot in placed])
    channels = make_channels(cluster, job)
    facts = job.job.facts(job.config, plan)
    builders = {}
    for component, placed in slots.items():
        builder = job.workers[component].create_group(job.arguments[component], facts)
        builders[component] = (builder, placed, own_channels(job, channels, component))
    follows = {name: builders.pop(name) for name in staying}
    # They open their ends while the other workers start
    following = cluster.follow(follows)
    launched = cluster.launch_all(builders) if builders else {}
    wait_all(following, job.config.runner.stage_timeout_s)
    stayed = {pending.group.name: pending.group for pending in following}
    together = stayed | launched
    return {component: together[component] for component in slots}


def make_channels(cluster: Cluster, job: JobSpec) -> dict[str, Channel]:
    """Make the channels of the plan, and return them by name."""
    plan = job.plan
    return {
        c.name: cluster.channel(
            ChannelSpec(
                name=c.name,
                capacity_items=c.capacity_items,
                keys=c.keys,
                participants=participants_of(c, plan.placement),
                timeout_s=job.config.runner.channel_timeout_s,
                source=c.source,
                target=c.target,
            ),
            c.locations(),
        )
        for c in plan.channels
    }


def own_channels(
    job: JobSpec, channels: Mapping[str, Channel], component: str
) -> dict[str, Channel]:
    """Return name -> channel, for the channels into which a component puts items or from which it takes items."""
    return {
        c.name: channels[c.name]
        for c in job.plan.channels
        if component in (c.source, c.target)
    }


def _tell(line: object) -> None:
    print(line, flush=True)
