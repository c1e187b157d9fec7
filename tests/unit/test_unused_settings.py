"""Settings of language models that have no effect are told by the plan, and those that have one are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import rlplace

GRPO = "hybrid_grpo_llm"
PPO = "rlhf_tiny"


@pytest.mark.parametrize(
    ("job", "words", "keys"),
    [
        (GRPO, (), []),
        (PPO, (), []),
        (GRPO, ("+algorithm.gamma=0.9",), ["algorithm.gamma"]),
        (GRPO, ("+algorithm.gae_lambda=0.5",), ["algorithm.gae_lambda"]),
        (GRPO, ("+algorithm.value_clip=null",), ["algorithm.value_clip"]),
        (PPO, ("algorithm.gamma=0.9", "algorithm.gae_lambda=0.5"), []),
        (PPO, ("+algorithm.value_coef=0.5",), ["algorithm.value_coef"]),
        (GRPO, ("+algorithm.kl_in=loss",), ["algorithm.kl_in"]),
        (PPO, ("algorithm.kl_in=loss", "algorithm.kl_estimator=k3"), []),
        (GRPO, ("+algorithm.kl_estimator=k2",), ["algorithm.kl_estimator"]),
        (PPO, ("algorithm.kl_coef=0", "algorithm.kl_estimator=k2"), []),
        (PPO, ("algorithm.kl_horizon=64",), ["algorithm.kl_horizon"]),
        (PPO, ("algorithm.kl_horizon=64", "algorithm.kl_target=6"), []),
        (GRPO, ("algorithm.refills=5",), ["algorithm.refills"]),
        (GRPO, ("algorithm.refills=5", "algorithm.dynamic_sampling=true"), []),
        (
            GRPO,
            ("+actor.optimizer.min_lr_ratio=0.1",),
            ["actor.optimizer.min_lr_ratio"],
        ),
        (
            GRPO,
            ("+actor.optimizer.min_lr_ratio=0.1", "actor.optimizer.schedule=cosine"),
            [],
        ),
    ],
)
def test_settings_without_effect_are_told(
    job: str, words: Sequence[str], keys: list[str]
) -> None:
    plan = rlplace.plan(job, ["model@actor.model=tiny", *words])
    told = [each.key for each in plan.plan.warnings if each.code == "unused-setting"]
    assert told == keys
