"""A run that trains a language model on a text task: its workers, what they are told, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.llm_config import LlmConfig
from rlplace.loop import Loop
from rlplace.placement.language.spec import role_of
from rlplace.placement.layout import Layout
from rlplace.placement.llm import llm_memory_case, with_share
from rlplace.placement.turns import base_stage
from rlplace.report.sinks import JUDGED_CONSOLE, TEXT_CONSOLE, Sink
from rlplace.report.text_summary import TextProgress, text_summary, text_summary_text
from rlplace.run import Launchable
from rlplace.workers.llm_job import LlmJob
from rlplace.workers.worker import Worker


def llm_run(config: LlmConfig, layout: Layout) -> Launchable:
    if config.cluster.launcher == "inline":
        import rlplace.models.causal_lm  # noqa: F401  now: threads that import transformers at once find half of it

    placement, case = layout.placement, llm_memory_case(layout, config)
    return Launchable(
        cluster=config.cluster,
        runner=config.runner,
        plan=layout,
        workers={component: worker_of(config, component) for component in placement.components},
        told=LlmJob(
            config=with_share(config, case),
            env_ranks=placement.world_size("env"),
            rollout_ranks=placement.world_size("rollout"),
            reference_ranks=placement.world_size("reference") if "reference" in placement.components else 0,
            components=placement.components,
            deliveries=layout.deliveries,
        ),
        case=case,
        ledger=case.ledger(),
        course=TextCourse(config),
        console=JUDGED_CONSOLE if "infer" in map(base_stage, layout.schedule.stages) else TEXT_CONSOLE,
        saved={"actor": "policy"} | ({"critic": "critic"} if "critic" in placement.components else {}),
        iterations=config.runner.total_iterations,
    )


def worker_of(config: LlmConfig, component: str) -> type[Worker]:
    """What runs a component: by its role, a reward by what scores it."""
    from rlplace.workers.endpoint_judge import RewardEndpointWorker
    from rlplace.workers.frozen_judges import ReferenceWorker, RewardModelWorker
    from rlplace.workers.function_judge import RewardFunctionWorker
    from rlplace.workers.roles.critic import Critic
    from rlplace.workers.roles.lm_actor import LmActor
    from rlplace.workers.text_env import TextEnvWorker
    from rlplace.workers.text_rollout import TextRolloutWorker

    workers: dict[str, type[Worker]] = {
        "actor": LmActor,
        "env": TextEnvWorker,
        "rollout": TextRolloutWorker,
        "critic": Critic,
        "reference": ReferenceWorker,
    }
    rewards: dict[str, type[Worker]] = {
        "model": RewardModelWorker,
        "function": RewardFunctionWorker,
        "url": RewardEndpointWorker,
    }
    return rewards[config.reward_of(component).kind] if role_of(component) == "reward" else workers[component]


class TextCourse:
    """Until the last iteration or the reward goal; between iterations, held-out prompts. Begins when it is made."""

    def __init__(self, config: LlmConfig) -> None:
        self._runner = config.runner
        self._progress = TextProgress(began=time.perf_counter())

    def started(self, start_s: float) -> None:
        self._progress.start_s = start_s

    def train(self, loop: Loop, sinks: Sequence[Sink]) -> None:
        runner, progress, answers = self._runner, self._progress, 0
        while progress.iterations < runner.total_iterations:
            at = progress.iterations
            numbers = loop.iteration(at, evaluate=bool(runner.eval_every) and at % runner.eval_every == 0)
            progress.add(numbers)
            answers += int(numbers.get("rollout/answers", 0))
            for sink in sinks:
                sink.write(progress.iterations, answers, numbers)
            if progress.reached(runner.stop_at_reward):
                break
        if runner.eval_every:
            progress.add_evaluation(loop.evaluate(progress.iterations), iteration=progress.iterations)

    def summary(self, folder: Path) -> dict[str, Any]:
        return text_summary(self._progress, folder)

    def text(self, summary: Mapping[str, Any]) -> str:
        return text_summary_text(summary)
