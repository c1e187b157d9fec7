"""The class `Job`: everything that the engine has to know about a job, as methods with working defaults.

A job declares components, stages and channels. With the defaults, it trains, offloads, recovers from faults, writes
checkpoints of its workers' state, and shows a timeline::

    job = Job(
        components={"actor": Learner, "env": Env, "rollout": Policy},
        stages=[
            Stage("sync", weights("actor", to="rollout")),
            Stage("rollout", full("env").calls("rollout"), full("rollout").calls("answer")),
            Stage("learn", full("actor").calls("learn")),
        ],
        channels=[Channel("observations", "env", "rollout"), Channel("samples", "env", "actor")],
    )
    run(job, "hybrid.yaml")

A subclass overrides methods for which the default does not suit. The jobs in `rlplace.jobs` override nearly all.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.checkpoints.find import folders_of
from rlplace.checks.rule import broken
from rlplace.codes import config_error
from rlplace.config.open_job import OpenConfig, read_open_config
from rlplace.contract import classes, rules
from rlplace.contract.planning import (
    channels_of,
    check_placed,
    memory_of,
    sources_on_devices,
    waste_of,
    weight_pairs,
)
from rlplace.contract.requests import Evaluation, EvaluationRequest, ExportRequest
from rlplace.contract.stages import (
    Channel,
    Stage,
    Work,
    needs_of_stages,
    steps_of_stage,
)
from rlplace.errors import Problem, Source, did_you_mean, suggestion
from rlplace.metrics import NOT_METRICS
from rlplace.placement.counts import Count
from rlplace.placement.flow import DeviceDelivery
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.ledger import Measurements, MemoryCase
from rlplace.placement.plan import Plan, Rules, plan_components
from rlplace.placement.schedule import Needs
from rlplace.places import place_of_caller
from rlplace.report.sinks import Column, Console
from rlplace.report.summary import Measures, Progress
from rlplace.trained import Trained
from rlplace.workers.facts import JobFacts, facts_of

if TYPE_CHECKING:
    from rlplace.workers.worker import Worker

_STAGE_COLUMNS = 6  # stages that the console has a column for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumeKeys:
    """Patterns of config keys by what their change means for a resumed run. Changes of all other keys are only told.

    `experiment`: it is another experiment, which is refused unless `resume_allow` names the key. `shapes`: the saved
    state cannot be loaded. `task`: `resume=auto` skips runs with other values.
    """

    experiment: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    task: tuple[str, ...] = ()


class Job:
    """A job: which components run, in which stages, and what the job saves and shows.

    `components`: name -> worker class. `stages`: in the order of an iteration. `channels`: queues between components.
    `name`: name of the folder that holds the job's runs. `score`: name of the metric that measures the success of an
    iteration, such as a mean return; "": the job has no such metric.
    """

    def __init__(
        self,
        *,
        components: Mapping[str, type[Worker]],
        stages: Sequence[Stage],
        channels: Sequence[Channel] = (),
        name: str = "job",
        score: str = "",
    ) -> None:
        self.components = dict(components)
        self.stages = tuple(stages)
        self.channels = tuple(channels)
        self.name = name
        self.score = score
        # File and line at which the user's code creates the job
        self.place = place_of_caller()

    # ── its config ───────────────────────────────────────────────────────────────────────────────────────────────────

    def read(
        self, mapping: Mapping[str, Any], sources: Mapping[str, Source]
    ) -> tuple[Any | None, list[Problem]]:
        """Return (config, all problems of the config). The config is None if it cannot be read.

        `mapping`: the config as keys and values. `sources`: config key -> file and line in which its value is set.
        """
        config, problems = read_open_config(mapping, self, self.components, sources)
        return config, [*rules.of_job(self, _settings(config)), *problems]

    def completed(self, config: Any, sources: Mapping[str, Source]) -> Any:
        """Return the config, completed with the content of files that the config names, such as a model's config.json.

        `sources`: config key -> file and line in which its value is set. Raises ConfigError.
        """
        return config

    def key_of(self, config: Any, component: str) -> str:
        """Return the config key under which the settings of a component are, such as "reward.math"."""
        return component

    # ── its plan ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def needs(self, config: Any) -> Needs:
        """Return the stages of an iteration, and the least residency of each component in each stage."""
        return needs_of_stages(self.stages)

    def leaving(self, config: Any) -> Collection[str]:
        """Return the components with `enable_offload`, which leave accelerators while other components need them."""
        blocks: Mapping[str, Any] = config.components
        return [name for name, block in blocks.items() if block.enable_offload]

    def plan(
        self, config: Any, topology: Topology, sources: Mapping[str, Source]
    ) -> Plan:
        """Return the plan of a run: placement, residency by stage, channels and weight deliveries.

        `topology`: the machines. `sources`: config key -> file and line in which its value is set, for errors. Raises
        PlacementError.
        """
        plan = plan_components(
            config.cluster,
            topology,
            needs=self.needs(config),
            offload=self.leaving(config),
            sources=sources,
            rules=Rules(
                optional=(),
                check=functools.partial(check_placed, self.components),
                waste=waste_of,
            ),
        )
        facts = self.facts(config, plan)
        channels = channels_of(self.channels, plan.placement)
        sending = [sync.channel for sync in facts.syncs]
        copies = [copy for sync in facts.syncs for copy in sync.deliveries]
        return dataclasses.replace(
            plan,
            channels=(*channels, *sending),
            deliveries=tuple(copies),
            warnings=(*plan.warnings, *rules.order_warnings(self)),
        )

    def memory(
        self,
        config: Any,
        plan: Plan,
        measured: Measurements | None = None,
        *,
        build: bool = False,
        known: Any = None,
    ) -> MemoryCase:
        """Return the inputs of a plan's memory proof: the bytes of every component, declared, measured or unknown.

        `measured`: component -> residency -> bytes per accelerator, as an earlier run measured them; None: nothing was
        measured. `build`: whether the method may create an object that the config names, such as a simulator, to find
        out sizes. `known`: information from such an object if the caller has it, such as the spaces of the simulator.
        """
        return memory_of(config, plan, measured or {})

    def counts(self, config: Any, plan: Plan) -> tuple[Count, ...]:
        """Return numbers to show with the plan, such as samples for each rank, each with the reason for its value."""
        return ()

    # ── its checks ───────────────────────────────────────────────────────────────────────────────────────────────────

    def environment_problems(self, config: Any) -> Iterable[Problem]:
        """Return the problems of objects that the config names, such as an environment.

        These problems do not depend on the placement.
        """
        return ()

    def unplaced_problems(
        self, config: Any, sources: Mapping[str, Source]
    ) -> Iterable[Problem]:
        """Return the problems of blocks that nothing reads, since the components that they describe are not placed.

        `sources`: key -> file and line of its value.
        """
        return ()

    def plan_problems(self, config: Any, plan: Plan) -> Iterable[Problem]:
        """Return the problems for which a run of the plan would fail on any machine."""
        case = rules.PlannedJob(components=self.components, config=config, plan=plan)
        return broken(rules.PLANNED, case)

    def launch_problems(self, config: Any, plan: Plan) -> Iterable[Problem]:
        """Return a problem for each library or file that a run of the plan needs but this machine does not have."""
        return ()

    def dry_run_problems(self, config: Any, plan: Plan) -> Iterable[Problem]:
        """Create the objects that the driver would create before the workers start. Return the problems of doing so.

        A dry run calls this method, to find problems that only the creation shows.
        """
        return ()

    # ── its run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def workers(self, config: Any, plan: Plan) -> Mapping[str, type[Worker]]:
        """Return component -> worker class."""
        return self.components

    def arguments(self, config: Any, plan: Plan, case: MemoryCase) -> Mapping[str, Any]:
        """Return component -> the value that its workers get as `config`.

        `case`: the inputs of the plan's memory proof.
        """
        open_config: OpenConfig = config
        return {name: open_config.settings.get(name, {}) for name in self.components}

    def variables(self, config: Any) -> Collection[str]:
        """Return the names of environment variables that workers get from this process, besides `cluster.env_vars`.

        The value of each variable is copied from the driver to all workers.
        """
        return ()

    def large_modules(self, config: Any, plan: Plan) -> Sequence[str]:
        """Return the names of modules that import large libraries for the workers.

        A process on each node imports them once, if this starts no threads, and the workers are forks of it.
        """
        return ()

    def facts(self, config: Any, plan: Plan) -> JobFacts:
        """Return the number of ranks of each component, and the weight syncs. Every worker gets this information."""
        return facts_of(
            plan.placement,
            weights=weight_pairs(self.stages),
            on_devices=sources_on_devices(config),
            timeout_s=config.runner.channel_timeout_s,
        )

    def through_host(self, config: Any, plan: Plan) -> Collection[str]:
        """Return the config keys that are set to true if processes of this machine cannot share memory of GPUs.

        With these keys, all weights of `plan` that the config lets the engine decide on go through the host.
        """
        blocks: Mapping[str, Any] = config.components
        sources = dict.fromkeys(
            delivery.source
            for delivery in plan.deliveries
            if isinstance(delivery, DeviceDelivery)
        )
        return [
            f"{source}.through_host"
            for source in sources
            if blocks[source].through_host == "auto"
        ]

    def start_text(self, config: Any) -> str:
        """Return lines of text about what a new run begins with, such as the weights of another run; "" without any."""
        return ""

    def work(self, config: Any, needs: Needs) -> Work:
        """Return the calls of worker methods in each stage of an iteration.

        `needs`: the result of the method `needs` for this config.
        """
        arguments = classes.arguments_of(self)
        stages = {s.name: steps_of_stage(s, arguments) for s in self.stages}
        return Work(
            stages=stages,
            trains=classes.training_stages(self),
            collects=True,
        )

    def measures(self, config: Any) -> Measures:
        """Return the names of the metrics from which the summary of a run is made."""
        name = self.score.rpartition("/")[2]
        return Measures(score=self.score, score_name=name, steps="iterations")

    def console(self, config: Any, plan: Plan) -> Console:
        """Return the columns of the table that a run prints, with one line for each iteration."""
        columns = []
        if self.score:
            columns.append(Column(self.score.rpartition("/")[2], self.score, ".3f", 10))
        for stage in plan.schedule.stages[:_STAGE_COLUMNS]:
            title = f"{stage} s"
            metric = f"time/{stage.replace(' ', '_')}_s"
            columns.append(Column(title, metric, ".2f", max(8, len(title) + 2)))
        # Each iteration is one step.
        return Console("", tuple(columns))

    def evaluates_every(self, config: Any) -> int:
        """Return the number of iterations between two evaluations on held-out data; 0: the run does not evaluate."""
        return 0

    def count(self, config: Any, progress: Progress, numbers: dict[str, float]) -> None:
        """Add the metrics of one iteration to the progress of the run.

        `numbers`: metric -> value. The method may add derived metrics to `numbers`.
        """
        progress.add(numbers, 1)

    def remarks(
        self, numbers: Mapping[str, float], notes: Mapping[str, Sequence[str]]
    ) -> list[str]:
        """Return remarks, as lines of text, about the metrics of one iteration. A run prints each line only once.

        `numbers`: metric -> value. `notes`: metric -> lines of text that the workers have written about the metric.
        """
        found: list[str] = []
        for name, lines in notes.items():
            if name.endswith(f"/{NOT_METRICS}"):
                found += lines
        if self.score and self.score not in numbers:
            near = suggestion(did_you_mean(self.score, numbers))
            found.append(f"score: no metric is called {self.score!r}{near}")
        return found

    def replaceable(self, config: Any, plan: Plan) -> Collection[str]:
        """Return the names of the components with ranks that can be replaced without loading state.

        If a rank of such a component is lost, the rank is replaced and the iteration is repeated.
        """
        return [c for c in self.components if c not in self.stateful(config, plan)]

    def replaced_by_going_back(self, config: Any, plan: Plan) -> Collection[str]:
        """Return the components, out of `replaceable`, for which a lost rank takes the run back to a checkpoint.

        If a rank of such a component is lost, the rank is replaced and the run continues from its newest checkpoint.
        """
        return ()

    def performance_model(self) -> Any | None:
        """Return the `foresight.model.PerformanceModel` that predicts the seconds of the job; None: use the default."""
        return None

    # ── what it leaves ───────────────────────────────────────────────────────────────────────────────────────────────

    def stateful(self, config: Any, plan: Plan) -> tuple[str, ...]:
        """Return the names of the components with state that checkpoints save and load."""
        return classes.with_state(self)

    def optional_state(self, config: Any) -> Collection[str]:
        """Return the names of the components, out of `stateful`, that may be missing in a checkpoint.

        A component that is missing in the checkpoint of a resumed run starts without loading state.
        """
        return ()

    def loaded_text(self, numbers: Mapping[str, float], kept: Collection[str]) -> str:
        """Return a text about state that could not be loaded, such as unfinished episodes; "" if all was loaded.

        `numbers`: metrics that the workers returned from loading. `kept`: the components that have loaded state.
        """
        return ""

    def divided(self) -> Mapping[str, str]:
        """Return component -> a phrase about the division of work over its ranks, such as "prompts are dealt to".

        The result has the components for which a new number of ranks changes how a resumed run continues.
        """
        return dict.fromkeys(classes.with_state(self), "state is loaded by")

    def run_state(
        self, config: Any, arguments: Mapping[str, Any], iteration: int
    ) -> Mapping[str, Any]:
        """Return values that each checkpoint keeps beside the state of workers, for `resumed_arguments`.

        The values must be JSON values. `arguments`: component -> config of its workers. `iteration`: number of
        iterations before the checkpoint.
        """
        return {}

    def resumed_arguments(
        self,
        arguments: Mapping[str, Any],
        state: Mapping[str, Any],
        before: Mapping[str, Any],
        iteration: int,
    ) -> Mapping[str, Any]:
        """Return component -> config of its workers, for a run that goes on from a checkpoint.

        `arguments`: those of a new run. `state`: what `run_state` returned for the checkpoint; empty if an older
        version wrote it. `before`: the config of the checkpoint, as a mapping. `iteration`: number of iterations before
        the checkpoint.
        """
        return arguments

    def resume_keys(self) -> ResumeKeys:
        """Return the config keys whose change makes a resumed run another experiment. By default there are none."""
        return ResumeKeys()

    def resume_notes(
        self,
        config: Any,
        differences: Mapping[str, tuple[object, object]],
        iteration: int,
    ) -> list[str]:
        """Return lines of text about what the changed keys do to a resumed run, such as to its learning rate.

        `differences`: config key -> (value in the checkpoint, value now), for the values that differ. `iteration`:
        number of iterations before the checkpoint.
        """
        return []

    def last_line(self, run: Path) -> str:
        """Return the last line that a run prints: how to use the run's folder, for example to resume.

        `run`: the folder of the run.
        """
        if not folders_of(run):
            return f"files      {run}: there is no checkpoint to continue from"
        return f"continue   resume={shlex.quote(str(run))}"

    def saved_models(self, config: Any, plan: Plan, folder: Path) -> Mapping[str, Path]:
        """Return component -> path to which its model is written at the end of a run. `folder`: the run's folder."""
        return {}

    def evaluate(self, trained: Trained, request: EvaluationRequest) -> Evaluation:
        """Evaluate a trained job and return the results. Raises ConfigError if the job does not support the request."""
        raise config_error(
            "not-evaluated",
            request.key,
            str(trained.folder),
            error="job",
            job=self.name,
        )

    def export(self, trained: Trained, request: ExportRequest) -> None:
        """Write trained weights in a format that other programs can read.

        `request`: the settings of the export. Raises ConfigError if the job does not support exports, and OutputError
        if the output cannot be written.
        """
        raise config_error(
            "not-exported", request.key, str(trained.folder), error="job", job=self.name
        )

    def load_policy(self, trained: Trained, *, seed: int, key: str) -> Any:
        """Return a trained policy as an object that chooses actions.

        `seed`: seed of sampled actions. `key`: name of the user's argument, for the error. Raises ConfigError if
        policies of this job cannot be loaded as such an object.
        """
        raise config_error(
            "not-loaded", key, str(trained.folder), error="job", job=self.name
        )


def _settings(config: OpenConfig | None) -> Mapping[str, Any]:
    """Return component -> the settings in its config block that its workers get; empty if `config` is None."""
    if config is None:
        return {}
    return config.settings
