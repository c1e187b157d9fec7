"""Command lines of an 8B that trains on large batches under published rates, for benchmarks of predictions."""

from __future__ import annotations

from collections.abc import Mapping

_PLACE = "cluster.component_placement."
_REFERENCE = (
    "algorithm.kl_coef=0.001",
    _PLACE + "reference={same_as: actor}",
    "reference.enable_offload=true",
)
_PPO = (
    *_REFERENCE,
    "algorithm.name=ppo",
    "algorithm.gae_lambda=1.0",
    _PLACE + "critic={same_as: actor}",
    "critic.weights=bf16",
    "critic.compute=bf16",
    "critic.checkpointing=true",
    "critic.token_budget=16384",
    "critic.optimizer.kind=adamw_master",
    "critic.enable_offload=true",
)


def batch_jobs(accelerators: int) -> Mapping[str, tuple[str, ...]]:
    """Return name of a job -> its command line, with 16 samples of 512 prompts or more, on H100.

    `grpo`: GRPO. `reference`: GRPO with a reference. `ppo`: PPO with a critic and a reference. Scorers and critic are
    on the actor's accelerators. `ahead`: GRPO with generation one version ahead, on half of the accelerators.
    """
    nodes = max(1, accelerators // 8)
    half = accelerators // 2
    grpo = (
        "grpo_qwen3_8b",
        "profile=published",
        "algorithm.samples_per_prompt=16",
        f"algorithm.prompts={max(512, 2 * accelerators)}",
        f"cluster.num_nodes={nodes}",
        f"cluster.nodes.0.count={nodes}",
    )
    ahead = (
        "algorithm.max_staleness=1",
        f"{_PLACE}actor=0-{half - 1}",
        f"{_PLACE}rollout={half}-{accelerators - 1}",
    )
    return {
        "grpo": grpo,
        "reference": (*grpo, *_REFERENCE),
        "ppo": (*grpo, *_PPO),
        "ahead": (*grpo, *ahead),
    }
