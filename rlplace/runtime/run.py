"""Execute the plan of a job: create the run's folder, launch workers, run iterations, write the summary."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import shlex
import shutil
import time
import traceback
from collections.abc import (
    Callable,
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
from rlplace.codes import problem
from rlplace.comm.watchdog import view
from rlplace.config.compose import override
from rlplace.config.keys import PLACEMENT
from rlplace.config.open_job import OpenConfig
from rlplace.config.worker_variables import THREADS, exported, not_given, variables_of
from rlplace.config.yaml_text import show
from rlplace.contract.registry import saved_mapping
from rlplace.errors import (
    ClusterError,
    ConfigError,
    NodeLost,
    OutputError,
    ProblemsError,
    RayDied,
    RlplaceError,
    Source,
    WorkerError,
)
from rlplace.execution.faults import Fault, History, StateLost, faults_of
from rlplace.execution.lease import Lease
from rlplace.extras import versions_of
from rlplace.foresight.known import FILE as PROFILE
from rlplace.foresight.observe import machine, versions
from rlplace.placement.counts import count_active
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
from rlplace.runtime.changes import PlannedChange, differing, plan_request
from rlplace.runtime.draining import node_named, nodes_of, plan_without, refused
from rlplace.runtime.inputs import INPUTS
from rlplace.runtime.launched import (
    JobSpec,
    Launched,
    job_spec,
    launched,
    loaded,
    slots_of,
    watched,
    went_back,
    with_state,
)
from rlplace.runtime.pilot import Pilot
from rlplace.runtime.prepare import Prepared, prepare
from rlplace.runtime.replace import Change, PlanFrom, Replacing, Saved, holding
from rlplace.runtime.requests import Request, Requests
from rlplace.signals import Signals, Stopped
from rlplace.tables import with_whole_word
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.devices import AccountOfRuns
from rlplace.workers.launch.group import WorkerGroup, first_failure_s

LOGS = "logs"  # folder of worker output, in the run's folder
# Iterations of a command after which components that never move report their bytes
_MEASURED_AFTER = (1, 2, 4, 8)
_LOOK_S = 5.0  # between two looks for machines that have joined the cluster
ERROR = "error.txt"  # file with the error that ended the run, if one did


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
    changes: Sequence[PlannedChange] = (),
) -> Path:
    """Train until the last iteration, the goal, or a signal. Return the run's folder.

    `report`: the plan as it is written into the folder. `resolved`: the composed config. `signals`: the signals that
    can end the run; None: no signal is handled. `resumed`: the checkpoint to continue from, in the folder of its run;
    None: a new run in a new folder. `history`: earlier faults of this run, if the run continues after NodeLost.
    `command`: the typed command, which is written into the folder. `on_iteration`: functions that are called after
    each iteration; if one of them returns True, the run ends. `changes`: changes of the placement during the run.

    The last printed line says where the trained policy is; if an error is raised, this text is added to the error as a
    note instead. Raises ClusterError before the training starts, WorkerError if a worker fails, NodeLost if machines
    are lost, and Stopped after a signal. When the function ends, all processes of the run have ended.
    """
    folder = (
        make_folder(Path(job.config.runner.output_dir) / report.name)
        if resumed is None
        else resumed.run
    )
    plans = _plans(job, report, changes)
    start = holding(plans, 0 if resumed is None else resumed.iteration)
    with lock(folder) as not_locked:
        if not_locked is not None:
            _tell(not_locked.render())
        # Sizes and hashes of data, models and code, which a resume compares
        read = inputs.inputs_of(resolved, job.workers)
        if read:
            _tell(f"read by the run, and compared at a resume: {inputs.shown(read)}")
        config = saved_mapping(resolved)
        texts = {
            CONFIG: yaml.safe_dump(config, sort_keys=False),
            INPUTS: inputs.written(read),
        }
        for name, text in texts.items():
            write_whole(folder / name, text)
        _write_plan(folder, start.view)
        if command is not None:
            _keep(command, folder, job)
        (folder / ERROR).unlink(missing_ok=True)
        try:
            with _exported(job):
                _run(
                    plans,
                    start,
                    _pilot(start, resolved, folder),
                    folder,
                    texts,
                    config,
                    resolved,
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


def _plans(
    job: JobSpec, view: PlanView, changes: Sequence[PlannedChange]
) -> list[PlanFrom]:
    """Return the plans of a run in the order of iterations. `view`: the first plan as it is shown."""
    plans = [PlanFrom(after=0, job=job, view=view)]
    for change in changes:
        plans.append(plan_from(change, job.progress))
    return plans


def plan_from(change: PlannedChange, progress: Progress) -> PlanFrom:
    """Return the plan of a change as a plan of a run. `progress`: that of the run, in which all its plans count."""
    prepared = change.job
    spec = job_spec(prepared.config, prepared.plan)
    spec = dataclasses.replace(spec, progress=progress)
    return PlanFrom(after=change.after, job=spec, view=prepared.view)


def _texts_of(plan: PlanFrom, texts: Mapping[str, str]) -> dict[str, str]:
    """Return `texts`, file name -> text, with the plan that a checkpoint of these iterations keeps."""
    return {**texts, PLAN: json.dumps(render_json(plan.view), indent=1) + "\n"}


def _pilot(start: PlanFrom, resolved: Mapping[str, Any], folder: Path) -> Pilot | None:
    """Return the pilot of a run; None if nothing is to search beside it. `resolved`: the composed config."""
    if start.job.config.cluster.elastic.mode == "off":
        return None
    return Pilot(start.job, start.view, resolved, folder, _tell)


def _write_plan(folder: Path, view: PlanView) -> None:
    """Write a plan into the run's folder as text, as a picture and as JSON. Raises OutputError."""
    write_whole(folder / PLAN, json.dumps(render_json(view), indent=1) + "\n")
    write_whole(folder / "plan.txt", render_text(view) + "\n")
    write_whole(folder / "plan.svg", render_svg(view))


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
    plans: Sequence[PlanFrom],
    start: PlanFrom,
    pilot: Pilot | None,
    folder: Path,
    texts: Mapping[str, str],
    config: Mapping[str, Any],
    resolved: Mapping[str, Any],
    signals: Signals,
    resumed: Checkpoint | None,
    history: History,
    on_iteration: Sequence[OnIteration],
) -> None:
    """Run the iterations of a job, and write its summary.

    `plans`: the plans of the run. `start`: the one that holds now. `pilot`: searches for others; None: nothing does.
    `folder`: the run's folder. `texts`: file name -> text that is written into each checkpoint. `config`: the config as
    it is saved. `resolved`: the composed config.
    """
    began = time.perf_counter()
    job = start.job
    runner = job.config.runner
    placement = job.plan.placement
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
        saved_config = yaml.safe_load(resumed.text(CONFIG))
        job = with_state(job, resumed, saved_config)
    callbacks = Callbacks(runner.callbacks, folder, config, on_iteration)
    display = Display(runner, _console(job), job.plan.schedule.active)
    lease = _lease(start)
    with (
        callbacks,
        _shown(job, display, signals),
        # Given back once all workers have ended
        contextlib.closing(lease) if lease else contextlib.nullcontext(),
        _cluster(plans, folder, lease) as cluster,
        ExitStack() as opened,
        contextlib.closing(pilot) if pilot else contextlib.nullcontext(),
    ):
        driver = _Driver(
            plans=plans,
            plan=start,
            folder=folder,
            texts=texts,
            config=config,
            mapping=resolved,
            requests=Requests(folder),
            signals=signals,
            history=history,
            cluster=cluster,
            display=display,
            callbacks=callbacks,
            opened=opened,
            replacing=Replacing(cluster, folder, config, history),
            pilot=pilot,
            lease=lease,
        )
        driver.open_sinks(before.get("files"))
        with driver.naming_lost_nodes(resumed.folder if resumed else folder):
            driver.launch(job, resumed)
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
        driver.show()
        # Component -> saved model; None until the models are saved.
        policies: Mapping[str, Path] | None = None
        state = _not_ended(progress)
        patience_s = (
            job.config.checkpoint.grace_s if job.config.checkpoint.on_signal else 0.0
        )
        try:
            with (
                _noted(state, signals),
                signals.patient(patience_s),
                driver.naming_lost_nodes(folder),
            ):
                try:
                    policies = driver.go()
                except (RlplaceError, Stopped) as error:
                    if isinstance(error, RayDied):
                        _tell(
                            f"{error.problem.key}: {error.problem.what}; saves, and ends"
                        )
                    if not signals.at_once:
                        ending = isinstance(error, RayDied) and not error.calls_go_on
                        driver.now.saving.rescue(ending=ending)
                    raise
        finally:
            display.close()
            _report(driver, state, policies)
            callbacks.on_end(state["state"])
        driver.now.saving.require_last()


@dataclasses.dataclass(slots=True, kw_only=True)
class _Driver:
    """What a run keeps while its placement changes, and the plan that is launched now.

    `plans`: all plans of the run, in the order of iterations. `plan`: the present one. `folder`: the run's folder.
    `texts`: file name -> text that is written into each checkpoint. `config`: the config as it is saved. `opened`:
    holds the open sinks. `replacing`: replaces the launched plan. `pilot`: searches for other plans; None: nothing
    does. `sinks`: receive the metrics of each iteration. `changes`: the changes so far. `passed`: plans that were given
    up. `remarked`: remarks of the job that were printed.
    `mapping`: the composed config, from which other plans are made. `requests`: requests of other processes to change
    the placement. `requested`: the plan of the request that was taken and not answered yet. `draining`: the node that
    it empties. `drained`: nodes that were emptied -> overrides with the places before. `nodes`: what became of nodes,
    for summary.json. `joined`: addresses of machines that were told of. `looked_s`: when machines were looked for.
    `lease`: of accelerators that other runs use in turns; None: there are none.
    """

    plans: Sequence[PlanFrom]
    plan: PlanFrom
    folder: Path
    texts: Mapping[str, str]
    config: Mapping[str, Any]
    mapping: Mapping[str, Any]
    requests: Requests
    signals: Signals
    history: History
    cluster: Cluster
    display: Display
    callbacks: Callbacks
    opened: ExitStack
    replacing: Replacing
    pilot: Pilot | None
    lease: Lease | None
    sinks: Sequence[Sink] = ()
    changes: list[Change] = dataclasses.field(default_factory=list)
    passed: list[PlanFrom] = dataclasses.field(default_factory=list)
    remarked: set[str] = dataclasses.field(default_factory=set)
    launched: Launched | None = None
    requested: PlanFrom | None = None
    draining: int | None = None
    drained: dict[int, str] = dataclasses.field(default_factory=dict)
    nodes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    joined: set[str] = dataclasses.field(default_factory=set)
    looked_s: float = 0.0

    @property
    def now(self) -> Launched:
        """What is launched now."""
        assert self.launched is not None, "launch comes first"
        return self.launched

    @property
    def progress(self) -> Progress:
        return self.plan.job.progress

    def open_sinks(self, sizes: Mapping[str, int] | None) -> None:
        """Open the sinks; earlier ones are closed. `sizes`: metric file -> its size to which it is cut; None: a new
        run.
        """
        self.opened.close()
        sinks = self.opened.enter_context(
            open_sinks(
                self.plan.job.config.runner.sinks,
                self.folder,
                _console(self.plan.job),
                sizes,
                self.config,
            )
        )
        self.sinks = [*sinks, self.display]

    def launch(self, job: JobSpec, resumed: Checkpoint | None) -> None:
        """Launch the first plan of this command, and load the state of the checkpoint `resumed`.

        `job`: the job with the arguments of workers that continue from `resumed`.
        """
        if len(self.plans) > 1:
            # The accelerators of all plans, since others may take what is free
            self.cluster.reserve(
                [slot for plan in self.plans for slot in slots_of(plan.job.plan)]
            )
        if self.pilot is not None and self.pilot.changes:
            # A later plan may use any accelerator
            self.cluster.reserve()
        texts = _texts_of(self.plan, self.texts)
        if self.lease is not None:
            # Ray starts meanwhile, but no worker does
            self.cluster.start()
            self.lease.take_all("start")
        now = launched(self.cluster, job, self.folder, texts, self.history)
        now.loop.lease = self.lease
        self.launched = now
        now.loop.started(self.cluster.start_s)
        if self.pilot is not None:
            self.pilot.started(self.cluster.start_s)
        if resumed is not None and (sizes := loaded(now, resumed)):
            self.open_sinks(sizes)

    def show(self) -> None:
        """Show the state of the loop and the channels on the terminal."""
        now = self.now
        active = now.job.plan.schedule.active
        self.display.watch(now.loop, now.channels, self.progress.iterations, active)

    def go(self) -> Mapping[str, Path]:
        """Train to the end, and save the models. Return component -> its saved model."""
        while True:
            now = self.now
            try:
                with watched(self.cluster, now):
                    due = self._train()
                    if due is None:
                        now.saving.last()
                        saved = _policies(now.job, self.folder)
                        now.loop.save(saved)
                        return saved
                    differences = differing(self.plan.job.plan, due.job.plan)
                    if not differences:
                        # The change before was given up, and this one takes it back
                        self.plan = due
                        continue
                    change = Change(after=self.progress.iterations, moved=differences)
                    _tell(f"changing the placement: {change.moves}")
                    state = self.replacing.save(now, due, change)
                self._change(due, state, change)
            except StateLost:
                self.open_sinks(went_back(self.now))

    def _change(self, due: PlanFrom, saved: Saved | None, change: Change) -> None:
        """Replace the launched plan by the plan `due`, with the `saved` state; keep it if that is not possible."""
        self.changes.append(change)
        if saved is not None:
            self.display.rest()
            texts = {plan: _texts_of(plan, self.texts) for plan in (self.plan, due)}
            before = self.now
            # Its channels end now, whatever comes after
            self.launched = dataclasses.replace(before, channels={})
            now, sizes = self.replacing.replace(
                before, self.plan, due, saved, texts, change
            )
            self.launched = now
            if sizes is not None:
                self.open_sinks(sizes)
            now.loop.continue_metrics(before.loop)
            now.loop.changed(change.seconds)
        # A plan that the run has had is not due again if it returns to a checkpoint before
        self.passed.append(due)
        before_plan = self.plan.job.plan
        if not change.kept:
            _write_plan(self.folder, due.view)
            self.plan = due
        _tell(change)
        if due is self.requested:
            self._answer_change(change, before_plan)
        self.show()
        if self.pilot is not None:
            self.pilot.changed(change)

    def _answer_change(self, change: Change, before: Plan) -> None:
        """Answer the request for a change that was made, or not. A node that it has emptied is left.

        `before`: the plan before the change.
        """
        self.requested = None
        node = self.draining
        self.draining = None
        text = str(change)
        if node is not None and not change.kept:
            text += f"\n{self._leave(node, before, change)}"
        self.requests.answer("failed" if change.kept else "changed", text)

    def _due(self) -> PlanFrom | None:
        """Return the plan that is to replace the present one before the next iteration; None if there is none."""
        self._look_for_machines()
        if self.pilot is not None:
            chosen = self.pilot.due(self.now, self.plan)
            if chosen is not None:
                return chosen
        holds = holding(self.plans, self.progress.iterations)
        # After a return to an earlier checkpoint, the present plan stays
        if holds.after > self.plan.after and holds not in self.passed:
            without = nodes_of(holds.job) & self.drained.keys()
            if not without:
                return holds
            self.passed.append(holds)
            _tell(
                f"the change after iteration {holds.after} is left out: node {min(without)} was drained"
            )
        return self._requested()

    def _requested(self) -> PlanFrom | None:
        """Take a request to change the placement, if one waits, and return its plan. A request that cannot be planned
        is refused.
        """
        # The first iteration shows that the job runs at all
        if self.progress.iterations == 0:
            return None
        if self.requested is not None:
            # State was lost before the change was made, and the run has gone back
            return self.requested
        request = self.requests.take()
        if request is None:
            return None
        if self.lease is not None:
            self.requests.answer(
                "refused", "another run uses these accelerators in turns with this one"
            )
            return None
        try:
            self.requested = self._planned_for(request)
        except (ProblemsError, ClusterError) as error:
            _tell(f"a request is refused:\n{error}")
            self.requests.answer("refused", str(error))
        return self.requested

    def _planned_for(self, request: Request) -> PlanFrom | None:
        """Return the plan that a request asks for; None if it was answered without a change.

        Raises the errors of `planned`, and ConfigError if a node cannot be emptied or used again.
        """
        if request.releases:
            self.requests.answer("changed", self._release(request.releases))
            return None
        if not request.drains:
            return self.planned(request.places)
        nodes = self.cluster.nodes()
        node = node_named(request.drains, nodes, self.folder)
        if node == self.cluster.driver_node():
            raise refused("driver", node, self.folder)
        if node in self.drained:
            raise refused("already", node, self.folder)
        now = self.plan.job
        if node not in nodes_of(now):
            self.requests.answer("changed", self._leave(node, now.plan, None))
            return None
        plan = plan_without(
            now.plan, node, self.drained.keys(), self.folder, self.planned
        )
        self.draining = node
        return plan

    # ── nodes that leave and join ────────────────────────────────────────────────────────────────────────────────────

    def _leave(self, node: int, before: Plan, change: Change | None) -> str:
        """Leave a node on which no worker is left, and return a text about it.

        `before`: the plan before the change that has emptied it. `change`: None if nothing was there.
        """
        address = self.cluster.nodes()[node]
        self.cluster.leave(node)
        places = before.placement.canonical()
        moved = () if change is None else change.moved
        words = [override(f"{PLACEMENT}.{name}", places[name]) for name in moved]
        self.drained[node] = " ".join(words)
        self._note_node("drained", node, address)
        text = f"node {node} ({address}) is empty, and may leave"
        _tell(text)
        return text

    def _release(self, name: str) -> str:
        """Use a node again that was drained, and return a text about it. `name`: its number, or its address.

        Raises ConfigError if it was not drained, or if no machine is there for it.
        """
        node = node_named(name, self.cluster.nodes(), self.folder)
        if node not in self.drained:
            raise refused("not-drained", node, self.folder)
        address = self.cluster.return_to(node)
        if address is None:
            ray_address = self.plan.job.config.cluster.ray.address
            raise refused("no-machine", node, self.folder, address=ray_address)
        words = self.drained.pop(node)
        self._note_node("released", node, address)
        text = f"node {node} ({address}) may be used again"
        if words:
            text += f": rlplace replace {shlex.quote(str(self.folder))} {words}"
        _tell(text)
        return text

    def _note_node(self, event: str, node: int | None, address: str) -> None:
        """Note what became of a node, for summary.json. `node`: its number; None: it has none."""
        self.nodes.append(
            {
                "event": event,
                "node": node,
                "address": address,
                "after": self.progress.iterations,
            }
        )
        if self.pilot is not None:
            self.pilot.barred = frozenset(self.drained)

    def _look_for_machines(self) -> None:
        """Tell of machines that have joined the cluster, each once."""
        now_s = time.monotonic()
        if now_s - self.looked_s < _LOOK_S:
            return
        self.looked_s = now_s
        for address in self.cluster.joined():
            if address in self.joined:
                continue
            self.joined.add(address)
            self._note_node("joined", None, address)
            count = len(self.cluster.nodes()) + 1
            uses = f"a run that is resumed with cluster.num_nodes={count} would use it"
            if self.drained:
                folder = shlex.quote(str(self.folder))
                uses = (
                    f"rlplace drain {folder} {min(self.drained)} --release would use it"
                )
            _tell(f"machine {address} has joined: {uses}")

    def planned(self, places: Mapping[str, object]) -> PlanFrom:
        """Plan a change of the placement after the present iteration, and return it as a plan of the run.

        Nothing has moved yet. `places`: component -> its place; all others stay where they are. Raises ConfigError,
        PlacementError or ClusterError if it cannot be planned or does not fit into memory, or if accelerators are not
        free.
        """
        now = self.plan
        iterations = self.progress.iterations

        def preparing(
            mapping: Mapping[str, Any], sources: Mapping[str, Source]
        ) -> Prepared:
            topology = now.job.plan.topology
            return prepare(
                mapping, name=now.view.name, sources=sources, topology=topology
            )

        change = plan_request(
            places, now.job.config, now.job.plan, self.mapping, iterations, preparing
        )
        plan = plan_from(change, self.progress)
        slots = slots_of(plan.job.plan)
        if without := nodes_of(plan.job) & self.drained.keys():
            left = problem(
                "bad-change",
                PLACEMENT,
                show(dict(places)),
                error="drained",
                node=min(without),
                run=shlex.quote(str(self.folder)),
            )
            raise ConfigError([left])
        if not self.cluster.reserve_more(slots):
            used = sorted({number for slot in slots for number in slot.accelerators})
            lacking = problem(
                "bad-change",
                PLACEMENT,
                show(dict(places)),
                error="not-free",
                accelerators=", ".join(map(str, used)),
            )
            raise ConfigError([lacking])
        later = [each for each in self.plans if each.after > iterations]
        before = [each for each in self.plans if each.after <= iterations]
        self.plans = [*before, plan, *later]
        return plan

    def _train(self) -> PlanFrom | None:
        """Run iterations until the placement has to change; return the next plan. Return None at the end of the run."""
        return _train(
            self.now,
            self.cluster,
            self.sinks,
            self.callbacks,
            self.signals,
            self.remarked,
            self._due,
        )

    @contextlib.contextmanager
    def naming_lost_nodes(self, folder: Path) -> Iterator[None]:
        """Return a context manager that replaces an error by NodeLost, if the run was ready and has lost nodes.

        An error after the death of a process of Ray is replaced by RayDied. `folder`: folder of the checkpoint to
        continue from, if nothing is launched.
        """
        try:
            yield
        except RlplaceError as error:
            if isinstance(error, RayDied):
                raise
            if (died := self.cluster.ray_died()) is not None:
                raise died from error
            lost = {}
            if self.history.ready_s is not None:
                lost = self.cluster.lost_nodes()
            if not lost:
                raise
            under_way_s = 0.0
            groups: Sequence[WorkerGroup] = ()
            if self.launched is not None:
                folder = self.launched.saving.newest
                groups = tuple(self.launched.groups.values())
            failed_at_s = first_failure_s(groups)
            if self.launched is not None and self.launched.loop.began_s is not None:
                under_way_s = failed_at_s - self.launched.loop.began_s
            raise _node_lost(
                self.plan.job,
                self.history,
                lost,
                error,
                failed_at_s,
                under_way_s,
                folder,
            ) from error


def _not_ended(progress: Progress) -> dict[str, Any]:
    """Return the first entries of summary.json, which say that the run has failed.

    If the run does not fail, later entries replace these entries.
    """
    before = {"iterations": progress.iterations, "train_s": progress.train_s}
    return {"state": "failed"} | (
        {"before_resume": before} if progress.iterations else {}
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


def _shown(
    job: JobSpec, display: Display, signals: Signals
) -> contextlib.AbstractContextManager[object]:
    if "console" in job.config.runner.sinks:
        return display.shown(signals)
    return contextlib.nullcontext()


def _lease(plan: PlanFrom) -> Lease | None:
    """Return the lease of a run that other runs share accelerators with; None if there are none."""
    lease = Lease.from_environment()
    if lease is not None:
        placement = plan.job.plan.placement
        of = {c: placement.accelerators(c) for c in placement.components}
        lease.plan(
            plan.job.plan.schedule.accelerators(of), frozenset().union(*of.values())
        )
    return lease


def _cluster(plans: Sequence[PlanFrom], folder: Path, lease: Lease | None) -> Cluster:
    """Return the cluster on which all plans of a run are launched. `folder`: the run's folder. `lease`: of accelerators
    that other runs use, too; None: there are none.
    """
    job = plans[0].job
    topology = job.plan.topology
    ledgers = [plan.job.case.ledger() for plan in plans]
    shared = {
        node.rank: max(ledger.shared_bytes(node.rank) for ledger in ledgers)
        for node in topology.nodes
    }
    return Cluster.from_config(
        job.config.cluster,
        topology,
        shared_bytes=shared,
        tell=lambda line: _tell(fitted(line, 4)),
        workers=job.workers.values(),
        output=folder / LOGS,
        variables=variables_of(job.config, job.job.variables(job.config)),
        account=(
            None
            if lease is None
            else AccountOfRuns(folder=lease.account, run=lease.run)
        ),
        tried=job.job.large_modules(job.config, job.plan),
    )


def _tell(line: object) -> None:
    print(line, flush=True)


def _console(job: JobSpec) -> Console:
    return job.job.console(job.config, job.plan)


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
    driver: _Driver, state: Mapping[str, Any], policies: Mapping[str, Path] | None
) -> None:
    """Write the measurements, the summary and the pictures of a run into its folder, and print the summary.

    Memory, use of accelerators and calls are those with the last placement. `state`: the first entries of the summary.
    `policies`: component -> its saved model; None: the run has not reached its end, so measured seconds are not
    compared with predicted seconds.
    """
    now = driver.now
    job = now.job
    folder = driver.folder
    loop = now.loop
    observed = now.observed
    whole = policies is not None
    progress = job.progress
    ended: dict[str, Any] = (
        summary(progress, folder)
        | {"stages": list(dict.fromkeys(map(base_stage, job.plan.schedule.stages)))}
        | {"waits": waits_of(view(now.channels))}
        | dict(state)
        | now.saving.record()
    )
    if driver.changes:
        ended["changes"] = [change.record() for change in driver.changes]
    if driver.nodes:
        ended["nodes"] = driver.nodes
    if driver.pilot is not None:
        ended["elastic"] = driver.pilot.record()
    if loop.recovery is not None:
        ended["faults"] = faults_of(driver.history, train_s=progress.train_s)
    ended["policy"] = _policy(policies)
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
_NUMBER = re.compile(r"(?<![\w\[.-])-?\d+(,\d{3})*(\.\d+)?(e[+-]?\d+)?(?![\w\]])")


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
    now: Launched,
    cluster: Cluster,
    sinks: Sequence[Sink],
    callbacks: Callbacks,
    signals: Signals,
    remarked: set[str],
    due: Callable[[], PlanFrom | None],
) -> PlanFrom | None:
    """Run iterations until the last iteration, the goal or a signal, with evaluations on held-out data in between.

    A policy version is evaluated before it is saved, and its evaluation is in the line of metrics of the iteration that
    made it. The version from which a command starts has a line of its own, unless an earlier command has evaluated it.

    `now`: what is launched. `sinks`: receive the metrics of each iteration. `remarked`: remarks that were printed.
    `due`: returns the plan that is to replace the present one before the next iteration; None if there is none. Return
    such a plan; None at the end of the run.
    """
    job = now.job
    loop = now.loop
    saving = now.saving
    observed = now.observed
    config = job.config
    progress = job.progress
    runner = config.runner
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
        if (plan := due()) is not None:
            return plan
        at = progress.iterations
        # An iteration whose first stages ran in an evaluation is not typical, so it is no observation.
        typical = not loop.has_begun
        numbers = loop.iteration(at)
        if typical:
            observed.add(loop.log.iterations[-1], _of_this_run(numbers))
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
    return None


def _of_this_run(numbers: Mapping[str, float]) -> Mapping[str, float]:
    """Return the metrics of an iteration without the seconds in which it waited for accelerators of other runs."""
    waited_s = numbers.get("time/turns_s", 0.0)
    if not waited_s:
        return numbers
    return {**numbers, "time/iteration_s": numbers["time/iteration_s"] - waited_s}


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
