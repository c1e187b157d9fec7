"""A run that learns from simulators by PPO: its workers, what they are told, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.config import RunConfig
from rlplace.envs import describe
from rlplace.loop import Loop
from rlplace.placement import Plan
from rlplace.placement.memory import memory_case
from rlplace.report.sinks import RUN_CONSOLE, Sink
from rlplace.report.summary import Progress, summary, summary_text
from rlplace.run import Launchable
from rlplace.workers.job import Job


def ppo_run(config: RunConfig, plan: Plan) -> Launchable:
    from rlplace.workers.env import EnvWorker
    from rlplace.workers.roles.actor import PolicyActor
    from rlplace.workers.rollout import RolloutWorker

    spaces = describe(config.env)
    case = memory_case(plan, config, spaces)
    return Launchable(
        cluster=config.cluster,
        runner=config.runner,
        plan=plan,
        workers={"actor": PolicyActor, "env": EnvWorker, "rollout": RolloutWorker},
        told=Job(config=config, spaces=spaces, routes=plan.routes, deliveries=plan.deliveries),
        case=case,
        ledger=case.ledger(),
        course=PpoCourse(config),
        console=RUN_CONSOLE,
        saved={"actor": "policy.safetensors"},
    )


class PpoCourse:
    """Until the step budget or the return goal is reached. Begins when it is made."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._progress = Progress(began=time.perf_counter())

    def started(self, start_s: float) -> None:
        self._progress.start_s = start_s

    def train(self, loop: Loop, sinks: Sequence[Sink]) -> None:
        config, progress = self._config, self._progress
        steps = config.env.total_num_envs * config.algorithm.rollout_steps
        while progress.env_steps < config.runner.total_env_steps:
            numbers = loop.iteration(progress.iterations)
            progress.add(numbers, steps)
            numbers["env/steps_per_s"] = steps / numbers["time/iteration_s"]
            if progress.mean_return is not None:
                numbers["env/mean_return"] = progress.mean_return
            for sink in sinks:
                sink.write(progress.iterations, progress.env_steps, numbers)
            if progress.reached(config.runner.stop_at_return):
                break

    def summary(self, folder: Path) -> dict[str, Any]:
        return summary(self._progress, folder)

    def text(self, summary: Mapping[str, Any]) -> str:
        return summary_text(summary)
