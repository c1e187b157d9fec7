"""NeMo-RL: its chain of files, its placement, and what takes more than one of its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlplace.errors import ConfigError
from rlplace.imports import Imported, import_words

BASE = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, normalize_rewards: true, seed: 42}
loss_fn: {reference_policy_kl_penalty: 0.01, reference_policy_kl_type: k3, token_level_loss: true}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 512
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, activation_checkpointing: false}
  megatron_cfg: {enabled: false}
  dynamic_batching: {enabled: true, train_mb_tokens: "${mul:${..max_total_sequence_length}, 4}"}
  optimizer: {kwargs: {lr: 5.0e-6, eps: 1e-8, betas: [0.9, 0.99]}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 13}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}
  generation:
    backend: vllm
    temperature: 0.8
    val_temperature: ${.temperature}
    max_new_tokens: ${policy.max_total_sequence_length}
    vllm_cfg: {tensor_parallel_size: 1, gpu_memory_utilization: 0.6}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
checkpointing: {enabled: true, save_period: 10}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


def bring(folder: Path, text: str, *words: str) -> Imported:
    """Return the import of a file over BASE."""
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    file = folder / "own.yaml"
    file.write_text(f"defaults: base.yaml\n{text}", encoding="utf-8")
    return import_words("nemo_rl", [str(file), *words])


def at(imported: Imported, path: str) -> Any:
    value: Any = imported.config
    for name in path.split("."):
        value = value.get(name, {})
    return value


def test_a_file_lies_over_those_that_it_names(tmp_path: Path) -> None:
    imported = bring(
        tmp_path,
        "policy: {max_total_sequence_length: 4096}\n"
        "loss_fn: {_override_: true, reference_policy_kl_penalty: 0}\n",
        "grpo.seed=7",
    )
    assert at(imported, "algorithm.prompts") == 32
    assert at(imported, "algorithm.sequence_length") == 4096
    assert at(imported, "actor.token_budget") == 4 * 4096
    assert at(imported, "runner.seed") == 7
    assert at(imported, "runner.eval_temperature") == 0.8
    assert at(imported, "cluster.component_placement.reference") == {}
    seed = next(r for r in imported.results if r.setting.key == "grpo.seed")
    assert "base.yaml" in str(seed.setting.source)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("defaults: nowhere.yaml\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        import_words("nemo_rl", [str(file)])
    file.write_text("defaults: own.yaml\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="without an end"):
        import_words("nemo_rl", [str(file)])


def test_a_file_with_nearly_the_name_is_offered(tmp_path: Path) -> None:
    near = tmp_path / "base.yaml"
    near.write_text("{}", encoding="utf-8")
    file = tmp_path / "own.yaml"
    file.write_text("defaults: bse.yaml\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        import_words("nemo_rl", [str(file)])
    (found,) = caught.value.problems
    assert (found.code, found.fix) == ("import-source", str(near))


COLOCATED = "policy: {generation: {colocated: {enabled: false, resources: "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"actor": "0-7", "reference": "0-7", "rollout": "0-7"}),
        (
            COLOCATED + "{gpus_per_node: 2}}}}\n",
            {"actor": "0-5", "reference": "0-5", "rollout": "6-7"},
        ),
        (
            COLOCATED
            + "{gpus_per_node: 8, num_nodes: 1}}}}\ncluster: {num_nodes: 3}\n",
            {"actor": "0-15", "reference": "0-15", "rollout": "16-23"},
        ),
        (
            "policy: {generation: {vllm_cfg: {tensor_parallel_size: 4}}}\n",
            {
                "actor": "0-7",
                "reference": "0-7",
                "rollout": {"placement": "0-7", "accelerators_per_rank": 4},
            },
        ),
        (
            "policy: {megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, context_parallel_size: 2}}\n"
            "loss_fn: {reference_policy_kl_penalty: 0}\n",
            {
                "actor": {
                    "placement": "0-7",
                    "tensor_parallel_size": 2,
                    "context_parallel_size": 2,
                },
                "rollout": "0-7",
            },
        ),
        (
            "env: {reward_model: {resources: {gpus_per_node: 1, num_nodes: 1}}}\n",
            {"actor": "0-6", "reference": "0-6", "rollout": "0-6", "reward": "7"},
        ),
    ],
)
def test_placement(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    imported = bring(tmp_path, text)
    assert at(imported, "cluster.component_placement") == expected
    assert imported.layout is not None
    shared = "colocated" not in text
    assert bool(at(imported, "rollout.enable_offload")) is shared


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "",
            {
                "algorithm.name": "grpo",
                "algorithm.train_batch": 512,
                "algorithm.loss": "token",
                "algorithm.kl_coef": 0.01,
                "algorithm.kl_in": "loss",
                "algorithm.tis_cap": None,
                "actor.micro_batch": 4,
                "actor.optimizer.lr": 5e-6,
                "actor.optimizer.eps": 1e-8,
                "actor.optimizer.beta2": 0.99,
                "actor.optimizer.warmup_steps": 13,
                "checkpoint.every": 10,
            },
        ),
        ("grpo: {normalize_rewards: false}\n", {"algorithm.name": "dr_grpo"}),
        (
            "grpo: {normalize_rewards: false, use_leave_one_out_baseline: true}\n",
            {"algorithm.name": "rloo"},
        ),
        (
            "grpo: {async_grpo: {enabled: true, max_trajectory_age_steps: 2}}\n",
            {"algorithm.max_staleness": 2},
        ),
        (
            "loss_fn: {use_importance_sampling_correction: true, truncated_importance_sampling_type: icepop, "
            "truncated_importance_sampling_ratio: 5.0, truncated_importance_sampling_ratio_min: 0.5}\n",
            {
                "algorithm.tis_cap": 5.0,
                "algorithm.tis_above": "drop",
                "algorithm.tis_floor": 0.5,
            },
        ),
        ("loss_fn: {token_level_loss: false}\n", {"algorithm.loss": "sequence"}),
        (
            "policy: {megatron_cfg: {enabled: true, activation_checkpointing: true, optimizer: {lr: 1.0e-6}, "
            "scheduler: {lr_warmup_iters: 5, lr_decay_style: cosine}, peft: {enabled: true, dim: 4, alpha: 8}}}\n",
            {
                "actor.weights": "bf16",
                "actor.checkpointing": True,
                "actor.lora_rank": 4,
                "actor.optimizer": {
                    "kind": "adamw_master",
                    "lr": 1e-6,
                    "warmup_steps": 5,
                    "schedule": "cosine",
                },
            },
        ),
    ],
)
def test_values(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    imported = bring(tmp_path, text)
    assert {key: at(imported, key) for key in expected} == expected


def test_ppo_has_a_critic(tmp_path: Path) -> None:
    text = """
ppo: {num_prompts_per_step: 8, num_generations_per_prompt: 2, adv_estimator: {name: gae, gae_lambda: 0.95}}
value: {model_name: Qwen/Qwen2.5-1.5B, train_micro_batch_size: 2, optimizer: {kwargs: {lr: 1.0e-5}}}
"""
    imported = bring(tmp_path, text)
    assert at(imported, "algorithm.name") == "ppo"
    assert at(imported, "algorithm.gae_lambda") == 0.95
    assert at(imported, "cluster.component_placement.critic") == "0-7"
    assert at(imported, "critic.optimizer.lr") == 1e-5


def test_a_clip_distance_of_one_is_no_lower_bound(tmp_path: Path) -> None:
    imported = bring(tmp_path, "loss_fn: {ratio_clip_min: 1.0, ratio_clip_max: 4.0}\n")
    assert at(imported, "algorithm.clip_ratio_low") == 0.99
    assert at(imported, "algorithm.clip_ratio_high") == 4.0
