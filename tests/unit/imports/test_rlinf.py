"""RLinf's files: placement lines as they are, two kinds of jobs, and what has no counterpart."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.config import read_config
from rlplace.errors import ConfigError
from rlplace.imports import Imported, import_settings, settings_of
from rlplace.placement import HybridComponentPlacement

EMBODIED: dict[str, Any] = {
    "cluster": {"num_nodes": 1, "component_placement": {"actor": "0-7", "env": "0-3", "rollout": "4-7"}},
    "runner": {"max_epochs": 10, "logger": {"log_path": "../results", "logger_backends": ["tensorboard", "wandb"]}},
    "algorithm": {"adv_type": "gae", "gamma": 0.99, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "update_epoch": 4},
    "env": {"enable_offload": True, "train": {"total_num_envs": 128, "max_steps_per_rollout_epoch": 80}},
    "rollout": {"backend": "huggingface", "enable_offload": True, "pipeline_stage_num": 2},
    "actor": {
        "enable_offload": True,
        "global_batch_size": 640,
        "seed": 7,
        "model": {"precision": "32"},
        "optim": {"lr": "1e-4", "clip_grad": 10.0},
    },
}


def bring(mapping: dict[str, Any], **options: int) -> Imported:
    return import_settings("rlinf", settings_of(mapping), **options)


def placed(block: dict[str, Any], nodes: int = 1, **more: Any) -> Imported:
    return bring({"cluster": {"num_nodes": nodes, "component_placement": block, **more}})


def block_of(imported: Imported) -> Any:
    cluster = imported.config["cluster"]
    assert isinstance(cluster, dict)
    return cluster["component_placement"]


def test_an_embodied_job_needs_only_its_simulator() -> None:
    imported = bring(EMBODIED)
    assert imported.missing == ("env.id",)
    assert not imported.findings
    assert imported.layout is not None
    config = read_config({**imported.config, "env": {**EMBODIED_ENV, "id": "InvertedPendulum-v5"}})
    assert config.cluster.component_placement == {"actor": "0-7", "env": "0-3", "rollout": "4-7"}
    assert (config.rollout.engine, config.rollout.pipeline_stage_num, config.rollout.enable_offload) == (
        "torch",
        2,
        True,
    )
    assert (config.actor.enable_offload, config.actor.compute, config.actor.optimizer.lr) == (True, "fp32", 1e-4)
    assert config.actor.optimizer.max_grad_norm == 10.0
    algorithm = config.algorithm
    assert (algorithm.name, algorithm.epochs) == ("ppo", 4)
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high) == (0.2, 0.2)
    assert (config.algorithm.rollout_steps, config.algorithm.num_minibatches) == (80, 16)
    assert (config.runner.total_iterations, config.runner.seed, config.runner.output_dir) == (10, 7, "../results")
    assert config.runner.sinks == ("console", "jsonl", "tensorboard")


EMBODIED_ENV = {"total_num_envs": 128, "enable_offload": True}


def test_a_job_without_simulators_is_one_with_language_models() -> None:
    imported = bring(
        {
            "cluster": {"num_nodes": 2, "component_placement": {"actor,critic,rollout,reward": "all"}},
            "runner": {"task_type": "reasoning", "seq_length": 12288},
            "algorithm": {"group_size": 8, "n_minibatches": 4, "adv_type": "gae"},
            "rollout": {"gpu_memory_utilization": 0.5, "tensor_parallel_size": 2},
            "data": {"rollout_batch_size": 512},
            "actor": {"offload_weight": True, "offload_optimizer": True, "offload_grad": True},
            "critic": {"offload_weight": True, "offload_optimizer": True, "offload_grad": True},
        }
    )
    assert block_of(imported) == {
        "actor,critic,reward": "all",
        "rollout": {"placement": "all", "accelerators_per_rank": 2},
    }
    assert imported.config["algorithm"] == {
        "name": "ppo",
        "sequence_length": 12288,
        "prompts": 512,
        "samples_per_prompt": 8,
        "train_batch": 1024,
    }
    assert imported.config["actor"] == {"model": {"kind": "causal_lm"}, "enable_offload": True}
    assert imported.config["critic"] == {"enable_offload": True}
    assert imported.config["rollout"] == {"gpu_memory_utilization": 0.5, "enable_offload": True}
    assert imported.layout is not None
    assert (imported.topology.num_accelerators, imported.layout.savings.used) == (16, 16)


@pytest.mark.parametrize(
    "block",
    [
        {"actor": "0-7", "env": "0-3:0-7", "rollout": "4-7"},
        {"actor, env, rollout": "0-7"},
        {"actor": "all", "env": 0, "rollout": "1-3,5-7"},
        {"env": "0-3", "rollout": [4, "5-7"], "actor": "0-7"},
    ],
)
def test_lines_go_over_as_they_are(block: dict[str, Any]) -> None:
    imported = placed(block)
    assert block_of(imported) == block
    HybridComponentPlacement(imported.config, imported.topology)


def test_node_groups_go_over_as_they_are() -> None:
    groups = [{"label": "a800", "node_ranks": "0"}, {"label": "4090", "node_ranks": "1"}]
    block = {
        "actor": {"node_group": "a800", "placement": "0-7"},
        "rollout": {"node_group": "4090", "placement": "0-7"},
        "env": {"node_group": "4090", "placement": "0-3"},
    }
    imported = placed(block, 2, node_groups=groups)
    cluster = imported.config["cluster"]
    assert isinstance(cluster, dict)
    assert cluster["node_groups"] == groups
    placement = HybridComponentPlacement(imported.config, imported.topology)
    assert str(placement.accelerators("env")) == "8-11"


@pytest.mark.parametrize(
    ("block", "nodes", "options", "width"),
    [
        ({"actor,env,rollout": "0-3"}, 1, {}, 8),
        ({"actor,env,rollout": "0-15"}, 1, {}, 16),
        ({"actor,env,rollout": "0-9"}, 1, {}, 10),
        ({"actor,env,rollout": "all"}, 2, {}, 8),
        ({"actor,env,rollout": "0-3"}, 1, {"per_node": 4}, 4),
    ],
)
def test_machines_are_as_wide_as_the_numbers_need(
    block: dict[str, Any], nodes: int, options: dict[str, int], width: int
) -> None:
    imported = bring({"cluster": {"num_nodes": nodes, "component_placement": block}}, **options)
    assert [n.accelerators for n in imported.topology.nodes] == [width] * nodes


def test_inference_is_the_actors_own_work() -> None:
    imported = placed({"actor,inference": "0-7", "env": "0-3", "rollout": "4-7", "invironment": "0"})
    assert block_of(imported) == {"actor": "0-7", "env": "0-3", "rollout": "4-7"}
    assert [p.code for p in imported.findings] == ["import-component"]
    alone = placed({"actor": "0-7", "inference": "0-3", "env": "0-3", "rollout": "4-7"})
    (result,) = (r for r in alone.results if "inference" in r.setting.key)
    assert result.outcome == "unmapped"
    assert "stage infer" in result.text


def test_components_that_stay_are_written_down() -> None:
    imported = bring({**EMBODIED, "actor": {"enable_offload": False}})
    cluster = imported.config["cluster"]
    assert isinstance(cluster, dict)
    assert cluster["allow_resident"] == ["actor"]
    assert imported.layout is not None


def test_a_placement_that_does_not_hold_is_reported_and_still_written() -> None:
    imported = placed({"actor": "0-7", "env": "0-3", "rollout": "4--7"})
    assert imported.layout is None
    assert imported.findings
    assert block_of(imported)["rollout"] == "4--7"


def test_a_misspelt_key_is_not_taken_for_one_that_has_no_counterpart() -> None:
    imported = bring({**EMBODIED, "actor": {"enable_ofload": True}})
    (result,) = (r for r in imported.results if r.setting.key == "actor.enable_ofload")
    assert (result.outcome, result.text) == ("unknown", "actor.enable_offload")


def test_uneven_steps_are_reported() -> None:
    imported = bring({**EMBODIED, "actor": {"enable_offload": True, "global_batch_size": 600}})
    assert [p.code for p in imported.findings] == ["import-batches"]
    assert imported.findings[0].fix == "actor.global_batch_size: 512"


def test_parts_of_an_actor_move_together() -> None:
    some = bring({**EMBODIED, "actor": {"offload_weight": True, "offload_grad": False}})
    results = [r for r in some.results if "offload" in r.setting.key and r.setting.key.startswith("actor")]
    assert all(r.outcome == "unmapped" and "together" in r.text for r in results)
    every = bring({**EMBODIED, "actor": {"offload_weight": True, "offload_grad": True, "offload_optimizer": True}})
    assert every.config["actor"] == {"enable_offload": True}
    assert any(r.outcome == "equal" and r.text == "actor.enable_offload: true" for r in every.results)


def test_nothing_placed_is_refused() -> None:
    with pytest.raises(ConfigError, match="import-empty"):
        bring({"cluster": {"num_nodes": 1}})
    with pytest.raises(ConfigError, match="import-value"):
        bring({"cluster": {"num_nodes": "x", "component_placement": {"actor": "0"}}})
