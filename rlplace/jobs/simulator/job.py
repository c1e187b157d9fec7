"""The job on simulators, as the engine sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplace.checks import evaluation
from rlplace.checks.parallel import WHOLE_POLICIES
from rlplace.checks.rule import broken
from rlplace.config.blocks.policies import ModuleConfig, VlaConfig
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.contract.requests import ExportRequest
from rlplace.contract.stages import Work
from rlplace.envs.registry import check, spaces_of_job, surely_made
from rlplace.errors import Problem, ProblemsError, Source
from rlplace.jobs.exports import export_policy
from rlplace.jobs.notes import missing_problems
from rlplace.jobs.simulated import SimulatedJob
from rlplace.jobs.simulator import init_from, instructions, iteration, plan, rules
from rlplace.jobs.trained import TrainedJob
from rlplace.jobs.variants import check_variant
from rlplace.metrics import KL_STOP, MISMATCH
from rlplace.models.custom_module import check_module
from rlplace.models.vla_entries import check_vla
from rlplace.models.vla_folder import check_folder
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.ledger import Measurements, MemoryCase
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Needs
from rlplace.report.sinks import EVALUATED_CONSOLE, RUN_CONSOLE, Console
from rlplace.report.summary import SIMULATED, Measures
from rlplace.trained import Trained
from rlplace.workers.arguments import SimulatorArguments

if TYPE_CHECKING:
    from rlplace.envs.contract import Spaces
    from rlplace.jobs.simulator.performance.model import (
        SimulatorPerformance,
    )
    from rlplace.models.policy import Policy
    from rlplace.workers.worker import Worker


class SimulatorJob(SimulatedJob, TrainedJob):
    """The job of PPO on simulators."""

    stepping = "env"

    def __init__(self) -> None:
        super().__init__(components={}, stages=(), name="simulator")
        # Of the last config whose simulator was made: making one may take seconds.
        self._seen: tuple[SimulatorJobConfig, Spaces] | None = None

    def _spaces(self, config: SimulatorJobConfig) -> Spaces:
        """Return the observation and action spaces of the config's simulator.

        The first call for a config creates the simulator. The spaces are cached for the last config only. Raises
        ConfigError if the policy cannot take them.
        """
        if self._seen is None or self._seen[0] is not config:
            spaces = spaces_of_job(config)
            if isinstance(config.actor.policy, VlaConfig):
                check_vla(spaces, config.actor.policy, config.env)
            self._seen = (config, spaces)
        return self._seen[1]

    def needs(self, config: SimulatorJobConfig) -> Needs:
        return plan.SIMULATOR_NEEDS

    def plan(
        self,
        config: SimulatorJobConfig,
        topology: Topology,
        sources: Mapping[str, Source],
    ) -> Plan:
        return plan.plan_of(config, topology, sources)

    def memory(
        self,
        config: SimulatorJobConfig,
        plan_: Plan,
        measured: Measurements | None = None,
        *,
        build: bool = False,
        known: Any = None,
    ) -> MemoryCase:
        if known is None and build:
            known = self._spaces(config)
        return plan.memory_of(config, plan_, measured, known)

    def environment_problems(self, config: SimulatorJobConfig) -> Iterator[Problem]:
        if config.runs:
            yield from check(config.env)
        yield from check_variant(config)
        policy = config.actor.policy
        if isinstance(policy, ModuleConfig):
            yield from check_module(policy)
        if isinstance(policy, VlaConfig) and policy.path is not None:
            try:
                check_folder(policy)
            except ProblemsError as error:
                yield from error.problems

    def plan_problems(
        self, config: SimulatorJobConfig, plan_: Plan
    ) -> Iterable[Problem]:
        if not config.runs:
            return missing_problems(config)
        return [
            *broken(WHOLE_POLICIES, plan_),
            *broken(evaluation.RULES, config),
        ]

    def launch_problems(
        self, config: SimulatorJobConfig, plan_: Plan
    ) -> Iterable[Problem]:
        found = self._init_from_problems(config)
        found = found or self._instruction_problems(config)
        if found:
            return found
        # Only a made simulator shows whether it normalizes.
        if not rules.evaluates(config) or surely_made(config.env):
            return ()
        try:
            spaces = self._spaces(config)
        except ProblemsError as error:
            return error.problems
        made = rules.MadeSimulatorJob(config=config, spaces=spaces)
        return broken(rules.EVALUATION, made)

    def _instruction_problems(self, config: SimulatorJobConfig) -> list[Problem]:
        """Return the problems of instructions that the policy cannot read."""
        if not isinstance(config.actor.policy, VlaConfig):
            return []
        try:
            return [*instructions.problems_of(config, self._spaces(config))]
        except ProblemsError as error:
            return [*error.problems]

    def _init_from_problems(self, config: SimulatorJobConfig) -> list[Problem]:
        """Return the reasons why a run cannot begin with the policy that `init_from` names."""
        if config.init_from is None:
            return []
        try:
            return [*init_from.problems_of(config, self._spaces(config))]
        except ProblemsError as error:
            return [*error.problems]

    def dry_run_problems(
        self, config: SimulatorJobConfig, plan_: Plan
    ) -> Iterable[Problem]:
        if surely_made(config.env):
            return ()
        try:
            spaces = self._spaces(config)
            if isinstance(config.actor.policy, ModuleConfig):
                self.memory(config, plan_, known=spaces)
        except ProblemsError as error:
            return error.problems
        return rules.agents_problems(config, plan_, spaces.together)

    def workers(
        self, config: SimulatorJobConfig, plan_: Plan
    ) -> Mapping[str, type[Worker]]:
        from rlplace.workers.roles.actor import PolicyActor
        from rlplace.workers.roles.env import VectorEnvWorker
        from rlplace.workers.roles.rollout import VectorRolloutWorker

        return {
            "actor": PolicyActor,
            "env": VectorEnvWorker,
            "rollout": VectorRolloutWorker,
        }

    def arguments(
        self, config: SimulatorJobConfig, plan_: Plan, case: MemoryCase
    ) -> Mapping[str, Any]:
        components = plan_.placement.components
        ledger = case.ledger()
        arguments = SimulatorArguments(
            config=config,
            ranks={c: plan_.placement.world_size(c) for c in components},
            deliveries=plan_.deliveries,
            working={c: ledger.working(c) for c in components},
            copies_checkpoints=case.copies_checkpoints,
            spaces=self._spaces(config),
            routes=plan_.row_routes,
            begins_with=init_from.beginning(config),
        )
        return dict.fromkeys(components, arguments)

    def resumed_arguments(
        self,
        arguments: Mapping[str, Any],
        state: Mapping[str, Any],
        before: Mapping[str, Any],
        iteration: int,
    ) -> Mapping[str, Any]:
        # The checkpoint has the weights
        return {
            component: dataclasses.replace(given, begins_with=None)
            for component, given in arguments.items()
        }

    def start_text(self, config: SimulatorJobConfig) -> str:
        if config.init_from is None:
            return ""
        return init_from.text_of(config, self._spaces(config))

    def work(self, config: SimulatorJobConfig, needs: Needs) -> Work:
        return iteration.work(evaluated=config.runner.eval_every > 0)

    def measures(self, config: SimulatorJobConfig) -> Measures:
        return SIMULATED

    def console(self, config: SimulatorJobConfig, plan_: Plan) -> Console:
        if config.runner.eval_every:
            return EVALUATED_CONSOLE
        return RUN_CONSOLE

    def steps_of_iteration(self, config: SimulatorJobConfig) -> int:
        rows = config.env.total_num_envs
        decisions = rows * config.algorithm.rollout_steps
        return decisions * config.rollout.action_chunk

    def remarks(
        self, numbers: Mapping[str, float], notes: Mapping[str, Sequence[str]]
    ) -> list[str]:
        found = super().remarks(numbers, notes)
        for name in (MISMATCH, KL_STOP):
            found += notes.get(name, ())
        return found

    def replaceable(self, config: SimulatorJobConfig, plan_: Plan) -> Collection[str]:
        return ("env", "rollout")

    def replaced_by_going_back(
        self, config: SimulatorJobConfig, plan_: Plan
    ) -> Collection[str]:
        if self._spaces(config).normalized:
            # A lost rank had the only copy of its statistics.
            return ("env",)
        return ()

    def performance_model(self) -> SimulatorPerformance:
        # Imported here: a plan without a profile needs no NumPy.
        from rlplace.jobs.simulator.performance.model import SimulatorPerformance

        return SimulatorPerformance()

    def stateful(self, config: SimulatorJobConfig, plan_: Plan) -> tuple[str, ...]:
        return tuple(c for c in plan_.placement.components if c != "rollout")

    def optional_state(self, config: SimulatorJobConfig) -> Collection[str]:
        if self._spaces(config).normalized:
            return ()
        return ("env",)

    def loaded_text(self, numbers: Mapping[str, float], kept: Collection[str]) -> str:
        if "env" not in kept:
            return "; all episodes begin anew"
        return super().loaded_text(numbers, kept)

    def divided(self) -> Mapping[str, str]:
        return {"actor": "samples are dealt to", "env": "simulators are dealt to"}

    def export(self, trained: Trained, request: ExportRequest) -> None:
        # Imported here: a plan needs no torch
        from rlplace.models.saved_state import write_policy

        export_policy(
            trained,
            request,
            lambda: self.load_policy(trained, seed=0, key=request.key),
            lambda out: write_policy(trained.weights, out),
        )

    def load_policy(self, trained: Trained, *, seed: int, key: str) -> Policy:
        from rlplace.models.policy import policy_of

        return policy_of(trained, seed=seed, key=key)
