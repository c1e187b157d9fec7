"""Every library in its own way of placing models, and what takes more than one of its settings."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.errors import ConfigError
from rlplace.imports import (
    Imported,
    Setting,
    import_settings,
    import_words,
    render_yaml,
    settings_of,
)
from rlplace.placement import HybridComponentPlacement
from rlplace.runtime.prepare import prepare


def bring(library: str, text: str, per_node: int = 0) -> Imported:
    return import_words(library, [text], per_node)


def spots(imported: Imported) -> dict[str, str]:
    """Component -> accelerators, by the config alone, without the importer."""
    placement = HybridComponentPlacement(imported.config, imported.topology)
    nodes = imported.topology.nodes
    assert (
        at(imported, "cluster.num_nodes"),
        at(imported, "cluster.accelerators_per_node"),
    ) == (
        len(nodes),
        nodes[0].accelerators,
    )
    return {name: str(placement.accelerators(name)) for name in placement.components}


def at(imported: Imported, path: str) -> Any:
    value: Any = imported.config
    for name in path.split("."):
        value = value.get(name, {})
    return value


# ── placement ────────────────────────────────────────────────────────────────────────────────────────────────────────

SIZES_70B = (
    "--actor_num_nodes 2 --critic_num_nodes 2 --ref_num_nodes 1 --reward_num_nodes 1 --zero_stage 3 --bf16 "
    "--vllm_num_engines 4 --vllm_tensor_parallel_size 4 "
)
PAIRS = "--colocate_actor_ref --colocate_critic_reward"
ALONE = "--init_kl_coef 0 --advantage_estimator rloo --remote_rm_url x "
VERL = "trainer.nnodes=2 trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.tensor_model_parallel_size=4 "
OWN_REWARD = (
    "critic.enable=False reward_model.enable=True "
    "reward_model.enable_resource_pool=True reward_model.n_gpus_per_node=4"
)
SKYRL = "trainer.placement.policy_num_gpus_per_node=8 trainer.placement.ref_num_gpus_per_node=8 "
APART = "trainer.placement.colocate_all=false trainer.critic.model.path=x trainer.reward.model.path=y "
ROLL = (
    "rollout_batch_size=512 num_return_sequences_in_group=8 'actor_train.device_mapping=list(range(0,16))' "
    "actor_train.training_args.per_device_train_batch_size=4 actor_train.training_args.gradient_accumulation_steps=16 "
    "'actor_infer.device_mapping=list(range(0,12))' actor_infer.num_gpus_per_worker=2 rewards.rule.world_size=8 "
    "'reference.device_mapping=[0, 1, 2, 3] + list(range(8, 12, 2))' 'rewards.judge.device_mapping=[12,13]'"
)
CONTEXT = "cluster.component_placement.{}.context_parallel_size"
ULYSSES, KL = (
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.use_kl_loss=True ",
)
SKYRL_ENGINES = "generator.num_inference_engines=2"
SLIME = "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 4 "
SLIME_FILTER = (
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
)


@pytest.mark.parametrize(
    ("library", "text", "expected"),
    [
        (
            "openrlhf",
            SIZES_70B,
            "actor 0-15, critic 16-31, reference 32-39, reward 40-47, rollout 48-63",
        ),
        (
            "openrlhf",
            SIZES_70B + PAIRS,
            "actor 0-15, critic 16-31, reference 0-7, reward 16-23, rollout 32-47",
        ),
        (
            "openrlhf",
            "--actor_num_gpus_per_node 4 " + ALONE,
            "actor 0-3, rollout 0-3, reward ",
        ),
        (
            "verl",
            VERL + "actor_rollout_ref.actor.use_kl_loss=True",
            "actor, critic, reference, rollout 0-15",
        ),
        ("verl", VERL + "algorithm.adv_estimator=grpo", "actor, rollout 0-15"),
        ("verl", VERL + OWN_REWARD, "actor 0-15, reward 16-19, rollout 0-15"),
        (
            "roll",
            ROLL,
            "actor 0-15, reference 0-3,8,10, rollout 0-11, reward.judge 12-13",
        ),
        (
            "slime",
            "--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --num-gpus-per-node 8",
            "actor 0-3, rollout 4-7",
        ),
        (
            "slime",
            SLIME + "--advantage-estimator ppo --use-kl-loss",
            "actor, critic, reference, rollout 0-15",
        ),
        (
            "skyrl",
            SKYRL + "generator.num_inference_engines=2",
            "actor, reference, rollout 0-7",
        ),
        (
            "skyrl",
            SKYRL + APART + "trainer.placement.colocate_critic_reward=true",
            "actor 0-7, critic 8-11, reference 0-7, reward 8-11, rollout 12-15",
        ),
        ("areal", "allocation_mode=sglang:d4p1t1+d4p1t1", "rollout 0-3, actor 4-7"),
        ("areal", "allocation_mode=sglang:d2t2+fsdp:d4", "rollout 0-3, actor 4-7"),
        (
            "areal",
            "'allocation_mode=sglang[rollout]:d8|fsdp[actor]:d8'",
            "rollout, actor 0-7",
        ),
        (
            "areal",
            "'allocation_mode=sglang[rollout]:d4|fsdp[actor]:d8'",
            "rollout 0-3, actor 0-7",
        ),
        (
            "areal",
            "'allocation_mode=sglang:d4t4+x:(attn:d1p4t2c2|ffn:d1p4t1e4)'",
            "rollout 0-15, actor 16-31",
        ),
        (
            "areal",
            "rollout.backend=vllm:d4 actor.backend=fsdp:d4",
            "rollout 0-3, actor 4-7",
        ),
        (
            "areal",
            "'allocation_mode=sglang:d3t3|fsdp:d9' cluster.n_gpus_per_node=8 cluster.n_nodes=2",
            "rollout, actor 0-5,8-10",
        ),
        (
            "areal",
            "allocation_mode=sglang:d4+d4 critic.path=x ref.path=y ref.scheduling_strategy.type=separation",
            "rollout 0-3, actor 4-7, critic 4-7, reference 8-11",
        ),
    ],
)
def test_accelerators_of_each_component(library: str, text: str, expected: str) -> None:
    found = spots(bring(library, text))
    together = len(set(found.values())) == 1
    each = ", ".join(
        name if together else f"{name} {numbers}" for name, numbers in found.items()
    )
    assert expected == (f"{each} {found['actor']}" if together else each)


def test_engines_stay_on_one_node_and_may_be_larger_than_one() -> None:
    engines = "--actor_num_gpus_per_node 6 --vllm_num_engines 2 --vllm_tensor_parallel_size 4 "
    assert spots(bring("openrlhf", engines + ALONE, per_node=8))["rollout"] == "8-15"
    large = bring("openrlhf", "--vllm_num_engines 1 --vllm_tensor_parallel_size 16")
    line = {
        "placement": "32-47",
        "tensor_parallel_size": 16,
        "tensor_parallel_across_nodes": True,
    }
    assert at(large, "cluster.component_placement.rollout") == line
    assert large.layout is not None
    assert (
        at(
            bring("verl", VERL),
            "cluster.component_placement.rollout.accelerators_per_rank",
        )
        == 4
    )


NEW_PAIR = "--ref.num_nodes 2 --ref.num_gpus_per_node 8"
THREE = "--actor_num_nodes 2 --ref_num_nodes 2 --vllm_num_engines 3 --vllm_tensor_parallel_size 4 --colocate_all_models"
ENGINES = "--vllm_num_engines 8 "


@pytest.mark.parametrize(
    ("library", "text", "code", "fix"),
    [
        ("openrlhf", SIZES_70B + PAIRS, "import-partners", NEW_PAIR),
        (
            "openrlhf",
            THREE,
            "import-engines",
            "--vllm.num_engines 4 --vllm.tensor_parallel_size 4",
        ),
        (
            "openrlhf",
            ENGINES + "--critic_num_nodes 2 --colocate_all_models",
            "import-partners",
            "--critic.num_nodes 1 --critic.num_gpus_per_node 8",
        ),
        (
            "openrlhf",
            ENGINES + "--vllm_enable_sleep",
            "import-sleep",
            "add --train.colocate_all, or leave it out",
        ),
        (
            "openrlhf",
            ENGINES + "--vllm_enable_sleep --async_train --colocate_all_models",
            "import-sleep",
            "leave out ",
        ),
        (
            "openrlhf",
            ENGINES
            + "--rollout_batch_size 8 --micro_rollout_batch_size 8 --train_batch_size 8",
            "import-batches",
            "--rollout.micro_batch_size 1",
        ),
        (
            "openrlhf",
            ENGINES + "--advantage_estimator rloo",
            "import-batches",
            "--rollout.n_samples_per_prompt 2",
        ),
        (
            "openrlhf",
            ENGINES + "--rollout_batch_size 4 --train_batch_size 4",
            "rank-without-rows",
            "prompts: 8",
        ),
        (
            "openrlhf",
            ENGINES + "--rollout_batch_size 4",
            "import-batches",
            "--rollout.batch_size 8",
        ),
        (
            "openrlhf",
            ENGINES + "--ds_tensor_parallel_size 3",
            "import-counts",
            "--ds.tensor_parallel_size 2",
        ),
        (
            "openrlhf",
            ENGINES + "--vllm_gpu_memory_utilization 1.5",
            "out-of-bounds",
            "",
        ),
        (
            "verl",
            VERL.replace("=4", "=3"),
            "import-engines",
            VERL.split()[2].replace("=4", "=2"),
        ),
        (
            "slime",
            "--actor-num-gpus-per-node 8 --rollout-num-gpus 6 --rollout-num-gpus-per-engine 4",
            "import-engines",
            "",
        ),
        ("verl", VERL + ULYSSES + "=3", "import-counts", ULYSSES + "=2"),
        ("skyrl", SKYRL, "import-engines", "generator.inference_engine.num_engines=2 "),
        (
            "skyrl",
            APART + "trainer.placement.policy_num_gpus_per_node=8",
            "import-partners",
            "trainer.placement.ref_",
        ),
        (
            "areal",
            "allocation_mode=sglang:d8+fsdp:d8 cluster.n_nodes=1 cluster.n_gpus_per_node=8",
            "import-counts",
            "cluster.n_nodes=2",
        ),
    ],
)
def test_what_does_not_hold_in_the_original_has_a_fix(
    library: str, text: str, code: str, fix: str
) -> None:
    imported = bring(library, text)
    problem = next(p for p in imported.findings if p.code == code)
    assert imported.findings.count(problem) == 1
    assert (problem.fix or "").startswith(fix)
    assert spots(imported)["rollout"]


def test_a_plan_needs_no_module_of_a_reward_function() -> None:
    text = ENGINES + "--remote_rm_url rewards/nowhere.py --prompt_data p.jsonl "
    prepared = prepare(bring("openrlhf", text + "--pretrain org/Llama-3-8b").config)
    (problem,) = [p for p in prepared.not_run if p.code == "no-reward-module"]
    assert (problem.key, problem.got) == ("reward.function", "nowhere:reward_func")


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────

OFFLOAD = (
    "actor_rollout_ref.actor.fsdp_config.param_offload=True "  # of the parameters alone
)
TOGETHER = (
    ENGINES + "--colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep "
)
BOTH = "'allocation_mode=sglang[rollout]:d8|fsdp[actor]:d8' enable_offload=true train_dataset.batch_size=256 "


@pytest.mark.parametrize(
    ("library", "text", "expected"),
    [
        (
            "openrlhf",
            "--param_dtype fp16 --lora_rank 0 --max_len 4096 --prompt_max_len 9 --adam_offload",
            {
                "actor.weights": "fp16",
                "actor.optimizer": {
                    "kind": "adamw_master",
                    "beta2": 0.95,
                    "schedule": "cosine",
                    "min_lr_ratio": 0.1,
                    "on_host": True,
                },
                "actor.lora_rank": {},
                "algorithm.sequence_length": 4096,
                "algorithm.max_prompt_length": 3072,
            },
        ),
        ("openrlhf", "--lr_scheduler cosine", {"actor.optimizer.min_lr_ratio": {}}),
        ("openrlhf", "--actor.min_lr_ratio 0.3", {"actor.optimizer.min_lr_ratio": 0.3}),
        ("verl", VERL, {"algorithm.tis_cap": None}),
        (
            "verl",
            VERL + "algorithm.rollout_correction.rollout_is_threshold=3",
            {"algorithm.tis_cap": None},
        ),
        (
            "verl",
            VERL + "algorithm.rollout_correction.rollout_is=token",
            {"algorithm.tis_cap": {}},
        ),
        (
            "verl",
            VERL + "actor_rollout_ref.actor.tis_imp_ratio_cap=4",
            {"algorithm.tis_cap": 4},
        ),
        ("slime", SLIME, {"algorithm.tis_cap": None}),
        ("slime", SLIME + "--use-tis", {"algorithm.tis_cap": {}}),
        ("skyrl", "trainer.algorithm.use_tis=false", {"algorithm.tis_cap": None}),
        ("skyrl", "trainer.algorithm.use_tis=true", {"algorithm.tis_cap": 2.0}),
        ("areal", "allocation_mode=sglang:d4+fsdp:d4", {"algorithm.tis_cap": None}),
        (
            "areal",
            "allocation_mode=sglang:d4+fsdp:d4 actor.use_decoupled_loss=true",
            {"algorithm.tis_cap": 1e6},
        ),
        (
            "verl",
            VERL
            + "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine actor_rollout_ref.actor.optim.min_lr_ratio=0.2",
            {"actor.optimizer.schedule": "cosine", "actor.optimizer.min_lr_ratio": 0.2},
        ),
        (  # the critic's optimizer has keys of its own, and decays its weights by default
            "verl",
            VERL
            + "critic.optim.lr_warmup_steps=10 critic.optim.min_lr_ratio=0.1 critic.grad_clip=0.7 "
            "critic.optim.lr_scheduler_type=cosine critic.optim.betas=[0.8,0.95] "
            "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
            {
                "critic.optimizer": {
                    "lr": 1e-5,
                    "weight_decay": 0.01,
                    "warmup_steps": 10,
                    "schedule": "cosine",
                    "min_lr_ratio": 0.1,
                    "max_grad_norm": 0.7,
                    "beta1": 0.8,
                    "beta2": 0.95,
                },
                "actor.optimizer.beta2": 0.95,
            },
        ),
        (  # FSDP states stay unless offload is switched on; only the engines sleep by themselves
            "verl",
            VERL,
            {
                "cluster.allow_resident": ["actor", "critic"],
                "rollout.enable_offload": True,
            },
        ),
        ("verl", VERL + OFFLOAD, {"actor.enable_offload": {}}),
        (
            "verl",
            VERL
            + "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2",
            {
                "algorithm.kl_in": "reward",
                "algorithm.kl_target": 0.2,
                "algorithm.kl_horizon": {},
            },
        ),
        (  # An old and a new name for one setting, in a config with all defaults
            "verl",
            VERL + "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 "
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4",
            {
                "cluster.component_placement.actor": {
                    "placement": "0-15",
                    "context_parallel_size": 4,
                }
            },
        ),
        (  # Two bounds: weights beyond them are dropped
            "verl",
            VERL + "algorithm.rollout_correction.rollout_is=token "
            "algorithm.rollout_correction.rollout_is_threshold=0.5_4.0",
            {
                "algorithm.tis_floor": 0.5,
                "algorithm.tis_cap": 4.0,
                "algorithm.tis_above": "drop",
            },
        ),
        (
            "verl",
            VERL + "model_engine=veomni",
            {"actor.optimizer.schedule": "cosine"},
        ),
        (
            "verl",
            VERL + "actor_rollout_ref.actor.policy_loss.loss_mode=cispo "
            "actor_rollout_ref.actor.clip_ratio=0.2 actor_rollout_ref.actor.clip_ratio_low=10",
            {"algorithm.clip_ratio_low": 0.99},
        ),
        (  # Defaults of SkyRL's PPO
            "skyrl",
            "trainer.critic.model.path=x trainer.algorithm.advantage_estimator=gae",
            {
                "algorithm.gae_lambda": 1.0,
                "algorithm.normalize_advantages": False,
                "critic.optimizer.lr": 5e-6,
            },
        ),
        ("skyrl", SKYRL, {"algorithm.gae_lambda": {}, "runner.eval_temperature": {}}),
        (
            "skyrl",
            SKYRL + "generator.eval_n_samples_per_prompt=4",
            {"runner.eval_temperature": 0.0, "runner.eval_top_p": {}},
        ),
        (
            "skyrl",
            SKYRL + "generator.inference_engine.enforce_eager=true",
            {"rollout.enforce_eager": True},
        ),
        (
            "skyrl",
            SKYRL + "generator.inference_engine.enforce_eager=true "
            "trainer.policy.model.lora.rank=16",
            {"rollout.enforce_eager": False},
        ),
        (
            "skyrl",
            SKYRL + "generator.inference_engine.enforce_eager=true "
            "trainer.policy.model.lora.rank=16 trainer.strategy=megatron",
            {"rollout.enforce_eager": True},
        ),
        (
            "roll",
            ROLL,
            {"algorithm.train_batch": 4 * 16 * 16, "reward": {"enable_offload": True}},
        ),
        (
            "slime",
            SLIME
            + "--advantage-estimator ppo --rollout-batch-size 33 --n-samples-per-prompt 8 "
            "--num-steps-per-rollout 5",
            {
                "algorithm.train_batch": 52,
                "critic.enable_offload": True,
                "rollout.enable_offload": True,
            },
        ),
        (
            "slime",
            "--colocate --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --hf-checkpoint /root/Qwen3-4B "
            "--num-rollout 3000 --eval-interval -1",
            {
                "algorithm.kl_estimator": "k3",
                "runner": {"total_iterations": 3000, "seed": 1234},
                "actor.model.hidden_size": 2560,
            },
        ),
        (
            "verl",
            VERL + "actor_rollout_ref.rollout.val_kwargs.n=8",
            {"runner.eval_samples": 8},
        ),
        (
            "openrlhf",
            ENGINES + "--eval_steps 20 --eval_n_samples_per_prompt 2",
            {"runner.eval_samples": 2},
        ),
        (
            "openrlhf",
            ENGINES + "--eval_steps 20",
            {"runner.eval_samples": 4, "runner.eval_temperature": 0.6},
        ),
        (
            "openrlhf",
            ENGINES + "--eval_steps 20 --eval_temperature 1",
            {"runner.eval_temperature": 1},
        ),
        (
            "verl",
            VERL + "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
            {"runner.eval_top_p": 0.7},
        ),
        ("openrlhf", ENGINES + "--eval_steps -1", {"runner.eval_samples": {}}),
        (
            "slime",
            SLIME + "--n-samples-per-eval-prompt 4 --eval-interval 5",
            {"runner.eval_samples": 4},
        ),
        (
            "roll",
            ROLL + " validation.generating_args.num_return_sequences=3",
            {"runner.eval_samples": 3},
        ),
        *(
            (library, text, dict.fromkeys(map(CONTEXT.format, divided), 2))
            for library, text, divided in (
                ("verl", VERL + KL + ULYSSES + "=2", ("actor", "reference")),
                (
                    "verl",
                    VERL
                    + KL
                    + ULYSSES
                    + "=4 "
                    + ULYSSES.replace("actor.u", "ref.u")
                    + "=2",
                    ("reference",),
                ),
                ("verl", VERL + "critic.ulysses_sequence_parallel_size=2", ("critic",)),
                (
                    "openrlhf",
                    ENGINES + "--ring_attn_size 2",
                    ("actor", "critic", "reference", "reward"),
                ),
                (
                    "slime",
                    SLIME + "--context-parallel-size 2 --use-kl-loss",
                    ("actor", "reference"),
                ),
                (
                    "skyrl",
                    SKYRL + SKYRL_ENGINES + " trainer.policy.sequence_parallel_size=2",
                    ("actor",),
                ),
                (
                    "skyrl",
                    SKYRL
                    + SKYRL_ENGINES
                    + " trainer.policy.megatron_config.context_parallel_size=2",
                    ("actor",),
                ),
                (
                    "areal",
                    "allocation_mode=sglang:d4+fsdp:d2c2 ref.path=x",
                    ("actor", "reference"),
                ),
                (
                    "areal",
                    "'allocation_mode=sglang:d4+x:(attn:d2t2c2|ffn:d2t1e4)'",
                    ("actor",),
                ),
                (
                    "areal",
                    "rollout.backend=vllm:d4 actor.backend=fsdp:d2t2c2",
                    ("actor",),
                ),
                ("roll", ROLL + " actor_train.model_args.ulysses_size=2", ("actor",)),
                (
                    "roll",
                    ROLL
                    + " actor_train.strategy_args.strategy_config.context_parallel_size=2",
                    ("actor",),
                ),
                ("roll", ROLL + " reference.model_args.ulysses_size=2", ("reference",)),
            )
        ),
        (
            "roll",
            ROLL + " actor_train.model_args.ulysses_size=2",
            {"algorithm.train_batch": 4 * 16 * 8},
        ),
        *(
            (library, text, {"algorithm.dynamic_sampling": on})
            for library, text, on in (
                (
                    "areal",
                    "allocation_mode=sglang:d4+fsdp:d4 actor.dynamic_sampling=true",
                    True,
                ),
                (
                    "skyrl",
                    SKYRL
                    + SKYRL_ENGINES
                    + " trainer.algorithm.dynamic_sampling.type=filter",
                    True,
                ),
                (
                    "skyrl",
                    SKYRL
                    + SKYRL_ENGINES
                    + " trainer.algorithm.dynamic_sampling.type=null",
                    {},
                ),
                (
                    "slime",
                    SLIME + f"--dynamic-sampling-filter-path {SLIME_FILTER}",
                    True,
                ),
                ("slime", SLIME + "--dynamic-sampling-filter-path my.filter", {}),
            )
        ),
        (
            "skyrl",
            SKYRL
            + SKYRL_ENGINES
            + " trainer.policy.model.lora.rank=16 trainer.policy.model.lora.alpha=32",
            {"actor.lora_rank": 16, "actor.lora_alpha": 32},
        ),
        ("slime", SLIME + "--optimizer-cpu-offload", {"actor.optimizer.on_host": True}),
        ("verl", VERL + ULYSSES + "=1", {"cluster.component_placement.actor": "0-15"}),
        (
            "areal",
            BOTH + "gconfig.n_samples=4",
            {"algorithm.train_batch": 256, "actor.enable_offload": True},
        ),
        (
            "areal",
            BOTH + "gconfig.min_new_tokens=2 gconfig.frequency_penalty=0.5",
            {"rollout.min_tokens": 2, "rollout.frequency_penalty": 0.5},
        ),
    ],
)
def test_values(library: str, text: str, expected: dict[str, object]) -> None:
    imported = bring(library, text)
    assert {path: at(imported, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("library", "text", "key", "named"),
    [
        (
            "slime",
            SLIME + "--partial-rollout",
            "partial-rollout",
            ("algorithm.max_staleness", "algorithm.short_rounds"),
        ),
        (
            "skyrl",
            SKYRL + SKYRL_ENGINES + " generator.run_engines_locally=false",
            "generator.run_engines_locally",
            (
                "rollout.engine_args.url",
                "rlplace.workers.engines.vllm_server:VllmServer",
            ),
        ),
        (
            "openrlhf",
            "--vllm_num_engines 8 --data.image_key photo",
            "data.image_key",
            ("env.kwargs.image",),
        ),
    ],
)
def test_what_is_written_otherwise_here_is_named(
    library: str, text: str, key: str, named: tuple[str, ...]
) -> None:
    (result,) = (
        result for result in bring(library, text).results if result.setting.key == key
    )
    assert result.outcome == "unmapped"
    assert [word for word in named if word not in result.text] == []


def test_both_spellings_of_openrlhf_mean_the_same() -> None:
    old = "--actor_num_gpus_per_node 8 --vllm_num_engines 8 --colocate_all_models --zero_stage 3 --max_norm 2 --bf16"
    new = "--actor.num_gpus_per_node 8 --vllm.num_engines 8 --train.colocate_all --ds.zero_stage 3 --actor.max_norm 2 "
    imported = bring("openrlhf", old)
    assert imported.config == bring("openrlhf", new + "--critic.max_norm 2").config
    assert imported.missing == (
        "env.task",
        "actor.model",
        "cluster.component_placement.env",
    )


def test_each_flag_has_exactly_one_result() -> None:
    more = "--packing_samples --use_wandb key --colocate_all_modls --vllm_sync_backend nccl --dynamic_filtering"
    imported = bring("openrlhf", TOGETHER + more)
    assert len(imported.results) == (TOGETHER + more).count("--")
    assert {
        str(r.setting): r.outcome for r in imported.results if r.outcome != "equal"
    } == {
        "--packing_samples": "implied",
        "--vllm_sync_backend nccl": "implied",
        "--use_wandb key": "unmapped",
        "--colocate_all_modls": "unknown",
        "--dynamic_filtering": "differs",  # dropped groups are not replaced here
    }
    assert (
        next(r.text for r in imported.results if r.outcome == "unknown")
        == "colocate_all_models"
    )


@pytest.mark.parametrize(
    ("library", "text", "part", "why"),
    [
        (
            "openrlhf",
            "--critic_num_nodes 1 --advantage_estimator group_norm",
            "critic_num",
            "group_norm needs no",
        ),
        (
            "openrlhf",
            "--ref_num_nodes 1 --init_kl_coef 0",
            "ref_num",
            "there is no reference",
        ),
        (
            "openrlhf",
            "--reward_num_nodes 1 --remote_rm_url x",
            "reward_num",
            "it is remote",
        ),
        (
            "openrlhf",
            "--reward_num_nodes 1 --agent_func_path x",
            "reward_num",
            "the agent scores",
        ),
        ("openrlhf", ENGINES + "--vllm_enable_sleep", "sleep", "does nothing there"),
        ("verl", VERL + OFFLOAD, "param_offload", "together, or neither"),
        ("roll", ROLL, "world_size", "runs on CPUs there"),
    ],
)
def test_what_has_no_key_has_a_reason(
    library: str, text: str, part: str, why: str
) -> None:
    imported = bring(library, text)
    (result,) = (r for r in imported.results if part in str(r.setting))
    assert result.outcome == "unmapped"
    assert why in result.text
    assert "rollout.enable_offload" not in result.text


def test_values_that_cannot_be_read_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        bring(
            "openrlhf",
            "--actor_num_nodes two --critic_num_gpus_per_node 0 --init_kl_coef $KL --adam_betas 1 x",
        )
    assert caught.value.codes == ("import-value",) * 4
    assert {str(p.got).split()[0] for p in caught.value.problems} == {
        "--actor_num_nodes",
        "--critic_num_gpus_per_node",
        "--init_kl_coef",
        "--adam_betas",
    }
    assert "set nowhere" in str(
        next(p.why for p in caught.value.problems if "$KL" in str(p.got))
    )


@pytest.mark.parametrize(
    ("library", "key", "value"),
    [
        *(
            ("roll", "actor_train.device_mapping", text)
            for text in (
                "__import__('os')",
                "range(10**12)",
                "list(range(x))",
                "[",
                "{1}",
                "'a'",
            )
        ),
        *(
            ("areal", "allocation_mode", text)
            for text in ("sglang:x4+fsdp:d4", "sglang", "sglang:d4t1+:", "sglang:d4t0")
        ),
    ],
)
def test_other_expressions_are_refused(library: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match="import-value"):
        import_settings(library, [Setting(key=key, value=value, written=value)])


# ── RLinf ────────────────────────────────────────────────────────────────────────────────────────────────────────────

EMBODIED: dict[str, Any] = {
    "cluster": {
        "num_nodes": 1,
        "component_placement": {"actor": "0-7", "env": "0-3", "rollout": "4-7"},
    },
    "runner": {
        "max_epochs": 10,
        "logger": {"logger_backends": ["tensorboard", "wandb"]},
    },
    "algorithm": {"adv_type": "gae"},
    "env": {
        "enable_offload": True,
        "train": {"total_num_envs": 128, "max_steps_per_rollout_epoch": 80},
    },
    "rollout": {
        "backend": "huggingface",
        "enable_offload": True,
        "pipeline_stage_num": 2,
    },
    "actor": {
        "enable_offload": True,
        "global_batch_size": 640,
        "seed": 7,
        "optim": {"lr": "1e-4"},
    },
}
MOVED = {"offload_weight": True, "offload_optimizer": True, "offload_grad": True}


def rlinf(mapping: dict[str, Any], per_node: int = 0) -> Imported:
    return import_settings("rlinf", settings_of(mapping), per_node)


def placed(
    block: dict[str, Any], nodes: int = 1, per_node: int = 0, **more: Any
) -> Imported:
    return rlinf(
        {"cluster": {"num_nodes": nodes, "component_placement": block, **more}},
        per_node,
    )


def test_a_job_without_simulators_is_one_with_language_models() -> None:
    imported = rlinf(
        {
            "cluster": {
                "num_nodes": 2,
                "component_placement": {"actor,critic,rollout,reward": "all"},
            },
            "runner": {"task_type": "reasoning", "seq_length": 12288},
            "algorithm": {"group_size": 8, "n_minibatches": 4, "adv_type": "gae"},
            "rollout": {"tensor_parallel_size": 2},
            "data": {"rollout_batch_size": 512},
            "actor": MOVED,
            "critic": MOVED,
        }
    )
    assert at(imported, "cluster.component_placement") == {
        "actor,critic,reward": "all",
        "rollout": {"placement": "all", "accelerators_per_rank": 2},
    }
    assert imported.config["algorithm"] == {
        "name": "ppo",
        "loss": "token",
        "sequence_length": 12288,
        "prompts": 512,
        "tis_cap": None,
        "samples_per_prompt": 8,
        "train_batch": 1024,
    }
    assert (
        imported.config["critic"]
        == imported.config["rollout"]
        == {"enable_offload": True}
    )
    assert imported.layout is not None


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
    assert at(imported, "cluster.component_placement") == block
    HybridComponentPlacement(imported.config, imported.topology)
    groups = [
        {"label": "a800", "node_ranks": "0"},
        {"label": "4090", "node_ranks": "1"},
    ]
    where = {
        "actor": ("a800", "0-7"),
        "rollout": ("4090", "0-7"),
        "env": ("4090", "0-3"),
    }
    by_group = {
        c: {"node_group": group, "placement": text}
        for c, (group, text) in where.items()
    }
    grouped = placed(by_group, 2, node_groups=groups)
    assert at(grouped, "cluster.node_groups") == groups
    assert spots(grouped)["env"] == "8-11"


@pytest.mark.parametrize(
    ("line", "nodes", "per_node", "width"),
    [
        ("0-3", 1, 0, 8),
        ("0-15", 1, 0, 16),
        ("0-9", 1, 0, 10),
        ("all", 2, 0, 8),
        ("0-3", 1, 4, 4),
    ],
)
def test_machines_are_as_wide_as_the_numbers_need(
    line: str, nodes: int, per_node: int, width: int
) -> None:
    imported = placed({"actor,env,rollout": line}, nodes, per_node)
    assert [n.accelerators for n in imported.topology.nodes] == [width] * nodes
    idle = bring(
        "areal", "allocation_mode=sglang:d4+fsdp:d4 cluster.n_nodes=3"
    )  # machines without a component stay
    assert idle.topology.num_nodes == 3


def test_inference_is_the_actors_own_work() -> None:
    imported = placed(
        {"actor,inference": "0-7", "env": "0-3", "rollout": "4-7", "invironment": "0"}
    )
    assert at(imported, "cluster.component_placement") == {
        "actor": "0-7",
        "env": "0-3",
        "rollout": "4-7",
    }
    assert [p.code for p in imported.findings] == ["import-component"]
    alone = placed({"actor": "0-7", "inference": "0-3", "env": "0-3", "rollout": "4-7"})
    assert [
        r.text
        for r in alone.results
        if "inference" in r.setting.key and "stage infer" in r.text
    ]


def test_components_that_stay_are_written_down_and_a_placement_that_does_not_hold_as_well() -> (
    None
):
    imported = rlinf({**EMBODIED, "actor": {"enable_offload": False}})
    assert at(imported, "cluster.allow_resident") == ["actor"]
    assert imported.layout is not None
    broken = placed({"actor": "0-7", "env": "0-3", "rollout": "4--7"})
    assert broken.layout is None
    assert broken.findings
    assert at(broken, "cluster.component_placement.rollout") == "4--7"


def test_a_simulator_of_the_original_is_no_simulator_here() -> None:
    train = {**EMBODIED["env"]["train"], "init_params": {"id": "StackCube-v7"}}
    imported = rlinf({**EMBODIED, "env": {"train": train}})
    assert not at(imported, "env.id")
    assert "env.id" in imported.missing
    (result,) = [
        r for r in imported.results if r.setting.key.endswith("init_params.id")
    ]
    assert result.outcome == "unmapped"
    assert [p.key for p in prepare(imported.config).not_run] == ["env.id"]


def test_a_machine_that_is_not_described_has_what_its_simulators_divide_over() -> None:
    block = {
        "cluster": {"component_placement": {"actor,env,rollout": "all"}},
        "rollout": {"pipeline_stage_num": 2},
    }
    for envs, width in ((64, 8), (24, 6), (4, 2), (7, 8)):
        imported = rlinf({**block, "env": {"train": {"total_num_envs": envs}}})
        assert imported.topology.num_accelerators == width


def test_a_machine_has_what_the_placements_in_its_groups_need() -> None:
    groups = [
        {"label": "gpu", "node_ranks": "0-1"},
        {
            "label": "arm",
            "node_ranks": 2,
            "hardware": {"type": "Franka", "configs": []},
        },
    ]
    block = {
        "actor": {"node_group": "gpu", "placement": "0-19"},
        "rollout": {"node_group": "gpu", "placement": 1},
    }
    block["env"] = {"node_group": "arm", "placement": "0-40"}
    cluster = {"num_nodes": 3, "node_groups": groups, "component_placement": block}
    imported = rlinf({"cluster": cluster, "env": {"train": {"total_num_envs": 1}}})
    assert at(imported, "cluster.accelerators_per_node") == 10


@pytest.mark.parametrize("joined", ["a, b", ["a", "b"], "a,b"])
def test_groups_that_are_joined_have_the_machines_of_all(joined: object) -> None:
    groups = [{"label": label, "node_ranks": rank} for rank, label in enumerate("ab")]
    block = {"actor,env,rollout": {"node_group": joined, "placement": "0-19"}}
    cluster = {"num_nodes": 2, "node_groups": groups, "component_placement": block}
    imported = rlinf({"cluster": cluster, "env": {"train": {"total_num_envs": 8}}})
    assert at(imported, "cluster.accelerators_per_node") == 10
    assert str(spots(imported)["actor"]) == "0-19"


def test_a_reward_by_rules_holds_no_accelerator() -> None:
    cluster = {"num_nodes": 1, "component_placement": {"actor,rollout,reward": "all"}}
    of_rules = rlinf(
        {
            "cluster": cluster,
            "reward": {"use_reward_model": False, "reward_type": "math"},
        }
    )
    assert {*spots(of_rules)} == {"actor", "rollout"}
    assert "env.rewards" in of_rules.findings[0].why
    of_a_model = rlinf({"cluster": cluster, "reward": {"use_reward_model": True}})
    assert {*spots(of_a_model)} == {"actor", "rollout", "reward"}


def test_a_reward_model_beside_simulators_is_left_out() -> None:
    imported = placed({"actor,rollout": "0-3", "env,reward": "4-7", "critic": "0"})
    assert at(imported, "cluster.component_placement") == {
        "actor,rollout": "0-3",
        "env": "4-7",
    }
    assert [p.code for p in imported.findings] == ["import-component"]
    (critic,) = [r for r in imported.results if r.setting.key.endswith(".critic")]
    assert "a job with simulators has actor, env, rollout here" in critic.text


def test_references_that_lead_nowhere_leave_our_defaults() -> None:
    imported = bring(
        "verl",
        "trainer.nnodes=1 'actor_rollout_ref.rollout.temperature=${oc.select:.t,null}'",
    )
    assert not at(imported, "rollout.temperature")
    (result,) = [r for r in imported.results if "temperature" in r.setting.key]
    assert (result.outcome, "is not among what was given" in result.text) == (
        "unmapped",
        True,
    )


@pytest.mark.parametrize(
    ("name", "layers", "experts"),
    [
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 28, None),
        ("/root/DeepSeek-R1", 61, 256),
        ("/root/Moonlight-16B-A3B", 27, 64),
        ("Qwen/Qwen3-30B-A3B-Base", 48, 128),
        ("/models/GLM-Z1-9B-0414/", 40, None),
        ("meta-llama/Llama-2-70b-chat-hf", 80, None),
        ("Qwen/Qwen2-7B-Instruct", 28, None),
    ],
)
def test_a_launch_script_names_its_model(
    name: str, layers: int, experts: int | None
) -> None:
    script = f"--actor-num-gpus-per-node 8 --colocate --balance-data --use-fault-tolerance --hf-checkpoint {name}"
    model = at(bring("slime", script), "actor.model")
    assert model["num_hidden_layers"] == layers
    assert model.get("num_experts", model.get("n_routed_experts")) == experts


def test_a_job_whose_model_is_not_known_is_planned() -> None:
    words = "--actor.num_nodes 1 --vllm.num_engines 8 --train.colocate_all --data.prompt_dataset x"
    imported = bring(
        "openrlhf",
        f"{words} --rollout.batch_size 128 --algo.advantage.estimator rloo --actor.model_name_or_path my/own",
    )
    assert [p.key for p in prepare(imported.config).not_run] == ["actor.model"]


def test_uneven_steps_are_reported() -> None:
    imported = rlinf(
        {**EMBODIED, "actor": {"enable_offload": True, "global_batch_size": 600}}
    )
    assert [(p.code, p.fix) for p in imported.findings] == [
        ("import-batches", "actor.global_batch_size=512")
    ]


def test_parts_of_an_actor_move_together() -> None:
    some = rlinf({**EMBODIED, "actor": {"offload_weight": True, "offload_grad": False}})
    assert {r.outcome for r in some.results if "actor.offload" in r.setting.key} == {
        "unmapped"
    }
    assert rlinf({**EMBODIED, "actor": MOVED}).config["actor"] == {
        "enable_offload": True
    }


def test_a_value_that_is_refused_hides_nothing_of_the_placement() -> None:
    words = [
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.free_cache_engine=false",
    ]
    for refused in ([], ["algorithm.gamma=5"]):
        imported = import_words("verl", [*words, *refused])
        assert imported.config["cluster"]["allow_resident"] == [
            "actor",
            "critic",
            "rollout",
        ]


# ── the mean that a loss is ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("library", "words", "loss"),
    [
        ("verl", "algorithm.adv_estimator=grpo", "token"),
        (
            "verl",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
            "constant",
        ),
        (
            "verl",
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo algorithm.adv_estimator=grpo",
            "sequence",
        ),
        (
            "openrlhf",
            "--advantage_estimator group_norm --n_samples_per_prompt 4",
            "token",
        ),
        ("openrlhf", "--policy_loss_type gspo", "sequence"),
        ("slime", "--advantage-estimator grpo", "sequence"),
        (
            "slime",
            "--advantage-estimator reinforce_plus_plus --calculate-per-token-loss",
            "token",
        ),
        ("roll", "adv_estimator=grpo actor_train.device_mapping=[0]", "sequence"),
        ("areal", "actor.adv_estimator=grpo allocation_mode=d1", "token"),
        ("skyrl", "trainer.algorithm.advantage_estimator=grpo", "token"),
    ],
)
def test_the_loss_is_the_mean_that_it_is_there(
    library: str, words: str, loss: str
) -> None:
    assert at(import_words(library, [words], 8), "algorithm.loss") == loss


@pytest.mark.parametrize(
    ("library", "words", "ratio"),
    [
        (
            "verl",
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo algorithm.adv_estimator=grpo",
            "sequence_token",
        ),
        (
            "skyrl",
            "trainer.algorithm.policy_loss_type=gspo trainer.algorithm.advantage_estimator=grpo",
            "sequence_token",
        ),
        ("openrlhf", "--policy_loss_type gspo", "sequence"),
    ],
)
def test_gspo_has_the_gradient_that_it_has_there(
    library: str, words: str, ratio: str
) -> None:
    assert at(import_words(library, [words], 8), "algorithm.ratio") == ratio


def test_the_dual_clip_is_that_of_the_loss_there() -> None:
    gspo, written = (
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.clip_ratio_c=4.0",
    )
    assert (
        at(
            import_words("verl", ["algorithm.adv_estimator=grpo"], 8),
            "algorithm.dual_clip",
        )
        == 3.0
    )
    for words in ([gspo], [gspo, written]):
        assert (
            at(
                import_words("verl", [*words, "algorithm.adv_estimator=grpo"], 8),
                "algorithm.dual_clip",
            )
            == {}
        )


def test_the_files_of_verl_become_a_task_and_its_overlong_buffer_a_reward() -> None:
    files = "data.train_files=a.parquet data.val_files=b.parquet data.max_response_length=100 "
    buffer = (
        "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=20 "
    )
    passes = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=500 "
    shared = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    imported = import_words(
        "verl", [f"algorithm.adv_estimator=grpo {files}{buffer}{passes}{shared}"], 8
    )
    columns = {
        "path": "a.parquet",
        "prompt": "prompt",
        "answer": "reward_model.ground_truth",
    }
    limits = {"free_tokens": 80, "longest_tokens": 100}
    assert at(imported, "env") == {
        "kind": "text",
        "task": "prompts",
        "kwargs": columns,
        "eval_kwargs": {"path": "b.parquet"},
        "rewards": [
            {"name": "math_answer"},
            {"name": "length_penalty", "weight": 1.0, "kwargs": limits},
        ],
    }
    assert at(imported, "cluster.component_placement.env") == "cpu"
    assert at(imported, "actor.token_budget") == 1000, (
        "the ranks that share a sample's tokens have the pass between them"
    )
    assert {r.outcome for r in imported.results if "data." in str(r.setting)} == {
        "equal"
    }
    unknown = import_words(
        "verl", ["data.train_files=$HOME/a.parquet algorithm.adv_estimator=grpo"], 8
    )
    assert at(unknown, "env.kwargs.path") == "$HOME/a.parquet"
    assert "$HOME" in dict(unknown.assumed)
    assert at(unknown, "env.rewards")
    braces = import_words("verl", ["""data.train_files="['${D}/a','${D}/b']\" """], 8)
    assert at(braces, "env.kwargs.path") == ["$D/a", "$D/b"]
    model = import_words(
        "verl", [f"{files}reward_model.enable=true reward_model.model.path=some/rm"], 8
    )
    assert at(model, "env.rewards") == [{"name": "unscored"}]


def test_the_warm_up_that_openrlhf_has_by_default_is_told() -> None:
    def told(words: str) -> bool:
        imported = import_words("openrlhf", [f"{_OPENRLHF_SMALL} {words}"], 8)
        return "no actor.optimizer.warmup_steps" in dict(imported.assumed)

    assert told("")
    assert not told("--lr_warmup_ratio 0.0")


_OPENRLHF_SMALL = "--actor_num_nodes 1 --actor_num_gpus_per_node 4 --vllm_num_engines 4"


@pytest.mark.parametrize("setting", ["warmup_steps", "save_steps", "eval_steps"])
def test_a_share_of_all_steps_is_not_off(setting: str) -> None:
    """In transformers, warmup_steps=0.1 is a tenth of the run; 0 is off."""
    words = "trl grpo --num_processes 4 --num_generations 8"
    (share,) = import_words("trl", [f"{words} --{setting} 0.1"], 8).results[-1:]
    (off,) = import_words("trl", [f"{words} --{setting} 0"], 8).results[-1:]
    assert (share.outcome, off.outcome) == ("unmapped", "implied")


@pytest.mark.parametrize(
    ("metric", "more", "by"),
    [
        ("acc", "", "math_answer"),
        ("score", "", "math_answer"),
        ("score", "custom_reward_function.path=my/judge.py", "compute_score"),
        # Which part of a function's own is meant is not known
        ("acc", "custom_reward_function.path=my/judge.py", None),
        ("seq_reward", "", None),
    ],
)
def test_groups_of_verl_are_compared_by_their_metric(
    metric: str, more: str, by: str | None
) -> None:
    imported = bring(
        "verl",
        VERL + "data.train_files=a.parquet data.max_response_length=100 "
        "algorithm.filter_groups.enable=true "
        f"algorithm.filter_groups.metric={metric} {more} "
        "reward_model.overlong_buffer.enable=true reward_model.overlong_buffer.len=20",
    )
    assert at(imported, "algorithm.dynamic_sampling") is True
    assert at(imported, "algorithm.dynamic_sampling_by") == (by or {})


def test_corrections_of_the_engines_probabilities_are_those_there() -> None:
    verl = "algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=3.0"
    imported = import_words("verl", [f"algorithm.adv_estimator=grpo {verl}"], 8)
    assert (at(imported, "algorithm.tis_level"), at(imported, "algorithm.tis_cap")) == (
        "sequence",
        3.0,
    )
    cispo = import_words(
        "verl",
        [
            "actor_rollout_ref.actor.policy_loss.loss_mode=cispo algorithm.adv_estimator=grpo"
        ],
        8,
    )
    assert (at(cispo, "algorithm.surrogate"), at(cispo, "algorithm.dual_clip")) == (
        "cispo",
        {},
    )
    icepop = "--algo.advantage.is_correction_type icepop --algo.advantage.is_correction_threshold 0.25 4"
    imported = import_words(
        "openrlhf", [f"--algo.advantage.is_correction_enable {icepop}"], 8
    )
    found = [
        at(imported, f"algorithm.tis_{name}") for name in ("cap", "above", "floor")
    ]
    assert found == [4.0, "drop", 0.25]


def test_a_mean_that_is_none_of_ours_is_named() -> None:
    imported = import_words(
        "verl", ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"], 8
    )
    assert not at(imported, "algorithm.loss")
    assert "algorithm.loss has no such mean" in render_yaml(imported)


def test_a_reward_function_of_verl_is_written_as_it_is() -> None:
    files = "data.train_files=a.parquet algorithm.adv_estimator=grpo "
    own = (
        "custom_reward_function.path=rewards/mine.py "
        "custom_reward_function.reward_kwargs.bonus=0.5 "
    )
    imported = bring("verl", files + own, 8)
    assert at(imported, "env.rewards") == [
        {"name": "mine:compute_score", "kwargs": {"bonus": 0.5}}
    ]
    assert {
        r.outcome for r in imported.results if "custom_reward" in str(r.setting)
    } == {"equal"}
    named = own + "custom_reward_function.name=judge"
    (reward,) = at(bring("verl", files + named, 8), "env.rewards")
    assert reward["name"] == "mine:judge"
    (reward,) = at(bring("verl", files, 8), "env.rewards")
    assert reward == {"name": "math_answer"}
