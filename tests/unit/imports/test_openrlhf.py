"""OpenRLHF's own recipes, with the counts that its documents give and the rules that its trainer asserts."""

from __future__ import annotations

import pytest

from rlplace.errors import ConfigError
from rlplace.imports import Imported, import_words
from rlplace.placement import HybridComponentPlacement

LLAMA_8B = """
python3 -m openrlhf.cli.train_ppo_ray \\
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8 \\
   --critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 \\
   --vllm_num_engines 8 --vllm_tensor_parallel_size 1 --colocate_all_models --vllm_gpu_memory_utilization 0.6 \\
   --micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 1024 \\
   --prompt_max_len 1024 --generate_max_len 1024 --zero_stage 3 --bf16 --init_kl_coef 0.01 \\
   --packing_samples --gradient_checkpointing --vllm_enable_sleep --deepspeed_enable_sleep
"""
DOTTED = """
python3 -m openrlhf.cli.train_ppo_ray \\
   --ref.num_nodes 1 --ref.num_gpus_per_node 8 --reward.num_nodes 1 --reward.num_gpus_per_node 8 \\
   --critic.num_nodes 1 --critic.num_gpus_per_node 8 --actor.num_nodes 1 --actor.num_gpus_per_node 8 \\
   --vllm.num_engines 8 --vllm.tensor_parallel_size 1 --train.colocate_all --vllm.gpu_memory_utilization 0.6 \\
   --train.micro_batch_size 8 --train.batch_size 128 --rollout.micro_batch_size 16 --rollout.batch_size 1024 \\
   --data.max_len 2048 --ds.zero_stage 3 --ds.param_dtype bf16 --algo.kl.init_coef 0.01 \\
   --ds.packing_samples --actor.gradient_checkpointing_enable --vllm.enable_sleep --ds.enable_sleep
"""
SIZES_70B = (
    "--actor_num_nodes 2 --critic_num_nodes 2 --ref_num_nodes 1 --reward_num_nodes 1 --zero_stage 3 --bf16 "
    "--vllm_num_engines 4 --vllm_tensor_parallel_size 4 "
)


def bring(text: str, per_node: int = 0) -> Imported:
    return import_words("openrlhf", [text], per_node)


def lines(imported: Imported) -> dict[str, object]:
    cluster = imported.config["cluster"]
    assert isinstance(cluster, dict)
    # The config alone must give the placement, without the importer.
    placement = HybridComponentPlacement(imported.config, imported.topology)
    assert (cluster["num_nodes"], cluster["accelerators_per_node"]) == (
        imported.topology.num_nodes,
        imported.topology.nodes[0].accelerators,
    )
    return {name: str(placement.accelerators(name)) for name in placement.components}


def codes(imported: Imported) -> list[str]:
    return [p.code for p in imported.findings]


@pytest.mark.parametrize("text", [LLAMA_8B, DOTTED], ids=["old spelling", "dotted spelling"])
def test_hybrid_engine_on_eight(text: str) -> None:
    imported = bring(text)
    assert lines(imported) == dict.fromkeys(("actor", "critic", "reference", "reward", "rollout"), "0-7")
    assert imported.config == {
        "cluster": {
            "num_nodes": 1,
            "accelerators_per_node": 8,
            "component_placement": dict.fromkeys(("actor", "critic", "reference", "reward", "rollout"), "0-7"),
            "allow_resident": ["reference", "reward"],
        },
        "algorithm": (LENGTHS if "--prompt_max_len" in text else {"sequence_length": 2048} | LENGTHS) | LEARNING,
        "actor": TRAINED | {"model": {"kind": "causal_lm"}},
        "critic": TRAINED | {"optimizer": {"kind": "adamw_master", "lr": 9e-6, "beta2": 0.95}},
        "reference": {"micro_batch": 16},
        "reward": {"micro_batch": 16},
        "rollout": {"gpu_memory_utilization": 0.6, "sleep_level": 1, "enable_offload": True},
        "runner": {"seed": 42},
    }
    assert imported.missing == ("env.task", "actor.model", "cluster.component_placement.env")
    assert not imported.findings
    assert imported.layout is not None
    assert (imported.layout.savings.used, imported.layout.savings.dedicated) == (8, 40)


LENGTHS = {"max_prompt_length": 1024, "max_new_tokens": 1024}
LEARNING = {
    "name": "ppo",
    "prompts": 1024,
    "train_batch": 128,
    "tis_cap": None,
    "gae_lambda": 1.0,
    "value_clip": 0.5,
    "kl_coef": 0.01,
    "reward_clip": 10.0,
}
TRAINED = {
    "optimizer": {"kind": "adamw_master", "beta2": 0.95},
    "micro_batch": 8,
    "weights": "bf16",
    "compute": "bf16",
    "zero_stage": 3,
    "checkpointing": True,
    "enable_offload": True,
}


def test_each_flag_has_exactly_one_result() -> None:
    more = " --use_wandb key --colocate_all_modls --vllm_sync_backend nccl --dynamic_filtering"
    imported = bring(LLAMA_8B.rstrip() + more)
    assert len(imported.results) == LLAMA_8B.count("--") + 4
    by_outcome: dict[str, list[str]] = {}
    for result in imported.results:
        by_outcome.setdefault(result.outcome, []).append(f"{result.setting}")
    del by_outcome["equal"]
    assert by_outcome == {
        "implied": ["--packing_samples", "--vllm_sync_backend nccl"],
        "unmapped": ["--use_wandb key"],
        "unknown": ["--colocate_all_modls"],
        "differs": ["--dynamic_filtering"],  # dropped groups are not replaced here
    }
    (unknown,) = (r for r in imported.results if r.outcome == "unknown")
    assert unknown.text == "colocate_all_models"


def test_seventy_billion_on_48_against_64() -> None:
    dedicated = bring(SIZES_70B)
    assert lines(dedicated) == {
        "actor": "0-15",
        "critic": "16-31",
        "reference": "32-39",
        "reward": "40-47",
        "rollout": "48-63",
    }
    assert dedicated.layout is not None
    assert (dedicated.topology.num_accelerators, dedicated.layout.savings.saved) == (64, 0)
    assert not dedicated.findings

    shared = bring(SIZES_70B + "--colocate_actor_ref --colocate_critic_reward")
    assert lines(shared) == {
        "actor": "0-15",
        "critic": "16-31",
        "reference": "0-7",
        "reward": "16-23",
        "rollout": "32-47",
    }
    assert shared.layout is not None
    assert (shared.layout.savings.used, shared.layout.savings.dedicated) == (48, 64)
    # Its own rule, equal sizes for the two that share, does not hold for 16 and 8.
    assert codes(shared) == ["import-partners", "import-partners"]
    assert shared.findings[0].fix == "--ref.num_nodes 2 --ref.num_gpus_per_node 8        (or keep both sizes here)"


def test_seventy_billion_with_equal_partners_or_more_engines_is_80() -> None:
    grown = SIZES_70B.replace("--ref_num_nodes 1 --reward_num_nodes 1", "--ref_num_nodes 2 --reward_num_nodes 2")
    equal = bring(grown + "--colocate_actor_ref --colocate_critic_reward")
    assert equal.layout is not None
    assert (equal.layout.savings.used, equal.layout.savings.dedicated) == (48, 80)
    assert not equal.findings
    engines = bring(SIZES_70B.replace("--vllm_num_engines 4", "--vllm_num_engines 8"))
    assert engines.topology.num_accelerators == 80


def test_colocated_engines_must_fill_the_actor() -> None:
    imported = bring(
        "--actor_num_nodes 2 --ref_num_nodes 2 --vllm_num_engines 3 --vllm_tensor_parallel_size 4 --colocate_all_models"
    )
    (problem,) = (p for p in imported.findings if p.code == "import-engines")
    assert problem.what == "3 engines x 4 = 12 accelerators, and the actor has 16"
    assert problem.got == "--vllm_num_engines 3 --vllm_tensor_parallel_size 4"
    assert problem.fix == "--vllm.num_engines 4 --vllm.tensor_parallel_size 4"
    assert lines(imported)["rollout"] == "0-11"


def test_four_engines_of_four_on_sixteen() -> None:
    flags = "--actor_num_nodes 2 --ref_num_nodes 2 --critic_num_nodes 2 --reward_num_nodes 2 --colocate_all_models"
    imported = bring(f"{flags} --vllm_num_engines 4 --vllm_tensor_parallel_size 4")
    assert imported.layout is not None
    assert imported.layout.placement.spec("rollout").num_copies == 4
    assert imported.layout.placement.mode == "collocated"


def test_a_role_larger_than_the_pool() -> None:
    imported = bring("--critic_num_nodes 2 --colocate_all_models --vllm_num_engines 8")
    assert codes(imported) == ["import-partners"]
    assert imported.findings[0].what == "critic asks for 16 accelerators of 8"
    assert imported.topology.num_nodes == 2


@pytest.mark.parametrize(
    ("flags", "absent", "why"),
    [
        ("--advantage_estimator group_norm", "critic", "there is no critic: the estimator group_norm needs no values"),
        ("--init_kl_coef 0", "reference", "there is no reference: nothing is compared with it while init_kl_coef is 0"),
        ("--agent_func_path x.py", "reward", "there is no reward: the agent scores"),
    ],
)
def test_models_that_a_job_does_not_have(flags: str, absent: str, why: str) -> None:
    name = {"reference": "ref"}.get(absent, absent)
    imported = bring(f"{flags} --vllm_num_engines 2 --{name}_num_nodes 3")
    assert absent not in lines(imported)
    (result,) = (r for r in imported.results if str(r.setting) == f"--{name}_num_nodes 3")
    assert (result.outcome, result.text) == ("unmapped", why)


def test_without_engines_the_actor_generates() -> None:
    imported = bring("--actor_num_gpus_per_node 4 --init_kl_coef 0 --advantage_estimator rloo --remote_rm_url x")
    assert lines(imported) == {"actor": "0-3", "rollout": "0-3", "reward": ""}


def test_engines_stay_on_one_node() -> None:
    imported = bring(
        "--actor_num_gpus_per_node 6 --init_kl_coef 0 --advantage_estimator rloo --remote_rm_url x "
        "--vllm_num_engines 2 --vllm_tensor_parallel_size 4",
        per_node=8,
    )
    assert lines(imported) == {"actor": "0-5", "rollout": "8-15", "reward": ""}


def test_an_engine_larger_than_a_node_says_so() -> None:
    imported = bring("--vllm_num_engines 1 --vllm_tensor_parallel_size 16")
    cluster = imported.config["cluster"]
    assert isinstance(cluster, dict)
    assert cluster["component_placement"]["rollout"] == {
        "placement": "32-47",
        "tensor_parallel_size": 16,
        "tensor_parallel_across_nodes": True,
    }
    assert imported.layout is not None


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--vllm_enable_sleep", "import-sleep"),
        ("--vllm_enable_sleep --async_train --colocate_all_models", "import-sleep"),
        ("--rollout_batch_size 8 --micro_rollout_batch_size 8 --train_batch_size 8", "import-batches"),
        ("--train_batch_size 100", "uneven-batches"),
        ("--ds_tensor_parallel_size 3", "import-counts"),
        ("--vllm_gpu_memory_utilization 1.5", "out-of-bounds"),
    ],
)
def test_what_does_not_hold_is_reported(flags: str, code: str) -> None:
    imported = bring(f"{flags} --vllm_num_engines 8")
    assert code in codes(imported)
    assert lines(imported)["actor"] == "0-7"


def test_sleep_without_sharing_does_nothing() -> None:
    imported = bring("--vllm_enable_sleep --vllm_num_engines 8")
    (result,) = (r for r in imported.results if "sleep" in str(r.setting))
    assert result.outcome == "unmapped"
    assert "rollout" not in imported.config or "enable_offload" not in str(imported.config["rollout"])


def test_old_offload_flag_sets_reference_and_reward() -> None:
    flags = "--colocate_all_models --vllm_num_engines 8 --vllm_enable_sleep --deepspeed_enable_sleep"
    imported = bring(f"{flags} --ref_reward_offload")
    assert imported.config["reference"] == imported.config["reward"] == {"enable_offload": True}
    cluster = imported.config["cluster"]
    assert isinstance(cluster, dict)
    assert "allow_resident" not in cluster


def test_other_values() -> None:
    imported = bring("--param_dtype fp16 --lora_rank 0 --max_len 4096 --prompt_max_len 9 --adam_offload")
    assert imported.config["actor"] == {
        "weights": "fp16",
        "compute": "fp16",
        "model": {"kind": "causal_lm"},
        "optimizer": {"kind": "adamw_master", "beta2": 0.95, "on_host": True},
        "zero_stage": 2,
        "checkpointing": False,
    }
    algorithm = imported.config["algorithm"]
    assert isinstance(algorithm, dict)
    assert algorithm["sequence_length"] == 4096
    assert [r.outcome for r in imported.results].count("implied") == 2


def test_values_that_cannot_be_read_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        bring("--actor_num_nodes two --critic_num_gpus_per_node 0 --init_kl_coef $KL")
    assert caught.value.codes == ("import-value",) * 3
    assert {p.got for p in caught.value.problems} == {
        "--actor_num_nodes two",
        "--critic_num_gpus_per_node 0",
        "--init_kl_coef '$KL'",
    }
    assert "set nowhere" in str(next(p.why for p in caught.value.problems if "$KL" in str(p.got)))
