"""From a config and its plan to the specification of a job: its workers, their arguments, and when it is over."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

from rlplace.config import ClusterConfig, Config, RunnerConfig
from rlplace.envs import describe
from rlplace.loop import Loop
from rlplace.placement.language.spec import role_of
from rlplace.placement.memory.case import memory_case, with_share
from rlplace.placement.memory.ledger import MemoryCase, MemoryLedger
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import base_stage
from rlplace.report.sinks import RUN_CONSOLE, SCORED_CONSOLE, TEXT_CONSOLE, Console, Sink
from rlplace.report.summary import SIMULATED, TEXT, Measures, Progress
from rlplace.workers.arguments import SimulatorArguments, WorkerArguments
from rlplace.workers.worker import Worker


class RunDriver:
    """Runs iterations until the last one or the goal, and sums the run up. Its clock starts when it is made."""

    def __init__(
        self,
        measures: Measures,
        *,
        iterations: int,
        goal: float | None,
        env_steps: int | None = None,
        eval_every: int = 0,
    ) -> None:
        """`env_steps` of an iteration; None: its steps are the answers that the engines count.

        `eval_every`: iterations between evaluations on held-out prompts, 0 for none.
        """
        self.progress = Progress(measures=measures, began=time.perf_counter())
        self._iterations, self._goal, self._env_steps, self._eval_every = iterations, goal, env_steps, eval_every

    def train(self, loop: Loop, sinks: Sequence[Sink]) -> None:
        progress = self.progress
        while progress.iterations < self._iterations:
            at = progress.iterations
            numbers = loop.iteration(at, evaluate=bool(self._eval_every) and at % self._eval_every == 0)
            steps = int(numbers.get("rollout/answers", 0)) if self._env_steps is None else self._env_steps
            progress.add(numbers, steps)
            if self._env_steps is not None:
                numbers["env/steps_per_s"] = steps / numbers["time/iteration_s"]
                if progress.mean_return is not None:
                    numbers["env/mean_return"] = progress.mean_return
            for sink in sinks:
                sink.write(progress.iterations, progress.steps, numbers)
            if progress.reached(self._goal):
                break
        if self._eval_every:
            progress.add_evaluation(loop.evaluate(progress.iterations), version=progress.iterations)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Everything that `run` needs of a job; `job_spec` makes it."""

    cluster: ClusterConfig
    runner: RunnerConfig
    plan: Plan
    workers: Mapping[str, type[Worker]]  # by component
    arguments: WorkerArguments  # the `config` of every worker
    case: MemoryCase
    ledger: MemoryLedger  # of the case
    driver: RunDriver
    console: Console
    saved: Mapping[str, str]  # component -> name of what is saved of it in the end


def job_spec(config: Config, plan: Plan) -> JobSpec:
    """Choose workers, arguments, measures and console of a job by the kind of its model."""
    simulated, placement, runner = config.kind == "mlp", plan.placement, config.runner
    if not simulated and config.cluster.launcher == "inline":
        import rlplace.models.causal_lm  # noqa: F401  now: threads that import transformers at once find half of it

    spaces = describe(config.simulator_env) if simulated else None
    case = memory_case(plan, config, spaces)
    scored = "infer" in map(base_stage, plan.schedule.stages)
    saved = {"actor": "policy.safetensors" if simulated else "policy"}
    return JobSpec(
        cluster=config.cluster,
        runner=runner,
        plan=plan,
        workers={component: worker_of(config, component) for component in placement.components},
        arguments=WorkerArguments(
            config=config if simulated else with_share(config, case),
            ranks={component: placement.world_size(component) for component in placement.components},
            deliveries=plan.deliveries,
            simulator=None if spaces is None else SimulatorArguments(spaces=spaces, routes=plan.row_routes),
        ),
        case=case,
        ledger=case.ledger(),
        driver=RunDriver(
            SIMULATED if simulated else TEXT,
            iterations=runner.total_iterations,
            goal=runner.stop_at_return,
            env_steps=config.simulator_env.total_num_envs * config.algorithm.rollout_steps if simulated else None,
            eval_every=0 if simulated else runner.eval_every,
        ),
        console=RUN_CONSOLE if simulated else SCORED_CONSOLE if scored else TEXT_CONSOLE,
        saved=saved | ({"critic": "critic"} if "critic" in placement.components else {}),
    )


def worker_of(config: Config, component: str) -> type[Worker]:
    """Return the worker class of a component: by role and kind of model, of a reward by how it scores."""
    from rlplace.workers.roles.actor import LmActor, PolicyActor
    from rlplace.workers.roles.critic import Critic
    from rlplace.workers.roles.env import VectorEnvWorker
    from rlplace.workers.roles.reference import ReferenceWorker
    from rlplace.workers.roles.reward import RewardEndpointWorker, RewardFunctionWorker, RewardModelWorker
    from rlplace.workers.roles.rollout import VectorRolloutWorker
    from rlplace.workers.roles.text_env import TextEnvWorker
    from rlplace.workers.roles.text_rollout import TextRolloutWorker

    role = role_of(component)
    if role == "reward":
        rewards: dict[str, type[Worker]] = {
            "model": RewardModelWorker,
            "function": RewardFunctionWorker,
            "url": RewardEndpointWorker,
        }
        return rewards[config.reward_of(component).kind]
    workers: dict[str, type[Worker]] = {"critic": Critic, "reference": ReferenceWorker}
    if config.kind == "mlp":
        workers |= {"actor": PolicyActor, "env": VectorEnvWorker, "rollout": VectorRolloutWorker}
    else:
        workers |= {"actor": LmActor, "env": TextEnvWorker, "rollout": TextRolloutWorker}
    return workers[role]
