"""The shipped workers in a loop of the user's own, launched group by group from the config of a job.

::

    FSDPActor.create_group(cfg) ─ launch(cluster, ...) ──▶ JobGroup ─┐
    Rollout.create_group(cfg) ─── launch(cluster, ...) ──▶ JobGroup ─┼─ JobOnCluster: plan, channels, arguments,
    SimulatorEnv.create_group(cfg) launch(cluster, ...) ─▶ JobGroup ─┘  where the iteration is, one for each cluster

The first launch prepares the job as `rlplace train` does, for the machines of the cluster, and makes its channels. A
call that belongs to a stage first brings all launched components where the schedule has them in that stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rlplace.codes import config_error, problem
from rlplace.config.open_job import OpenConfig
from rlplace.config.read import plain_values
from rlplace.config.schema import Config
from rlplace.contract.stages import Call, Step
from rlplace.errors import (
    ClusterError,
    ConfigError,
    PlacementError,
    WorkerMisuse,
    did_you_mean,
    suggestion,
)
from rlplace.placement.language.slots import PlacementStrategy, Slot
from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import Move, Residency, base_stage
from rlplace.workers.launch import group as groups
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import Pending, Ranks, WorkerGroup, wait_all
from rlplace.workers.worker import Worker

if TYPE_CHECKING:  # the public names come without what a run needs
    from rlplace.runtime.launched import JobSpec

# Method of an RLinf worker -> our method that does the same.
SAME: Mapping[str, str] = {
    "interact": "run",
    "run_training": "learn",
    "sync_model_from_actor": "pull_weights",
    "sync_model_to_rollout": "push_weights",
}
# Methods of RLinf's workers whose work is done by another call: launch sets up, learn takes samples and makes
# advantages.
DONE_ELSEWHERE = frozenset(
    {
        "compute_advantages_and_returns",
        "init_worker",
        "recv_rollout_batch",
        "recv_rollout_trajectories",
        "set_global_step",
    }
)
_OWN_BUILD = "components of a job are launched by JobComponent"


class JobGroup(WorkerGroup):
    """The worker group of one component of a job, for a training loop that the user writes.

    The user need not pass iteration numbers or policy versions to the methods: the job counts both and passes them.
    `job`: the job; None while the group is being set up.
    """

    job: JobOnCluster | None = None  # the job; None while the group is being set up
    component: str = ""

    def _caller(self, method: str, ranks: Sequence[int]) -> Callable[..., Pending]:
        if method in DONE_ELSEWHERE and not hasattr(self.worker, method):
            return functools.partial(self._nothing, method, ranks)
        if not hasattr(self.worker, method):
            method = SAME.get(method, method)
        return super()._caller(method, ranks)

    def _call(
        self, method: str, ranks: Sequence[int], *args: Any, **kwargs: Any
    ) -> Pending:
        if self.job is not None and self.failure is None and not self.closed:
            args = self.job.before(self.component, method, args, kwargs)
        return super()._call(method, ranks, *args, **kwargs)

    def _nothing(
        self, method: str, ranks: Sequence[int], *args: Any, **kwargs: Any
    ) -> Pending:
        """Return a result for each of `ranks` that is ready at once: empty metrics. No worker is called.

        `method`: name of the method that the results belong to.
        """
        calls = [groups.Call(self.handles[rank].slot, method) for rank in ranks]
        for call in calls:
            call.set_result({})
        return Pending(self, calls)


class JobOnCluster:
    """A job whose worker groups the user launches one by one.

    It has the plan, the channels and the position in the iteration, and the cluster keeps it. `mapping`: the config of
    the job. The constructor raises the errors that `rlplace train` raises before its start.
    """

    def __init__(self, cluster: Cluster, mapping: Mapping[str, Any]) -> None:
        from rlplace.runtime.launched import make_channels

        self.mapping = mapping
        self._cluster = cluster
        self.spec = _spec_of(cluster, mapping)
        plan = self.spec.plan
        self._stages = plan.schedule.stages
        self._steps = _steps_of(self.spec)
        self._groups: dict[str, WorkerGroup] = {}
        # Launched component -> its residency.
        self._held: dict[str, Residency] = {}
        # The current stage; None before the first one.
        self._at: str | None = None
        # Whether a training stage has run since the iteration began.
        self._trained = False
        # Number of the iteration; also the policy version for sampling and learning.
        self._iteration = 0
        cluster.start()
        cluster.reserve(
            [
                slot
                for c in plan.placement.components
                for slot in plan.placement.slots(c)
            ]
        )
        self._channels = make_channels(cluster, self.spec)

    def launch(
        self,
        component: str,
        name: str | None,
        strategy: PlacementStrategy | None,
        worker: type[Worker] | None,
    ) -> WorkerGroup:
        """Launch the workers of a component on the slots that the plan gives it, and return their group.

        `name`: name of the group in errors; None: `group_name` of the component's config block, or the component's
        name. `strategy`: a placement strategy, which must result in the slots of the plan; None: no comparison.
        `worker`: a class derived from the planned worker class; None: the planned class.
        """
        from rlplace.runtime.launched import own_channels

        spec = self.spec
        placed = spec.plan.placement.components
        if component not in placed:
            raise _not_placed(component, placed)
        slots = tuple(spec.plan.placement.slots(component))
        if strategy is not None:
            _check_places(component, strategy.get_placement(self._cluster), slots)
        chosen = spec.workers[component]
        if worker is not None:
            _check_class(component, worker, chosen)
            chosen = worker
        facts = spec.job.facts(spec.config, spec.plan)
        builder = chosen.create_group(spec.arguments[component], facts)
        builder = dataclasses.replace(builder, kind=JobGroup)
        own = own_channels(spec, self._channels, component)
        group = self._cluster.launch_all({component: (builder, slots, own)})[component]
        assert isinstance(group, JobGroup), _OWN_BUILD
        # From here on, calls follow the schedule. A launched worker starts with its state off the accelerators.
        group.component = component
        group.job = self
        group.name = name or self._name_of(component)
        self._groups[component] = group
        for part in spec.plan.schedule.parts_of(component):
            self._held[part] = Residency.OFF
        return group

    def _name_of(self, component: str) -> str:
        config = self.spec.config
        if isinstance(config, Config):
            return config.block_of(component).group_name or component
        return component

    def before(
        self,
        component: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        """Prepare a call of a group, and return the positional arguments of the call.

        If the method belongs to a stage, first move all launched components to their residency in this stage, and add
        the iteration number to the arguments if the user has not given it. `args`, `kwargs`: the arguments that the
        user has given.
        """
        if method in ("move", "onload", "offload"):
            self._note_move(component, method, args, kwargs)
            return args
        stages = self._steps.get((component, method))
        if stages is None:
            # This method belongs to no stage.
            return args
        stage = self._at if self._at in stages else next(iter(stages))
        assert stage is not None, "a call of an iteration has a stage"
        call, step = stages[stage]
        self._check_partners(call, step)
        self.enter(stage)
        return self._counted(call, args, kwargs)

    def enter(self, stage: str) -> None:
        """Move all launched components to their residency in a stage: releases first, then acquires.

        Return when all moves have ended. A component moves only after its running call has ended.
        """
        order = self._stages.index
        again = self._at is not None and order(stage) < order(self._at)
        if self._trained and again:
            # The stages start again from the first: a new policy version begins.
            self._iteration += 1
            self._trained = False
        self._at = stage
        if base_stage(stage) in self.spec.work.trains:
            self._trained = True
        needed = self.spec.plan.schedule.residency[stage]
        moves = [
            Move(component=c, before=held, after=needed[c])
            for c, held in self._held.items()
            if c in needed and held != needed[c]
        ]
        self._move([move for move in moves if move.after < move.before])
        self._move([move for move in moves if move.after > move.before])

    def _move(self, moves: Sequence[Move]) -> None:
        begun = [self._ranks_of(move.component).move(move.after) for move in moves]
        wait_all(begun, self.spec.config.runner.stage_timeout_s)

    def _ranks_of(self, part: str) -> WorkerGroup | Ranks:
        """Return the ranks of a component, or of the part of a component that is called so in the schedule."""
        found = self.spec.plan.schedule.parts.get(part)
        if found is None:
            return self._groups[part]
        return self._groups[found.component].execute_on(found.ranks)

    def _note_move(
        self,
        component: str,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Record the residency that a component gets by a call of one of its methods for moving.

        `method`: "move", "onload" or "offload".
        """
        residency = Residency.FULL if method == "onload" else Residency.OFF
        if method == "move":
            residency = args[0] if args else kwargs["to"]
        for part in self.spec.plan.schedule.parts_of(component):
            self._held[part] = residency

    def _counted(
        self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the positional arguments of a call, with the iteration number for each argument that is not given.

        If the first argument that the user has given is a number, it becomes the job's iteration number.
        """
        given = [*args, *(kwargs[n] for n in call.arguments if n in kwargs)]
        if given and isinstance(given[0], int):
            self._iteration = given[0]
        left = [n for n in call.arguments[len(args) :] if n not in kwargs]
        return (*args, *(self._iteration for _ in left))

    def _check_partners(self, call: Call, step: Step) -> None:
        """Raise ClusterError if a component that works in the same step as the call is not launched.

        `step`: the step that contains the call.
        """
        partners = dict.fromkeys(each.component for each in step.calls)
        missing = [
            c for c in partners if c not in self._groups or self._groups[c].closed
        ]
        if not missing:
            return
        others = " and ".join(missing)
        public = " and ".join(public_names(c, self.spec) for c in missing)
        raise ClusterError(
            problem(
                "group-not-launched",
                f"{call.component}.{call.method}",
                others=others,
                partners=" and ".join(partners),
                public=public,
            )
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobGroupBuilder:
    """A component of a job whose worker group is not launched yet.

    `public`: the public class of the component. `mapping`: the config of the job. `worker`: a custom worker class;
    None: the planned class.
    """

    public: type[JobComponent]
    component: str
    mapping: Mapping[str, Any]  # the config of the job
    worker: type[Worker] | None = None

    def launch(
        self,
        cluster: Cluster,
        *,
        name: str | None = None,
        placement_strategy: PlacementStrategy | None = None,
    ) -> WorkerGroup:
        """Launch the workers on their slots of the plan, and return their group when all workers are set up.

        `name`: name of the group in errors; None: `group_name` of the component's config block, or the component's
        name. `placement_strategy`: a placement strategy, which must result in the slots of the plan; None: no
        comparison. The first launch of a job also prepares the job and makes its channels. Raises ClusterError,
        WorkerError, and the errors that `rlplace train` raises before its start.
        """
        mapping = {
            **self.mapping,
            "cluster": {**self.mapping["cluster"], "launcher": cluster.launcher},
        }
        if cluster.job is None:
            cluster.job = JobOnCluster(cluster, mapping)
        job: JobOnCluster = cluster.job
        if job.mapping != mapping:
            raise _another_config(self.component, job.mapping, mapping)
        self.public.check(self.component, job.spec)
        return job.launch(self.component, name, placement_strategy, self.worker)


class JobComponent:
    """Base of the public classes that stand for a component of a job in a training loop that the user writes.

    The config decides which class the workers have, not the public class. `role`: the role of the component.
    `worker_class`, `engine`: the worker class and the engine that the component must have for this public class; "":
    any.
    """

    role: ClassVar[str]
    # Worker class and engine, for names that imply them.
    worker_class: ClassVar[str] = ""
    engine: ClassVar[str] = ""

    @classmethod
    def create_group(
        cls,
        cfg: Any = None,
        *,
        component: str | None = None,
        worker: type[Worker] | None = None,
    ) -> JobGroupBuilder:
        """Return a builder whose `launch` starts the worker group of the component.

        `cfg`: the whole config of the job, as a mapping or a DictConfig. `component`: name of the component in
        `component_placement`, such as "reward.math"; None: the role of this class, such as "reward". `worker`: a class
        derived from the shipped worker class; None: the shipped class. Raises WorkerMisuse if `cfg` is not a config of
        a job.
        """
        if isinstance(cfg, Config | OpenConfig) or not isinstance(cfg, Mapping):
            raise _no_config(cls, cfg, "no-mapping")
        mapping = plain_values(cfg)
        if not isinstance(mapping.get("cluster"), Mapping):
            raise _no_config(cls, cfg, "no-cluster")
        return JobGroupBuilder(
            public=cls, component=component or cls.role, mapping=mapping, worker=worker
        )

    @classmethod
    def check(cls, component: str, spec: JobSpec) -> None:
        """Raise WorkerMisuse if this public class does not fit the workers of a component. `spec`: the job."""
        if component not in spec.workers or cls.fits(component, spec):
            return
        worker = spec.workers[component].__name__
        block = getattr(spec.config, cls.role, None)
        engine = getattr(block, "engine", "")
        right = public_names(component, spec)
        raise WorkerMisuse(
            problem(
                "another-worker",
                component,
                f"{cls.role}.engine: {engine}" if engine else worker,
                error="another-class",
                public=cls.__name__,
                worker=worker,
                right=right,
            )
        )

    @classmethod
    def fits(cls, component: str, spec: JobSpec) -> bool:
        """Return whether a component has the role, worker class and engine of this public class. `spec`: the job."""
        if role_of(component) != cls.role:
            return False
        names = [kind.__name__ for kind in spec.workers[component].__mro__]
        engine = getattr(getattr(spec.config, cls.role, None), "engine", "")
        right_class = not cls.worker_class or cls.worker_class in names
        return right_class and cls.engine in ("", engine)


class FSDPActor(JobComponent):
    """The trained policy: a language model sharded by FSDP2, or a simulator policy replicated on every rank."""

    role = "actor"


class Critic(JobComponent):
    """The critic, which learns the values of tokens."""

    role = "critic"


class Reference(JobComponent):
    """The frozen reference policy of the KL penalty."""

    role = "reference"


class Reward(JobComponent):
    """A reward model, function or endpoint."""

    role = "reward"


class SimulatorEnv(JobComponent):
    """Simulators of Gymnasium, of EnvPool or of the user's own adapter; each rank has many of them."""

    role = "env"
    worker_class = "VectorEnvWorker"


class TextEnv(JobComponent):
    """A text task, which sends prompts, runs conversations and scores answers with rewards."""

    role = "env"
    worker_class = "TextEnvWorker"


class VLLMRollout(JobComponent):
    """The component that generates the answers of a language model, with the engine vLLM."""

    role = "rollout"
    worker_class = "TextRolloutWorker"
    engine = "vllm"


class TransformersRollout(JobComponent):
    """The component that generates the answers of a language model, with the engine transformers."""

    role = "rollout"
    worker_class = "TextRolloutWorker"
    engine = "transformers"


class Rollout(JobComponent):
    """The component that generates answers or actions, with any engine that the config names.

    With simulators, the engine is the policy in torch.
    """

    role = "rollout"


# Of two names that fit, the more specific one is listed first.
PUBLIC: tuple[type[JobComponent], ...] = (
    FSDPActor,
    Critic,
    Reference,
    Reward,
    SimulatorEnv,
    TextEnv,
    VLLMRollout,
    TransformersRollout,
    Rollout,
)


def public_names(component: str, spec: JobSpec) -> str:
    """Return the name of the first public class that fits a component; if no class fits, the component's name.

    `spec`: the job.
    """
    return next(
        (each.__name__ for each in PUBLIC if each.fits(component, spec)), component
    )


def _spec_of(cluster: Cluster, mapping: Mapping[str, Any]) -> JobSpec:
    """Return the job of a config, prepared for the machines of a cluster.

    `mapping`: the config of the job. Raises the errors that `rlplace train` raises before its start.
    """
    from rlplace.runtime.launched import job_spec
    from rlplace.runtime.prepare import check_run, prepare

    prepared = prepare(mapping, simulator=True, topology=cluster.topology)
    if lacking := check_run(prepared):
        raise ConfigError(lacking)
    if prepared.refused:
        raise PlacementError(prepared.view.shortages)
    plan = prepared.plan
    if plan.schedule.needs.ahead:
        raise config_error(
            "not-by-hand",
            "algorithm.max_staleness",
            str(prepared.config.algorithm.max_staleness),
            error="ahead",
        )
    for component in plan.placement.components:
        if any(slot.process for slot in plan.placement.slots(component)):
            raise config_error(
                "not-by-hand",
                f"cluster.component_placement.{component}",
                "process: shared",
                error="shared-process",
                component=component,
            )
    return job_spec(prepared.config, plan)


def _steps_of(spec: JobSpec) -> dict[tuple[str, str], dict[str, tuple[Call, Step]]]:
    """Return (component, method) -> stage -> (the call of the method in the stage, the step that contains the call).

    The stages are in the order of an iteration. `spec`: the job.
    """
    found: dict[tuple[str, str], dict[str, tuple[Call, Step]]] = {}
    by_stage: dict[str, Iterable[Step]] = dict(spec.work.of(spec.plan.schedule))
    if spec.work.evaluation is not None:
        stage = spec.work.evaluated_in
        by_stage[stage] = (*by_stage[stage], spec.work.evaluation)
    for stage, steps in by_stage.items():
        for step in steps:
            for call in step.calls:
                places = found.setdefault((call.component, call.method), {})
                places.setdefault(stage, (call, step))
    return found


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def _no_config(public: type[JobComponent], cfg: object, error: str) -> WorkerMisuse:
    wrong = problem(
        "not-a-job-config",
        public.__name__,
        type(cfg).__name__,
        error=error,
        public=public.__name__,
    )
    return WorkerMisuse(wrong)


def _not_placed(component: str, placed: Sequence[str]) -> PlacementError:
    key = f"cluster.component_placement.{component}"
    near = did_you_mean(component, placed)
    return PlacementError(
        [
            problem(
                "unknown-component",
                key,
                error="by-hand",
                component=component,
                hint=suggestion(near),
                placed=", ".join(placed),
            )
        ]
    )


def _check_places(
    component: str, given: Sequence[Slot], planned: Sequence[Slot]
) -> None:
    """Raise ClusterError if the nodes or accelerators of the `given` slots differ from those of the `planned` slots."""
    wanted = [(slot.node, slot.accelerators) for slot in given]
    if wanted == [(slot.node, slot.accelerators) for slot in planned]:
        return
    raise ClusterError(
        problem(
            "placed-elsewhere",
            component,
            _places(given),
            places=_places(planned),
            component=component,
        )
    )


def _places(slots: Sequence[Slot]) -> str:
    texts = [
        f"rank {slot.rank} on {', '.join(map(str, slot.accelerators)) or 'no accelerator'} of node {slot.node}"
        for slot in slots[:4]
    ]
    if len(slots) > len(texts):
        texts.append(f"{len(slots) - len(texts)} more")
    return "; ".join(texts)


def _check_class(component: str, worker: type[Worker], shipped: type[Worker]) -> None:
    if isinstance(worker, type) and issubclass(worker, shipped):
        return
    raise WorkerMisuse(
        problem(
            "another-worker",
            component,
            getattr(worker, "__name__", repr(worker)),
            error="not-derived",
            shipped=shipped.__name__,
            worker=getattr(worker, "__name__", "Mine"),
        )
    )


def _another_config(
    component: str, first: Mapping[str, Any], second: Mapping[str, Any]
) -> ClusterError:
    key = _differs(first, second, "")
    return ClusterError(problem("another-config", component, name=key))


def _differs(first: Any, second: Any, above: str) -> str:
    """Return the path of the first key whose values differ in two configs, or in two blocks of configs.

    `above`: the path of both blocks; "" for whole configs.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in (*first, *second):
            if first.get(key) != second.get(key):
                path = f"{above}.{key}" if above else str(key)
                return _differs(first.get(key), second.get(key), path)
    return above
