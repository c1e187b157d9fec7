"""Execute the plan of a job: create the run's folder, launch workers, run iterations, write the summary."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
import time
import traceback
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from rlplace import checkpoints, codes
from rlplace.checkpoints.checkpoint import CONFIG, PLAN, RUN, Checkpoint
from rlplace.checkpoints.find import find
from rlplace.checkpoints.store import lock
from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.watchdog import Watchdog, view
from rlplace.config.open_job import OpenConfig
from rlplace.config.worker_variables import THREADS, exported, not_given, variables_of
from rlplace.contract.job import Job
from rlplace.contract.registry import job_of, saved_mapping
from rlplace.contract.stages import Work
from rlplace.errors import (
    ConfigError,
    NodeLost,
    OutputError,
    RayDied,
    RlplaceError,
    WorkerError,
)
from rlplace.execution.faults import Fault, History, Recovery, StateLost, faults_of
from rlplace.execution.loop import Loop
from rlplace.execution.memory_monitor import MemoryMonitor
from rlplace.execution.overlap import loop_of
from rlplace.extras import versions_of
from rlplace.foresight.known import FILE as PROFILE
from rlplace.foresight.observe import Observations, machine, versions
from rlplace.foresight.performance import Performance
from rlplace.foresight.profile import Profile
from rlplace.placement.channels import participants_of
from rlplace.placement.counts import count_active
from rlplace.placement.flow import DeviceDelivery
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.memory.records import record_measurements
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import base_stage
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.text import render_text
from rlplace.placement.show.view import PlanView, render_json
from rlplace.report.callbacks import Callbacks, OnIteration
from rlplace.report.live import Display
from rlplace.report.page import render_report
from rlplace.report.record import read_run
from rlplace.report.sinks import (
    Console,
    open_sinks,
)
from rlplace.report.summary import (
    Progress,
    compare_memory,
    fitted,
    summary,
    summary_text,
    waits_of,
)
from rlplace.report.timeline import render_timeline
from rlplace.report.trace import render_trace
from rlplace.report.trackers import Sink, pages, state_of
from rlplace.report.typed import Typed
from rlplace.runtime import inputs
from rlplace.runtime.inputs import INPUTS
from rlplace.runtime.saving import Saving
from rlplace.signals import Signals, Stopped
from rlplace.tables import with_whole_word
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import WorkerGroup, first_failure_s
from rlplace.workers.launch.heartbeat import Heartbeat
from rlplace.workers.worker import Worker

LOGS = "logs"  # folder of worker output, in the run's folder
# Iterations of a command after which components that never move report their bytes
_MEASURED_AFTER = (1, 2, 4, 8)
ERROR = "error.txt"  # file with the error that ended the run, if one did


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


def run(
    job: JobSpec,
    report: PlanView,
    *,
    resolved: Mapping[str, Any],
    signals: Signals | None = None,
    resumed: Checkpoint | None = None,
    history: History | None = None,
    command: Typed | None = None,
    on_iteration: Sequence[OnIteration] = (),
) -> Path:
    """Train until the last iteration, the goal, or a signal. Return the run's folder.

    `report`: the plan as it is written into the folder. `resolved`: the composed config. `signals`: the signals that
    can end the run; None: no signal is handled. `resumed`: the checkpoint to continue from, in the folder of its run;
    None: a new run in a new folder. `history`: earlier faults of this run, if the run continues after NodeLost.
    `command`: the typed command, which is written into the folder. `on_iteration`: functions that are called after
    each iteration; if one of them returns True, the run ends.

    The last printed line says where the trained policy is; if an error is raised, this text is added to the error as a
    note instead. Raises ClusterError before the training starts, WorkerError if a worker fails, NodeLost if machines
    are lost, and Stopped after a signal. When the function ends, all processes of the run have ended.
    """
    folder = (
        make_folder(Path(job.config.runner.output_dir) / report.name)
        if resumed is None
        else resumed.run
    )
    with lock(folder) as not_locked:
        if not_locked is not None:
            _tell(not_locked.render())
        # Sizes and hashes of data, models and code, which a resume compares
        read = inputs.inputs_of(resolved, job.workers)
        if read:
            _tell(f"read by the run, and compared at a resume: {inputs.shown(read)}")
        texts = {
            CONFIG: yaml.safe_dump(saved_mapping(resolved), sort_keys=False),
            PLAN: json.dumps(render_json(report), indent=1) + "\n",
            INPUTS: inputs.written(read),
        }
        for name, text in {
            **texts,
            "plan.txt": render_text(report) + "\n",
            "plan.svg": render_svg(report),
        }.items():
            write_whole(folder / name, text)
        if command is not None:
            _keep(command, folder, job)
        (folder / ERROR).unlink(missing_ok=True)
        try:
            with _exported(job):
                _run(
                    job,
                    folder,
                    texts,
                    signals or Signals(),
                    resumed,
                    history or History(),
                    on_iteration,
                )
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, Stopped):
                text = (
                    str(error)
                    if isinstance(error, RlplaceError)
                    else "".join(traceback.format_exception(error))
                )
                # A second error while writing the file must not hide the first.
                with contextlib.suppress(OutputError):
                    write_whole(folder / ERROR, f"{text.rstrip()}\n")
            if isinstance(error, Stopped) and error.by_scheduler and _can_go_on(folder):
                error.exit_code = job.config.runner.requeue_exit_code or error.exit_code
            error.add_note(job.job.last_line(folder))
            raise
    _tell(job.job.last_line(folder))
    return folder


def _exported(job: JobSpec) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that sets the workers' environment variables in this process.

    This is needed because workers may be threads or child processes of this process.
    """
    if (said := not_given(job.config)) is not None:
        _tell(said)
    config = job.config
    inline = config.cluster.launcher == "inline"
    return exported(
        ({THREADS: "1"} if inline else {})
        | variables_of(config, job.job.variables(config))
    )


def _can_go_on(folder: Path) -> bool:
    """Return whether `folder` has a checkpoint from which the run can be resumed."""
    with contextlib.suppress(ConfigError):
        return find(str(folder), Path()) is not None
    return False


def _keep(command: Typed, folder: Path, job: JobSpec) -> None:
    """Write the typed command, with the machine and the versions of libraries, into the run's folder.

    Raises OutputError.
    """
    nodes = job.plan.topology.nodes
    accelerators = [
        f"{each.count} {each.product or node.kind}"
        for node in nodes
        for each in node.alike
    ]
    try:
        command.into(
            folder,
            {
                "machine": machine() | {"accelerators": accelerators},
                "versions": versions_of(["rlplace"]) | versions(),
            },
        )
    except OSError as error:
        raise OutputError.of(folder, error) from error


def _run(
    job: JobSpec,
    folder: Path,
    texts: Mapping[str, str],
    signals: Signals,
    resumed: Checkpoint | None,
    history: History,
    on_iteration: Sequence[OnIteration],
) -> None:
    began = time.perf_counter()
    runner = job.config.runner
    placement = job.plan.placement
    schedule = job.plan.schedule
    if resumed is None and (begins := job.job.start_text(job.config)):
        _tell(begins)
    workers = ", ".join(f"{placement.world_size(c)} {c}" for c in placement.components)
    _tell(fitted(f"starting {workers} workers"))
    progress = job.progress
    before = {} if resumed is None else resumed.values(RUN)
    if before:
        (progress.resume if history.ready_s is None else progress.go_back)(
            before["progress"]
        )
    if resumed is not None:
        job = dataclasses.replace(
            job,
            arguments=job.job.resumed_arguments(
                job.arguments,
                before.get("job", {}),
                yaml.safe_load(resumed.text(CONFIG)),
                resumed.iteration,
            ),
        )
    callbacks = Callbacks(
        runner.callbacks, folder, yaml.safe_load(texts[CONFIG]), on_iteration
    )
    display = Display(runner, _console(job), schedule.active)
    with (
        callbacks,
        _shown(job, display, signals),
        _cluster(job, folder) as cluster,
        ExitStack() as opened,
    ):

        def sinks(sizes: Mapping[str, int] | None) -> list[Sink]:
            opened.close()
            return [*opened.enter_context(_sinks(job, folder, texts, sizes)), display]

        curves = sinks(before.get("files"))
        with _naming_lost_nodes(
            job, cluster, history, lambda: resumed.folder if resumed else folder
        ):
            groups = launch(cluster, job)
            loop = loop_of(schedule)(
                schedule,
                groups,
                _monitor(job),
                runner,
                job.work,
                first=progress.iterations,
            )
            loop.started(cluster.start_s)
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
            if resumed is not None and (sizes := _loaded(loop, saving, resumed)):
                curves = sinks(sizes)
        # Raise a signal that library code may have swallowed.
        signals.check()
        progress.start_s += time.perf_counter() - began
        _tell(
            fitted(
                f"ready after {time.perf_counter() - began:.1f} s: {cluster.describe()}"
            )
        )
        # The line is broken before the note, never within the path
        note = f"(what workers print: {LOGS}/)"
        files = f"files: {folder}   {note}"
        if len(files) > shutil.get_terminal_size().columns:
            files = f"{with_whole_word('files:', str(folder))}\n  {note}"
        _tell(files)
        channels = {
            name: channel
            for group in groups.values()
            for name, channel in group.channels.items()
        }
        display.watch(loop, channels, progress.iterations)
        # Component -> saved model; None until the models are saved.
        policies: Mapping[str, Path] | None = None
        state = _not_ended(progress)
        observed = job.performance.observations(lambda: view(channels))
        patience_s = (
            job.config.checkpoint.grace_s if job.config.checkpoint.on_signal else 0.0
        )
        try:
            named = _naming_lost_nodes(
                job, cluster, history, lambda: saving.newest, loop, groups.values()
            )
            with (
                _noted(state, signals),
                _watched(job, cluster, groups, channels),
                signals.patient(patience_s),
                named,
            ):
                try:
                    while policies is None:
                        try:
                            _train(
                                job,
                                cluster,
                                loop,
                                curves,
                                callbacks,
                                saving,
                                signals,
                                observed,
                            )
                            saving.last()
                            saved = _policies(job, folder)
                            loop.save(saved)
                            policies = saved
                        except StateLost:
                            curves = sinks(_went_back(loop, saving))
                except (RlplaceError, Stopped) as error:
                    if isinstance(error, RayDied):
                        _tell(
                            f"{error.problem.key}: {error.problem.what}; saves, and ends"
                        )
                    if not signals.at_once:
                        ending = isinstance(error, RayDied) and not error.calls_go_on
                        saving.rescue(ending=ending)
                    raise
        finally:
            display.close()
            ended = (
                summary(progress, folder)
                | {"stages": list(dict.fromkeys(map(base_stage, schedule.stages)))}
                | {"waits": waits_of(view(channels))}
                | state
                | saving.record()
            )
            if loop.recovery is not None:
                ended["faults"] = faults_of(history, train_s=progress.train_s)
            _report(
                job,
                folder,
                ended | {"policy": _policy(policies)},
                loop,
                observed,
                whole=policies is not None,
            )
            callbacks.on_end(state["state"])
        saving.require_last()


def _not_ended(progress: Progress) -> dict[str, Any]:
    """Return the first entries of summary.json, which say that the run has failed.

    If the run does not fail, later entries replace these entries.
    """
    before = {"iterations": progress.iterations, "train_s": progress.train_s}
    return {"state": "failed"} | (
        {"before_resume": before} if progress.iterations else {}
    )


def _monitor(job: JobSpec) -> MemoryMonitor:
    return MemoryMonitor(
        job.case,
        verify=job.config.memory.verify,
        tell=lambda found: _tell(found.render()),
    )


@contextlib.contextmanager
def _noted(state: dict[str, str], signals: Signals) -> Iterator[None]:
    """Return a context manager that sets `state["state"]` at its end: finished, or stopped by a signal.

    The value is for summary.json. An error other than Stopped leaves `state` unchanged.
    """
    try:
        yield
        signals.check()
        state["state"] = state_of(None)
    except Stopped as error:
        state["state"] = state_of(error)
        raise


def _sinks(
    job: JobSpec,
    folder: Path,
    texts: Mapping[str, str],
    sizes: Mapping[str, int] | None,
) -> contextlib.AbstractContextManager[list[Sink]]:
    return open_sinks(
        job.config.runner.sinks,
        folder,
        _console(job),
        sizes,
        yaml.safe_load(texts[CONFIG]),
    )


def _shown(
    job: JobSpec, display: Display, signals: Signals
) -> contextlib.AbstractContextManager[object]:
    if "console" in job.config.runner.sinks:
        return display.shown(signals)
    return contextlib.nullcontext()


def _cluster(job: JobSpec, folder: Path) -> Cluster:
    cluster = job.config.cluster
    topology = job.plan.topology
    shared = {
        node.rank: job.case.ledger().shared_bytes(node.rank) for node in topology.nodes
    }
    return Cluster.from_config(
        cluster,
        topology,
        shared_bytes=shared,
        tell=lambda line: _tell(fitted(line, 4)),
        workers=job.workers.values(),
        output=folder / LOGS,
        variables=variables_of(job.config, job.job.variables(job.config)),
    )


def _tell(line: object) -> None:
    print(line, flush=True)


def _console(job: JobSpec) -> Console:
    return job.job.console(job.config, job.plan)


@contextlib.contextmanager
def _watched(
    job: JobSpec,
    cluster: Cluster,
    groups: Mapping[str, WorkerGroup],
    channels: Mapping[str, Channel],
) -> Iterator[None]:
    """Return a context manager in which stalled channels are reported, and workers that do not answer are detected.

    `groups`: component -> its workers. Workers that are threads of this process are not checked.
    """
    stall_s = job.config.runner.watchdog_s
    heartbeat_s = job.config.faults.heartbeat_s
    with ExitStack() as watching:
        if stall_s:
            watching.enter_context(Watchdog(channels, stall_s=stall_s))
        if heartbeat_s and cluster.restarts_workers:
            watching.enter_context(Heartbeat(tuple(groups.values()), heartbeat_s))
        yield


@contextlib.contextmanager
def _naming_lost_nodes(
    job: JobSpec,
    cluster: Cluster,
    history: History,
    newest: Callable[[], Path],
    loop: Loop | None = None,
    groups: Collection[WorkerGroup] = (),
) -> Iterator[None]:
    """Return a context manager that replaces an error by NodeLost, if the run was ready and has lost nodes.

    An error after the death of a process of Ray is replaced by RayDied.

    `newest`: returns the folder of the newest checkpoint. `loop`: the running loop; None before the loop exists.
    `groups`: the launched worker groups.
    """
    try:
        yield
    except RlplaceError as error:
        if isinstance(error, RayDied):
            raise
        if (died := cluster.ray_died()) is not None:
            raise died from error
        if history.ready_s is None or not (lost := cluster.lost_nodes()):
            raise
        failed_at_s = first_failure_s(groups)
        under_way_s = (
            0.0 if loop is None or loop.began_s is None else failed_at_s - loop.began_s
        )
        raise _node_lost(
            job, history, lost, error, failed_at_s, under_way_s, newest()
        ) from error


def _node_lost(
    job: JobSpec,
    history: History,
    lost: Mapping[int, str],
    error: RlplaceError,
    failed_at_s: float,
    under_way_s: float,
    folder: Path,
) -> NodeLost:
    """Return the error NodeLost, and record the fault in `history`, in case the run continues.

    `lost`: node rank -> address. `error`: the error that the loss has caused. `failed_at_s`: time of the failure by
    `time.monotonic`. `under_way_s`: seconds from the start of the iteration to the failure. `folder`: folder of the
    newest checkpoint.
    """
    placement = job.plan.placement
    workers = [
        slot.owner
        for c in placement.components
        for slot in placement.slots(c)
        if slot.node in lost
    ]
    nodes = ", ".join(f"node {rank} ({host})" for rank, host in lost.items())
    first = str(error).partition("\n")[0]
    history.lose(
        Fault(
            at_s=history.since_ready_s - (time.monotonic() - failed_at_s),
            iteration=job.progress.iterations,
            stage=(error.stage if isinstance(error, WorkerError) else None) or "sync",
            what=f"{nodes} was lost with {', '.join(workers)}",
            why=first,
            replaced=(),
            redone_s=job.progress.train_s + under_way_s,
            recovery_s=0.0,
            went_back=True,
        )
    )
    problem = codes.problem(
        "node-lost", nodes, ", ".join(workers), error="run", first=first
    )
    return NodeLost(problem, frozenset(lost), folder)


def _loaded(
    loop: Loop, saving: Saving, resumed: Checkpoint
) -> Mapping[str, int] | None:
    """Make the workers load the checkpoint `resumed`.

    If a worker with state is lost meanwhile, take the run back to its newest checkpoint, which loads state again.
    Return None if this was not necessary; else return metric file -> its size in bytes at the time of the newest
    checkpoint.
    """
    try:
        print(
            f"continues after iteration {resumed.iteration}{saving.load(resumed)}",
            flush=True,
        )
    except StateLost:
        return _went_back(loop, saving)
    return None


def _went_back(loop: Loop, saving: Saving) -> Mapping[str, int]:
    """Take the run back to its newest checkpoint, or to its start if it has no checkpoint.

    Return metric file -> its size in bytes at that point of the run.
    """
    assert loop.recovery is not None, (
        "without it, no state is lost for the run to outlast"
    )
    while True:
        with contextlib.suppress(StateLost):
            return saving.go_back(loop.recovery)


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


def _policies(job: JobSpec, folder: Path) -> Mapping[str, Path]:
    """Return component -> path at which the component's model is saved. `folder`: the folder of the run."""
    return job.job.saved_models(job.config, job.plan, folder)


def _policy(policies: Mapping[str, Path] | None) -> str | None:
    """Return the path of the trained policy; None without a saved model.

    The policy is the actor's model, or the first saved model if the actor has none. `policies`: component -> path of
    its saved model; None: nothing is saved.
    """
    if not policies:
        return None
    return str(policies.get("actor") or next(iter(policies.values())))


def _report(
    job: JobSpec,
    folder: Path,
    ended: dict[str, Any],
    loop: Loop,
    observed: Observations,
    *,
    whole: bool,
) -> None:
    """Write the measurements, the summary and the pictures of a run into its folder, and print the summary.

    `ended`: the entries of the summary so far. `observed`: the measured calls of the iterations. `whole`: whether the
    run has reached its end; only then the measured seconds are compared with the predicted seconds.
    """
    usage = loop.usage
    held = loop.memory.held
    placement = job.plan.placement
    ended["memory"] = compare_memory(job.case.ledger(), held)
    ended["utilisation"] = usage.record(
        count_active(placement, job.plan.schedule.needs)
    )
    ended |= {"machine": machine(), "versions": versions()}
    ranks = {name: placement.world_size(name) for name in placement.components}
    sizes = record_measurements(held, ranks)
    write_whole(folder / "memory.json", json.dumps(sizes, indent=1) + "\n")
    write_whole(folder / "summary.json", json.dumps(ended, indent=1) + "\n")
    measured = observed.measured()
    if measured:
        profile = observed.profile()
        write_whole(folder / PROFILE, json.dumps(profile.record(), indent=1) + "\n")
        if whole:
            predicted = job.performance.compared(
                profile, job.given, measured, observed.machine_load.others
            )
            if predicted is not None:
                ended["predicted"] = predicted
                text = json.dumps(ended, indent=1) + "\n"
                write_whole(folder / "summary.json", text)
    print(summary_text(ended), flush=True)
    for page in pages(folder):
        # The last word of a command is a path; an address is one word
        command, _, last = page.rpartition(" ")
        head = f"curves     {command}" if command else "curves    "
        joined = " \\" if command else ""
        _tell(with_whole_word(head, last, indent=11, joined=joined))
    if iterations := list(loop.log.iterations):
        try:
            picture = render_timeline(
                iterations, usage.accelerators, placement.components
            )
            write_whole(folder / "timeline.svg", picture)
            write_whole(folder / "trace.json", render_trace(iterations))
            write_whole(folder / "report.html", render_report(read_run(folder)))
        except (
            OutputError,
            ConfigError,
        ) as error:  # missing pictures do not make the run fail
            _tell(error)


# A number that is not part of a name (Hopper-v5) or a key (rewards[0])
_NUMBER = re.compile(r"(?<![\w\[.-])-?\d+(\.\d+)?(e[+-]?\d+)?(?![\w\]])")


def new_remarks(lines: Iterable[str], said: set[str]) -> list[str]:
    """Return the lines that are not in `said` yet, and add them to `said`.

    Lines that differ only in numbers count as equal, since each stage group, rank and iteration measures other numbers.
    """
    found: list[str] = []
    for line in lines:
        remark = _NUMBER.sub("#", line)
        if remark not in said:
            said.add(remark)
            found.append(line)
    return found


def _train(
    job: JobSpec,
    cluster: Cluster,
    loop: Loop,
    sinks: Sequence[Sink],
    callbacks: Callbacks,
    saving: Saving,
    signals: Signals,
    observed: Observations,
) -> None:
    """Run iterations until the last iteration, the goal or a signal, with evaluations on held-out data in between.

    A policy version is evaluated before it is saved, and its evaluation is in the line of metrics of the iteration that
    made it. The version from which a command starts has a line of its own, unless an earlier command has evaluated it.

    `sinks`: receive the metrics of each iteration. `observed`: receives the seconds of each iteration that does not
    follow an evaluation.
    """
    config = job.config
    progress = job.progress
    runner = config.runner
    remarked: set[str] = set()
    first = progress.iterations
    is_open = isinstance(config, OpenConfig)

    def remark(numbers: Mapping[str, float]) -> None:
        for line in new_remarks(job.job.remarks(numbers, loop.notes), remarked):
            _tell(line)

    def evaluate() -> dict[str, float]:
        """Evaluate the present version, and return the metrics."""
        numbers = loop.evaluate(progress.iterations)
        progress.add_evaluation(numbers, version=progress.iterations)
        remark(numbers)
        return numbers

    def show(numbers: Mapping[str, float], samples: Sequence[Any] = ()) -> None:
        for sink in sinks:
            if samples and (takes := getattr(sink, "samples", None)):
                takes(progress.iterations, samples)
            sink(progress.iterations, progress.steps, numbers)

    if _evaluates_now(job, signals, ends=_ends(job)):
        numbers = evaluate()
        show(numbers | {"policy/version": float(progress.iterations)})
    while not signals.asked and not _ends(job):
        cluster.check(idle=True)
        at = progress.iterations
        # An iteration whose first stages ran in an evaluation is not typical, so it is no observation.
        typical = not loop.has_begun
        numbers = loop.iteration(at)
        if typical:
            observed.add(loop.log.iterations[-1], numbers)
        job.job.count(config, progress, numbers)
        progress.add_skipped(numbers, loop.notes, iteration=at + 1)
        if warning := progress.watch.add(numbers, progress.iterations):
            _tell(f"warning: {warning.render()}")
        remark(numbers)
        samples = [json.loads(note) for note in loop.notes.get("actor/samples", ())]
        evaluated = _evaluates_now(job, signals, ends=_ends(job))
        try:
            if evaluated:
                numbers |= evaluate()
        finally:
            # A failed evaluation does not take the line of its iteration with it.
            show(numbers, samples)
        stopped = callbacks.on_iteration(progress.iterations, progress.steps, numbers)
        if stopped and not evaluated and _evaluates_now(job, signals, ends=True):
            show(evaluate() | {"policy/version": float(progress.iterations)})
        saving.after_iteration(best=progress.best_version == progress.iterations)
        # Typed jobs count these bytes by formulas
        if is_open and progress.iterations - first in _MEASURED_AFTER:
            loop.measure_memory()
        if stopped:
            break
    if not signals.asked:
        if progress.reached_eval(runner.stop_at_eval):
            _tell(f"stopped: the evaluation has reached {runner.stop_at_eval:g}")
        elif _lost_patience(job):
            _tell(
                f"stopped: no gain in {runner.eval_patience} evaluations; "
                f"the best is of version {progress.best_version}"
            )


def _ends(job: JobSpec) -> bool:
    """Return whether the run has its last iteration, or has reached a goal."""
    runner = job.config.runner
    progress = job.progress
    return (
        progress.iterations >= runner.total_iterations
        or progress.reached(runner.stop_at_return)
        or progress.reached_eval(runner.stop_at_eval)
        or _lost_patience(job)
    )


def _lost_patience(job: JobSpec) -> bool:
    """Return whether as many evaluations have brought no gain as the config allows."""
    patience = job.config.runner.eval_patience
    return 0 < patience <= job.progress.evaluations_without_gain()


def _evaluates_now(job: JobSpec, signals: Signals, *, ends: bool) -> bool:
    """Return whether the present policy version is to be evaluated: every few iterations, and the last version.

    A version is evaluated once. After a signal, none is. `ends`: whether no iteration follows.
    """
    every = job.job.evaluates_every(job.config)
    version = job.progress.iterations
    if not every or signals.asked or version in job.progress.evaluations:
        return False
    return ends or version % every == 0


def launch(cluster: Cluster, job: JobSpec) -> dict[str, WorkerGroup]:
    """Launch all worker groups of the plan together, with its channels. Return component -> its group."""
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
    return cluster.launch_all(builders)


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


def make_folder(parent: Path) -> Path:
    """Make a folder below `parent`, named by date and time, and return it. Raises OutputError.

    A second folder within the same second gets a number behind its name.
    """
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = parent / stamp
        more = itertools.count(1)
        while True:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
            folder = parent / f"{stamp}.{next(more)}"
    except OSError as error:
        raise OutputError.of(parent, error) from error


def write_whole(file: Path, text: str) -> None:
    """Replace the content of a file by `text`, completely or not at all. Raises OutputError."""
    try:
        checkpoints.write_whole(file, text)
    except OSError as error:
        raise OutputError.of(file, error) from error
