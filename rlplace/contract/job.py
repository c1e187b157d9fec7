"""Everything that the engine asks of a job, on one page; each answer has a default that works.

A job gives components, stages and channels. It then trains, offloads, recovers, checkpoints what its workers save, and
shows a timeline::

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

A subclass answers a question in another way. The jobs in `rlplace.jobs` do so for nearly all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.checks.rule import broken
from rlplace.codes import config_error
from rlplace.config.open_job import OpenConfig, read_open_config
from rlplace.contract import classes, rules
from rlplace.contract.planning import (
    channels_of,
    check_placed,
    memory_of,
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
from rlplace.placement.counts import Count
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.ledger import Measurements, MemoryCase
from rlplace.placement.plan import Plan, Rules, plan_components
from rlplace.placement.schedule import Needs
from rlplace.places import place_of_caller
from rlplace.report.sinks import Column, Console
from rlplace.report.summary import Measures, Progress
from rlplace.trained import Trained
from rlplace.workers.collected import NOT_METRICS
from rlplace.workers.facts import JobFacts, facts_of

if TYPE_CHECKING:
    from rlplace.workers.worker import Worker

_STAGE_COLUMNS = 6  # stages that the console has a column for


class Job:
    """A job: which components run, in which stages, and what the job saves and shows.

    `components`: name -> worker class. `stages`: in the order of an iteration. `channels`: queues between components.
    `name`: folder name of its runs. `score`: the metric that rates an iteration; "" for none.
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
        # Where the user's code makes it
        self.place = place_of_caller()

    # ── its config ───────────────────────────────────────────────────────────────────────────────────────────────────

    def read(
        self, mapping: Mapping[str, Any], sources: Mapping[str, Source]
    ) -> tuple[Any | None, list[Problem]]:
        """Return the config and every problem of the mapping; the config is None if it cannot be read."""
        config, problems = read_open_config(mapping, self, self.components, sources)
        return config, [*rules.of_job(self, _settings(config)), *problems]

    def completed(self, config: Any, sources: Mapping[str, Source]) -> Any:
        """Return the config completed with the content of files that it names. Raises ConfigError."""
        return config

    def key_of(self, config: Any, component: str) -> str:
        """Return the config key of a component's block."""
        return component

    # ── its plan ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def needs(self, config: Any) -> Needs:
        """Return the stages, and the least residency of each component in them."""
        return needs_of_stages(self.stages)

    def leaving(self, config: Any) -> Collection[str]:
        """Return the components that release accelerators which other components need."""
        blocks: Mapping[str, Any] = config.components
        return [name for name, block in blocks.items() if block.enable_offload]

    def plan(
        self, config: Any, topology: Topology, sources: Mapping[str, Source]
    ) -> Plan:
        """Return the plan: placement, residency by stage, and transfers. Raises PlacementError."""
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
        """Return the memory case of the components: declared, `measured`, or not known yet.

        `build`: whether an object that the config names, such as a simulator, may be created to learn its sizes.
        `known`: information from such an object, if one exists already.
        """
        return memory_of(config, plan, measured or {})

    def counts(self, config: Any, plan: Plan) -> tuple[Count, ...]:
        """Return the numbers of the plan that follow from its config, each with its reason."""
        return ()

    # ── its checks ───────────────────────────────────────────────────────────────────────────────────────────────────

    def environment_problems(self, config: Any) -> Iterable[Problem]:
        """Report problems of things that the config names, independent of the placement."""
        return ()

    def plan_problems(self, config: Any, plan: Plan) -> Iterable[Problem]:
        """Report problems that a run of the plan would have on any machine."""
        case = rules.PlannedJob(components=self.components, config=config, plan=plan)
        return broken(rules.PLANNED, case)

    def launch_problems(self, config: Any, plan: Plan) -> Iterable[Problem]:
        """Report what this machine lacks."""
        return ()

    def dry_run_problems(self, config: Any, plan: Plan) -> Iterable[Problem]:
        """Report problems that only appear when the objects that a run makes before its workers start are made."""
        return ()

    # ── its run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def workers(self, config: Any, plan: Plan) -> Mapping[str, type[Worker]]:
        """Return the worker class of each component."""
        return self.components

    def arguments(self, config: Any, plan: Plan, case: MemoryCase) -> Mapping[str, Any]:
        """Return component -> the `config` that its workers get."""
        open_config: OpenConfig = config
        return {name: open_config.settings.get(name, {}) for name in self.components}

    def variables(self, config: Any) -> Collection[str]:
        """Return the names of environment variables of this process that workers need, besides `cluster.env_vars`."""
        return ()

    def facts(self, config: Any, plan: Plan) -> JobFacts:
        """Return the facts that every worker is told: group sizes, and pairs of components that sync weights."""
        return facts_of(
            plan.placement,
            weights=weight_pairs(self.stages),
            timeout_s=config.runner.channel_timeout_s,
        )

    def work(self, config: Any, needs: Needs) -> Work:
        """Return the calls of an iteration."""
        arguments = classes.arguments_of(self)
        stages = {s.name: steps_of_stage(s, arguments) for s in self.stages}
        return Work(
            stages=stages,
            trains=classes.training_stages(self),
            collects=True,
        )

    def measures(self, config: Any) -> Measures:
        """Return the metrics that the summary of a run uses."""
        name = self.score.rpartition("/")[2]
        return Measures(score=self.score, score_name=name, steps="iterations")

    def console(self, config: Any, plan: Plan) -> Console:
        """Return the columns that the console shows during a run."""
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
        """Return the iterations between two evaluations on held-out data; 0: none."""
        return 0

    def count(self, config: Any, progress: Progress, numbers: dict[str, float]) -> None:
        """Add an iteration's metrics to the progress of the run. The method may add derived metrics to `numbers`."""
        progress.add(numbers, 1)

    def remarks(
        self, numbers: Mapping[str, float], notes: Mapping[str, Sequence[str]]
    ) -> list[str]:
        """Return lines about an iteration's metrics; a run prints each of them once.

        `notes`: metric -> what it counts.
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
        """Return the components without state. Their lost ranks are replaced, and the iteration is repeated."""
        return [c for c in self.components if c not in self.stateful(config, plan)]

    def replaced_by_going_back(self, config: Any, plan: Plan) -> Collection[str]:
        """Return those of `replaceable` whose ranks can only be replaced by returning the whole run to a checkpoint."""
        return ()

    def performance_model(self) -> Any | None:
        """Return a `foresight.model.PerformanceModel` that predicts the job's seconds; None: the default model."""
        return None

    # ── what it leaves ───────────────────────────────────────────────────────────────────────────────────────────────

    def stateful(self, config: Any, plan: Plan) -> tuple[str, ...]:
        """Return the components whose state outlives an iteration, so that checkpoints save and load it."""
        return classes.with_state(self)

    def optional_state(self) -> Collection[str]:
        """Return the components whose state a checkpoint may lack; they then start anew."""
        return ()

    def loaded_text(self, numbers: Mapping[str, float], kept: Collection[str]) -> str:
        """Return a text about state that starts anew after a checkpoint was loaded; "" for none.

        `numbers`: metrics of loading. `kept`: components whose state was loaded.
        """
        return ""

    def divided(self) -> Mapping[str, str]:
        """Return component -> phrase for what its ranks divide, if another number of ranks changes that.

        Examples: "state is sharded over", "prompts are dealt to".
        """
        return dict.fromkeys(classes.with_state(self), "state is loaded by")

    def resume_notes(self, config: Any, changed: Collection[str]) -> list[str]:
        """Return lines about the effect of changed keys on a resumed run."""
        return []

    def last_line(self, run: Path) -> str:
        """Return the last line that a run prints: what its folder is good for."""
        return f"go on      resume={shlex.quote(str(run))}"

    def saved_models(self, config: Any, plan: Plan, folder: Path) -> Mapping[str, Path]:
        """Return component -> path of the model that is saved at the end of a run."""
        return {}

    def evaluate(self, trained: Trained, request: EvaluationRequest) -> Evaluation:
        """Evaluate a trained job. Raises ConfigError if the job cannot be evaluated, or not in this way."""
        raise config_error(
            "not-evaluated",
            request.key,
            str(trained.folder),
            error="job",
            job=self.name,
        )

    def export(self, trained: Trained, request: ExportRequest) -> None:
        """Export trained weights for other programs. Raises ConfigError if the job cannot, and OutputError."""
        raise config_error(
            "not-exported", request.key, str(trained.folder), error="job", job=self.name
        )

    def load_policy(self, trained: Trained, *, seed: int, key: str) -> Any:
        """Load a trained policy as an object that chooses actions. Raises ConfigError about `key` if the job cannot."""
        raise config_error(
            "not-loaded", key, str(trained.folder), error="job", job=self.name
        )


def _settings(config: OpenConfig | None) -> Mapping[str, Any]:
    """Return component -> keys of its block; empty for a config that cannot be read."""
    if config is None:
        return {}
    return config.settings
