"""The off-policy job, as the engine sees it.

::

    sync     actor ── weights ──▶ rollout
    train    rollout ── transitions ──▶ replay ── batches ──▶ actor        at the same time, piece by piece
                ▲                          ◀── priorities ──    │
                └──────────────── policy ───────────────────────┘
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlplace.checks.parallel import WHOLE_POLICIES
from rlplace.checks.rule import broken
from rlplace.codes import config_error
from rlplace.config.blocks.off_policy import OffPolicyBlocks, OffPolicyConfig
from rlplace.config.open_job import JOB
from rlplace.config.paths import with_homes
from rlplace.config.read import read_block
from rlplace.contract.job import ResumeKeys
from rlplace.contract.planning import memory_of
from rlplace.contract.requests import Evaluation, EvaluationRequest, ExportRequest
from rlplace.contract.stages import (
    Call,
    Channel,
    Stage,
    Step,
    Work,
    full,
    on_host,
    weights,
)
from rlplace.envs.registry import check, describe, make_simulator, surely_made
from rlplace.errors import (
    PlacementError,
    Problem,
    ProblemsError,
    Source,
    with_sources,
)
from rlplace.jobs.exports import export_policy
from rlplace.jobs.off_policy import rules
from rlplace.jobs.off_policy.memory import with_memory
from rlplace.jobs.simulated import SimulatedJob
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.ledger import Measurements, MemoryCase
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Needs
from rlplace.report.sinks import Column, Console
from rlplace.report.summary import SIMULATED, Measures
from rlplace.trained import Trained
from rlplace.workers.off_policy.actor import OffPolicyActor
from rlplace.workers.off_policy.arguments import (
    BATCHES,
    POLICY,
    PRIORITIES,
    TRANSITIONS,
    OffPolicyArguments,
)
from rlplace.workers.off_policy.replay import OffPolicyReplay
from rlplace.workers.off_policy.rollout import OffPolicyRollout

if TYPE_CHECKING:
    from rlplace.envs.contract import Spaces
    from rlplace.jobs.off_policy.performance import OffPolicyPerformance
    from rlplace.models.off_policy import Acting

_TRAIN = "train"
# Items of a channel: of a few pieces from each rank
_ITEMS = 16
_LEARNED = (
    "env/episode_length",
    "actor/critic_loss",
    "actor/policy_loss",
    "actor/temperature",
    "actor/entropy",
    "actor/value",
)


class OffPolicyJob(SimulatedJob):
    """The job of SAC, CrossQ, TD3, DQN, TD3+BC and IQL on simulators."""

    stepping = "rollout"

    def __init__(self) -> None:
        super().__init__(
            name="off_policy",
            components={
                "actor": OffPolicyActor,
                "rollout": OffPolicyRollout,
                "replay": OffPolicyReplay,
            },
            stages=[
                Stage("sync", weights("actor", to="rollout")),
                Stage(
                    _TRAIN,
                    full("rollout").calls("act"),
                    on_host("replay").calls("serve"),
                    full("actor").calls("learn"),
                ),
            ],
            channels=[
                Channel(TRANSITIONS, "rollout", "replay", _ITEMS, by_rank=True),
                Channel(BATCHES, "replay", "actor", _ITEMS, by_rank=True),
                Channel(PRIORITIES, "actor", "replay", _ITEMS, by_rank=True),
                Channel(POLICY, "actor", "rollout", _ITEMS, by_rank=True),
            ],
            score="env/return",
        )
        # Of the last config whose simulator was made: making one may take seconds
        self._seen: tuple[Any, Spaces] | None = None

    def _spaces(self, config: OffPolicyConfig) -> Spaces:
        """Return the spaces of the config's simulator, which the first call creates. Raises ConfigError."""
        if self._seen is None or self._seen[0] != config.env:
            self._seen = (config.env, describe(config.env))
        return self._seen[1]

    # ── its config and its checks ────────────────────────────────────────────────────────────────────────────────────

    def read(
        self, mapping: Mapping[str, Any], sources: Mapping[str, Source]
    ) -> tuple[Any | None, list[Problem]]:
        written = {key: value for key, value in mapping.items() if key != JOB}
        blocks, problems = read_block(
            OffPolicyBlocks, with_homes(written), sources=sources
        )
        if blocks is None:
            return None, problems
        config = OffPolicyConfig(
            job=self,
            engine=blocks,
            components={name: getattr(blocks, name) for name in self.components},
            settings={},
            blocks=blocks,
        )
        return config, [*problems, *with_sources(broken(rules.RULES, config), sources)]

    def environment_problems(self, config: OffPolicyConfig) -> Iterator[Problem]:
        yield from check(config.env)

    def plan(
        self,
        config: OffPolicyConfig,
        topology: Topology,
        sources: Mapping[str, Source],
    ) -> Plan:
        plan = super().plan(config, topology, sources)
        case = rules.PlacedOffPolicyJob(config=config, placement=plan.placement)
        problems = with_sources(broken(rules.PLACED, case), sources)
        if problems:
            raise PlacementError(problems)
        late = with_sources(broken(rules.WARNINGS, config), sources)
        return dataclasses.replace(plan, warnings=(*plan.warnings, *late))

    def plan_problems(self, config: OffPolicyConfig, plan: Plan) -> Iterable[Problem]:
        problems = [*super().plan_problems(config, plan), *broken(WHOLE_POLICIES, plan)]
        # A simulator of Gymnasium is made at once; others may take seconds, or not be installed
        if surely_made(config.env):
            spaces = self._spaces(config)
            made = rules.MadeOffPolicyJob(config=config, spaces=spaces, plan=plan)
            problems += broken(rules.SUITED, made)
        return problems

    def launch_problems(self, config: OffPolicyConfig, plan: Plan) -> Iterable[Problem]:
        return self._made_problems(config, plan)

    def dry_run_problems(
        self, config: OffPolicyConfig, plan: Plan
    ) -> Iterable[Problem]:
        return self._made_problems(config, plan)

    def _made_problems(self, config: OffPolicyConfig, plan: Plan) -> Iterable[Problem]:
        """Create the simulator; return the problems of doing so, those of its spaces, and of a memory too large."""
        try:
            spaces = self._spaces(config)
        except ProblemsError as error:
            return error.problems
        made = rules.MadeOffPolicyJob(config=config, spaces=spaces, plan=plan)
        found = [*broken(rules.MADE, made)]
        if found or config.blocks.replay.demonstrations is None:
            return found
        # Imported here: a plan without demonstrations needs no NumPy
        from rlplace.envs.recorded import problems_of

        return problems_of(
            config.blocks.replay.demonstrations,
            spaces,
            shards=plan.placement.world_size("replay"),
            n_step=config.blocks.algorithm.n_step,
        )

    # ── its plan ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def memory(
        self,
        config: OffPolicyConfig,
        plan: Plan,
        measured: Measurements | None = None,
        *,
        build: bool = False,
        known: Any = None,
    ) -> MemoryCase:
        spaces = known
        if spaces is None and (build or surely_made(config.env)):
            spaces = self._spaces(config)
        if spaces is not None:
            config = with_memory(config, plan, spaces)
        return memory_of(config, plan, measured or {})

    def arguments(
        self, config: OffPolicyConfig, plan: Plan, case: MemoryCase
    ) -> Mapping[str, Any]:
        components = plan.placement.components
        given = OffPolicyArguments(
            blocks=config.blocks,
            spaces=self._spaces(config),
            ranks={c: plan.placement.world_size(c) for c in components},
            seed=config.runner.seed,
            eval_episodes=config.runner.eval_episodes,
        )
        return dict.fromkeys(components, given)

    # ── its run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def start_text(self, config: OffPolicyConfig) -> str:
        """Return warnings about demonstrations of another environment, or with other actions or rewards than its own.

        Offline algorithms learn from the rewards of the file alone.
        """
        blocks = config.blocks
        if blocks.replay.demonstrations is None:
            return ""
        # Imported here: a plan without demonstrations needs no NumPy
        from rlplace.envs.recorded import (
            narrow_actions,
            next_episodes,
            other_simulator,
            read_demonstrations,
        )
        from rlplace.envs.recorded_rewards import other_rewards

        path = str(config.blocks.replay.demonstrations)
        spaces = self._spaces(config)
        steps = read_demonstrations(path, spaces)
        other = other_simulator(path, config.env.id)
        found = [other, narrow_actions(path, steps, spaces), next_episodes(path, steps)]
        # Other actions have other rewards
        if not any(found) and not blocks.algorithm.offline:
            rewards = other_rewards(
                path,
                steps,
                lambda rows: make_simulator(config.env, rows, 1),
                spaces,
                config.runner.seed,
            )
            found.append(rewards)
        return "\n".join(each.render() for each in found if each is not None)

    def work(self, config: OffPolicyConfig, needs: Needs) -> Work:
        work = super().work(config, needs)
        if not config.runner.eval_every:
            return work
        call = Call(component="rollout", method="evaluate")
        evaluation = Step(name="evaluate", calls=(call,))
        return dataclasses.replace(work, evaluation=evaluation, evaluated_in=_TRAIN)

    def performance_model(self) -> OffPolicyPerformance:
        # Imported here: a plan without a profile needs no NumPy
        from rlplace.jobs.off_policy.performance import OffPolicyPerformance

        return OffPolicyPerformance()

    def steps_of_iteration(self, config: OffPolicyConfig) -> int:
        if config.blocks.algorithm.offline:
            return 0
        return config.blocks.algorithm.steps_per_iteration

    def measures(self, config: OffPolicyConfig) -> Measures:
        return dataclasses.replace(SIMULATED, learned=_LEARNED)

    def console(self, config: OffPolicyConfig, plan: Plan) -> Console:
        offline = config.blocks.algorithm.offline
        columns = []
        if not offline:
            columns.append(Column("return", "env/mean_return", ",.1f", 10))
            columns.append(Column("length", "env/episode_length", ",.0f", 8))
        if config.runner.eval_every:
            columns.append(Column("evaluated", "eval/return", ",.1f", 10))
        columns += [
            Column("updates", "actor/updates", ",.0f", 9),
            Column("critic", "actor/critic_loss", ".3g", 10),
            Column("value", "actor/value", ",.1f", 9),
        ]
        if not offline:
            columns.append(Column("steps/s", "env/steps_per_s", ",.0f", 9))
        columns.append(Column("train s", "time/train_s", ".2f", 9))
        return Console("" if offline else "env steps", tuple(columns))

    # ── what it leaves ───────────────────────────────────────────────────────────────────────────────────────────────

    def stateful(self, config: OffPolicyConfig, plan: Plan) -> tuple[str, ...]:
        return tuple(plan.placement.components)

    def resume_keys(self) -> ResumeKeys:
        # The replay memory keeps steps of the environment and of the settings as they were
        return ResumeKeys(
            experiment=(
                "env",
                "env.*",
                "algorithm.*",
                "replay.*",
                "actor.activation",
                "runner.seed",
            ),
            shapes=(
                "env.id",
                "env.total_num_envs",
                "algorithm.name",
                "replay.capacity",
                "replay.sampling",
                "actor.hidden",
                "actor.critics",
                "actor.layer_norm",
            ),
            task=("env.kind", "env.id"),
        )

    def divided(self) -> Mapping[str, str]:
        return {
            "actor": "samples are dealt to",
            "rollout": "simulators are dealt to",
            "replay": "steps are kept and drawn by",
        }

    def evaluate(self, trained: Trained, request: EvaluationRequest) -> Evaluation:
        algorithm = trained.config.blocks.algorithm
        if not request.deterministic and not algorithm.draws:
            raise config_error(
                "bad-option",
                "deterministic",
                "false",
                error="not-drawn",
                name=algorithm.name,
            )
        return super().evaluate(trained, request)

    def export(self, trained: Trained, request: ExportRequest) -> None:
        # Imported here: a plan needs no torch
        from rlplace.models.off_policy import ActingProgram
        from rlplace.models.saved_off_policy import write_weights

        def program() -> ActingProgram:
            policy = self.load_policy(trained, seed=0, key=request.key)
            return ActingProgram(policy.network, policy.spaces)

        export_policy(
            trained, request, program, lambda out: write_weights(trained, out)
        )

    def load_policy(self, trained: Trained, *, seed: int, key: str) -> Acting:
        from rlplace.models.off_policy import Acting, new_policy
        from rlplace.models.saved_off_policy import load_weights

        config: OffPolicyConfig = trained.config
        spaces = self._spaces(config)
        network = new_policy(
            spaces, config.blocks.algorithm.name, config.blocks.actor, seed
        )
        try:
            load_weights(network, trained)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise config_error(
                "checkpoint-damaged",
                key,
                str(trained.weights),
                error="exported",
                reason=str(error),
            ) from error
        network.requires_grad_(False).eval()
        return Acting(network, spaces, seed=seed)
