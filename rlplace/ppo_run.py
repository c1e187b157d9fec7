"""A run that learns from simulators by PPO: its workers, what they are told, and when it is over."""

from __future__ import annotations

from rlplace.config import Config
from rlplace.envs import describe
from rlplace.placement import Plan
from rlplace.placement.memory import memory_case
from rlplace.report.sinks import RUN_CONSOLE
from rlplace.report.summary import SIMULATED
from rlplace.run import JobSpec, RunDriver
from rlplace.workers.arguments import SimulatorArguments, WorkerArguments


def ppo_run(config: Config, plan: Plan) -> JobSpec:
    from rlplace.workers.roles.actor import PolicyActor
    from rlplace.workers.roles.env import VectorEnvWorker
    from rlplace.workers.roles.rollout import VectorRolloutWorker

    steps = config.simulator_env.total_num_envs * config.algorithm.rollout_steps
    spaces = describe(config.simulator_env)
    case = memory_case(plan, config, spaces)
    return JobSpec(
        cluster=config.cluster,
        runner=config.runner,
        plan=plan,
        workers={"actor": PolicyActor, "env": VectorEnvWorker, "rollout": VectorRolloutWorker},
        arguments=WorkerArguments(
            config=config,
            ranks={component: plan.placement.world_size(component) for component in plan.placement.components},
            deliveries=plan.deliveries,
            simulator=SimulatorArguments(spaces=spaces, routes=plan.row_routes),
        ),
        case=case,
        ledger=case.ledger(),
        driver=RunDriver(
            SIMULATED,
            iterations=config.runner.total_iterations,
            goal=config.runner.stop_at_return,
            env_steps=steps,
        ),
        console=RUN_CONSOLE,
        saved={"actor": "policy.safetensors"},
    )
