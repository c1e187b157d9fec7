"""The job on language models, as the engine sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.checks.unplaced import unplaced_problems
from rlplace.codes import config_error
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.contract.requests import Evaluation, EvaluationRequest, ExportRequest
from rlplace.contract.stages import Work
from rlplace.envs.registry import check_task
from rlplace.errors import Problem, Source
from rlplace.jobs.language_model import iteration, plan
from rlplace.jobs.language_model.counts import explain_counts
from rlplace.jobs.language_model.evaluate import evaluate
from rlplace.jobs.language_model.export import export
from rlplace.jobs.language_model.folders import with_folder
from rlplace.jobs.language_model.memory import (
    read_again,
    slices_heads,
    text_case,
    with_share,
)
from rlplace.jobs.language_model.rules.machine import launch_problems
from rlplace.jobs.language_model.rules.own_engine import own_engine_problems
from rlplace.jobs.language_model.rules.planned import plan_problems
from rlplace.jobs.language_model.rules.signal import compares_groups
from rlplace.jobs.trained import TrainedJob
from rlplace.jobs.variants import check_variant
from rlplace.metrics import (
    DROPPED_PROMPTS,
    LEFT_OUT,
    MISMATCH,
    UNCONFINED,
    UNREWARDED,
)
from rlplace.models.folders import existing_folder
from rlplace.models.template_dates import date_problems
from rlplace.models.tied_heads import head_problems
from rlplace.models.unused_layers import layer_problems
from rlplace.placement.counts import Count
from rlplace.placement.language.spec import role_of
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.ledger import Measurements, MemoryCase
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import FROZEN, Needs, base_stage
from rlplace.report.sinks import SCORED_CONSOLE, TAUGHT_CONSOLE, TEXT_CONSOLE, Console
from rlplace.report.summary import TEXT, Measures, Progress
from rlplace.trained import Trained
from rlplace.workers.arguments import TextArguments

if TYPE_CHECKING:
    from rlplace.jobs.language_model.performance.model import (
        LanguageModelPerformance,
    )
    from rlplace.workers.worker import Worker

# Imports all of vLLM that an engine needs
_VLLM_MODULES = "rlplace.workers.engines.vllm_modules"
# Roles without state in checkpoints, so lost ranks can be replaced
_REPLACED = ("env", "rollout", *FROZEN)
# Last parts of metrics whose notes are shown on the screen
_SAID = (DROPPED_PROMPTS, LEFT_OUT, UNCONFINED, UNREWARDED)
# Name of the number of asked prompts among the values of a checkpoint
_ASKED = "prompts_asked"


class LanguageModelJob(TrainedJob):
    """The job of GRPO, PPO and related algorithms on language models."""

    def __init__(self) -> None:
        super().__init__(components={}, stages=(), name="language_model")

    def completed(
        self, config: LanguageModelJobConfig, sources: Mapping[str, Source]
    ) -> LanguageModelJobConfig:
        return with_folder(config, sources)

    def needs(self, config: LanguageModelJobConfig) -> Needs:
        return plan.needs_of(config)

    def plan(
        self,
        config: LanguageModelJobConfig,
        topology: Topology,
        sources: Mapping[str, Source],
    ) -> Plan:
        return plan.plan_of(config, topology, sources)

    def memory(
        self,
        config: LanguageModelJobConfig,
        plan_: Plan,
        measured: Measurements | None = None,
        *,
        build: bool = False,
        known: Any = None,
    ) -> MemoryCase:
        """Return all inputs of the memory proof. Raises ConfigError for models that cannot be read."""

        def replan(
            other: LanguageModelJobConfig, topology: Topology
        ) -> MemoryCase | None:
            planned = self.plan(other, topology, {})
            case = self.memory(other, planned, measured)
            return case if slices_heads(other, planned) else None

        return text_case(plan_, config, replan, measured)

    def counts(self, config: LanguageModelJobConfig, plan_: Plan) -> tuple[Count, ...]:
        return explain_counts(config, plan_.placement)

    def environment_problems(self, config: LanguageModelJobConfig) -> Iterator[Problem]:
        runner = config.runner
        if config.runs:
            scorers = [c for c in config.placed if role_of(c) == "reward"]
            functions = {
                config.key_of(c): config.reward_of(c)
                for c in scorers
                if config.reward_of(c).function is not None
            }
            folder = existing_folder(config.model)
            rendered = None
            if runner.eval_every and folder is not None:
                from rlplace.workers.roles.prompts import rendered_by

                rendered = rendered_by(config, folder)
            yield from check_task(
                config.env,
                seed=runner.seed,
                evaluated=runner.eval_every > 0,
                components=functions,
                # Failures of single answers may be what the config expects
                own=config.faults.on_error == "stop",
                samples_per_prompt=config.algorithm.samples_per_prompt,
                eval_samples=runner.eval_samples,
                eval_prompts=runner.eval_prompts,
                rendered=rendered,
            )
            for key, own in _folders_of_decoders(config):
                yield from layer_problems(own, key)
                yield from head_problems(own, key)
            if folder is not None and config.env.chat:
                yield from date_problems(folder, config.env.template)
        yield from check_variant(config)
        if config.rollout.own:
            yield from own_engine_problems(config.rollout)

    def unplaced_problems(
        self, config: LanguageModelJobConfig, sources: Mapping[str, Source]
    ) -> Iterable[Problem]:
        # A head on the actor, and the actor without its LoRA factors, need no placement
        shared = {
            "critic": config.critic.on_actor,
            "reference": config.reference.share_actor,
        }
        roles = [role for role, is_shared in shared.items() if not is_shared]
        return unplaced_problems(config, [*roles, "teacher", "reward"], sources)

    def plan_problems(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Iterable[Problem]:
        return plan_problems(config, plan_)

    def launch_problems(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Iterable[Problem]:
        return launch_problems(config, plan_)

    def workers(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Mapping[str, type[Worker]]:
        components = plan_.placement.components
        return {component: worker_of(config, component) for component in components}

    def arguments(
        self, config: LanguageModelJobConfig, plan_: Plan, case: MemoryCase
    ) -> Mapping[str, Any]:
        if config.cluster.launcher == "inline":
            # Import it now, in one thread: parallel imports of transformers fail.
            import rlplace.models.causal_lm  # noqa: F401

        components = plan_.placement.components
        placement = plan_.placement
        ledger = case.ledger()
        arguments = TextArguments(
            config=with_share(config, case),
            ranks={c: placement.world_size(c) for c in components},
            deliveries=plan_.deliveries,
            working={c: ledger.working(c) for c in components},
            parallel={c: placement.spec(c).parallel for c in components},
            read_again=read_again(config),
            copies_checkpoints=case.copies_checkpoints,
        )
        return dict.fromkeys(components, arguments)

    def variables(self, config: LanguageModelJobConfig) -> Collection[str]:
        rewards = [
            config.reward_of(component)
            for component in config.placed
            if component.startswith("reward")
        ]
        return [block.api_key_env for block in rewards if block.api_key_env]

    def large_modules(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Sequence[str]:
        generates = any(role_of(component) == "rollout" for component in config.placed)
        kinds = {node.kind for node in plan_.topology.nodes}
        found = []
        if config.actor.lora_rank is not None or config.critic.lora_rank is not None:
            found.append("peft")
        # Forks of a process with vLLM were not tried on GPUs
        if generates and config.rollout.engine == "vllm" and kinds == {"emulated"}:
            found.append(_VLLM_MODULES)
        return found

    def work(self, config: LanguageModelJobConfig, needs: Needs) -> Work:
        return iteration.work(needs)

    def measures(self, config: LanguageModelJobConfig) -> Measures:
        if compares_groups(config):
            return TEXT
        # Groups of equal rewards are learned from, too
        signs = [name for name in TEXT.signs if name != "equal-groups"]
        return dataclasses.replace(TEXT, signs=signs)

    def console(self, config: LanguageModelJobConfig, plan_: Plan) -> Console:
        if config.has_teacher:
            return TAUGHT_CONSOLE
        if "infer" in map(base_stage, plan_.schedule.stages):
            return SCORED_CONSOLE
        return TEXT_CONSOLE

    def evaluates_every(self, config: LanguageModelJobConfig) -> int:
        return config.runner.eval_every

    def remarks(
        self, numbers: Mapping[str, float], notes: Mapping[str, Sequence[str]]
    ) -> list[str]:
        found = super().remarks(numbers, notes)
        for name, lines in notes.items():
            leaf = name.rpartition("/")[2]
            if leaf in _SAID or name == MISMATCH:
                found += lines
        return found

    def count(
        self,
        config: LanguageModelJobConfig,
        progress: Progress,
        numbers: dict[str, float],
    ) -> None:
        progress.add(numbers, int(numbers.get("rollout/answers", 0)))

    def replaceable(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Collection[str]:
        return [c for c in plan_.placement.components if role_of(c) in _REPLACED]

    def replaced_by_going_back(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Collection[str]:
        if plan_.schedule.needs.ahead:
            # Some iteration is always being learned, so replacing any rank means going back to a checkpoint.
            return plan_.placement.components
        if config.reference.refresh_every:
            # A refreshed reference has the only copy of its weights.
            return ("reference",)
        return ()

    def performance_model(self) -> LanguageModelPerformance | None:
        # Imported here: a plan without a profile needs no NumPy.
        from rlplace.jobs.language_model.performance.model import (
            LanguageModelPerformance,
        )

        return LanguageModelPerformance()

    def stateful(self, config: LanguageModelJobConfig, plan_: Plan) -> tuple[str, ...]:
        kept = {"actor", "critic"}
        if config.algorithm.max_staleness or config.algorithm.short_rounds:
            kept.add("env")
        if config.reference.refresh_every:
            kept.add("reference")
        return tuple(c for c in plan_.placement.components if role_of(c) in kept)

    def optional_state(self, config: LanguageModelJobConfig) -> Collection[str]:
        return ("env",)

    def divided(self) -> Mapping[str, str]:
        sharded = dict.fromkeys(
            ("actor", "critic", "reference"), "state is sharded over"
        )
        return {**sharded, "env": "prompts are dealt to"}

    def resume_notes(
        self,
        config: LanguageModelJobConfig,
        differences: Mapping[str, tuple[object, object]],
        iteration: int,
    ) -> list[str]:
        lines = super().resume_notes(config, differences, iteration)
        if "algorithm.prompts" in differences:
            lines.append(
                "    data: goes on behind the last prompt that was asked; no row is skipped or asked twice"
            )
        return lines

    def run_state(
        self,
        config: LanguageModelJobConfig,
        arguments: Mapping[str, TextArguments],
        iteration: int,
    ) -> Mapping[str, Any]:
        if "env" not in arguments:
            return {}
        return {_ASKED: arguments["env"].first_prompt(iteration)}

    def resumed_arguments(
        self,
        arguments: Mapping[str, TextArguments],
        state: Mapping[str, Any],
        before: Mapping[str, Any],
        iteration: int,
    ) -> Mapping[str, TextArguments]:
        # A checkpoint of an older version has only its config
        asked = state.get(_ASKED)
        if asked is None:
            asked = iteration * before["algorithm"]["prompts"]
        place = {"resumed_at": iteration, "asked_before": asked}
        return {
            component: dataclasses.replace(given, **place)
            for component, given in arguments.items()
        }

    def saved_models(
        self, config: LanguageModelJobConfig, plan_: Plan, folder: Path
    ) -> Mapping[str, Path]:
        saved = {"actor": folder / "policy"}
        if "critic" in plan_.placement.components:
            saved["critic"] = folder / "critic"
        return saved

    def evaluate(self, trained: Trained, request: EvaluationRequest) -> Evaluation:
        return evaluate(trained, request)

    def export(self, trained: Trained, request: ExportRequest) -> None:
        export(trained, request)

    def load_policy(self, trained: Trained, *, seed: int, key: str) -> Any:
        folder = str(trained.folder)
        raise config_error(
            "wrong-kind", key, folder, error="language-model", folder=folder
        )


def worker_of(config: LanguageModelJobConfig, component: str) -> type[Worker]:
    """Return the worker class of a component."""
    from rlplace.workers.roles.actor import Critic, LmActor
    from rlplace.workers.roles.reward import (
        RewardEndpointWorker,
        RewardFunctionWorker,
    )
    from rlplace.workers.roles.rollout import TextRolloutWorker
    from rlplace.workers.roles.scorer import (
        ReferenceWorker,
        RewardModelWorker,
        TeacherWorker,
    )
    from rlplace.workers.roles.text_env import TextEnvWorker

    roles: dict[str, type[Worker]] = {
        "actor": LmActor,
        "critic": Critic,
        "env": TextEnvWorker,
        "reference": ReferenceWorker,
        "rollout": TextRolloutWorker,
        "teacher": TeacherWorker,
    }
    rewards: dict[str, type[Worker]] = {
        "model": RewardModelWorker,
        "function": RewardFunctionWorker,
        "url": RewardEndpointWorker,
    }
    role = role_of(component)
    if role == "reward":
        return rewards[config.reward_of(component).kind]
    return roles[role]


def _folders_of_decoders(config: LanguageModelJobConfig) -> Iterator[tuple[str, Path]]:
    """Yield (config key, folder) of the models that give log-probabilities, as far as the folders exist.

    These are the actor's, and own models of a reference and of a teacher.
    """
    models = {"actor": config.model}
    if "reference" in config.placed:
        models["reference"] = config.reference.model
    if "teacher" in config.placed:
        models["teacher"] = config.teacher.model
    for component, model in models.items():
        folder = existing_folder(model)
        if folder is not None:
            yield f"{component}.model.path", folder
