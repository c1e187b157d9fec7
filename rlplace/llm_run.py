"""A run that trains a language model on a text task: its workers, what they are told, and when it is over."""

from __future__ import annotations

from rlplace.config import Config
from rlplace.placement.language.spec import role_of
from rlplace.placement.memory import memory_case, with_share
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import base_stage
from rlplace.report.sinks import SCORED_CONSOLE, TEXT_CONSOLE
from rlplace.report.summary import TEXT
from rlplace.run import JobSpec, RunDriver
from rlplace.workers.arguments import WorkerArguments
from rlplace.workers.worker import Worker


def llm_run(config: Config, layout: Plan) -> JobSpec:
    if config.cluster.launcher == "inline":
        import rlplace.models.causal_lm  # noqa: F401  now: threads that import transformers at once find half of it

    placement, case = layout.placement, memory_case(layout, config)
    return JobSpec(
        cluster=config.cluster,
        runner=config.runner,
        plan=layout,
        workers={component: worker_of(config, component) for component in placement.components},
        arguments=WorkerArguments(
            config=with_share(config, case),
            ranks={component: placement.world_size(component) for component in placement.components},
            deliveries=layout.deliveries,
        ),
        case=case,
        ledger=case.ledger(),
        driver=RunDriver(
            TEXT,
            iterations=config.runner.total_iterations,
            goal=config.runner.stop_at_return,
            eval_every=config.runner.eval_every,
        ),
        console=SCORED_CONSOLE if "infer" in map(base_stage, layout.schedule.stages) else TEXT_CONSOLE,
        saved={"actor": "policy"} | ({"critic": "critic"} if "critic" in placement.components else {}),
        iterations=config.runner.total_iterations,
    )


def worker_of(config: Config, component: str) -> type[Worker]:
    """What runs a component: by its role, a reward by what scores it."""
    from rlplace.workers.roles.actor import LmActor
    from rlplace.workers.roles.critic import Critic
    from rlplace.workers.roles.reference import ReferenceWorker
    from rlplace.workers.roles.reward import RewardEndpointWorker, RewardFunctionWorker, RewardModelWorker
    from rlplace.workers.roles.text_env import TextEnvWorker
    from rlplace.workers.roles.text_rollout import TextRolloutWorker

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
