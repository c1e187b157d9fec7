"""verl, ROLL, slime, SkyRL and AReaL, each in its own way of placing models."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.errors import ConfigError
from rlplace.imports import Imported, Setting, import_settings, import_words
from rlplace.placement import HybridComponentPlacement


def bring(library: str, text: str) -> Imported:
    return import_words(library, [text])


def outcomes(imported: Imported, key: str) -> list[str]:
    return [r.outcome for r in imported.results if r.setting.key == key]


def spots(imported: Imported) -> dict[str, str]:
    placement = HybridComponentPlacement(imported.config, imported.topology)
    return {name: str(placement.accelerators(name)) for name in placement.components}


def codes(imported: Imported) -> list[str]:
    return [p.code for p in imported.findings]


def block(imported: Imported, *path: str) -> Any:
    value: Any = imported.config
    for name in path:
        value = value.get(name)
    return value


class TestVerl:
    SIZE = "trainer.nnodes=2 trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.tensor_model_parallel_size=4 "

    def test_one_pool_for_everything(self) -> None:
        imported = bring("verl", self.SIZE + "actor_rollout_ref.actor.use_kl_loss=True reward_model.enable=True")
        assert spots(imported) == dict.fromkeys(("actor", "critic", "reference", "reward", "rollout"), "0-15")
        assert block(imported, "cluster", "component_placement", "rollout", "accelerators_per_rank") == 4
        # FSDP states stay unless offload is switched on; only the engines sleep by themselves.
        assert block(imported, "cluster", "allow_resident") == ["actor", "critic", "reference", "reward"]
        assert block(imported, "rollout", "enable_offload") is True

    def test_grpo_has_no_critic(self) -> None:
        imported = bring("verl", self.SIZE + "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5")
        assert list(spots(imported)) == ["actor", "rollout"]
        assert block(imported, "algorithm") == {
            "name": "grpo",
            "max_prompt_length": 512,
            "max_new_tokens": 512,
            "prompts": 1024,
            "samples_per_prompt": 5,
            "train_batch": 1280,
        }

    def test_a_reward_model_with_its_own_pool(self) -> None:
        own = "reward_model.enable=True reward_model.enable_resource_pool=True reward_model.n_gpus_per_node=4"
        assert spots(bring("verl", self.SIZE + own))["reward"] == "16-19"

    def test_states_that_leave(self) -> None:
        keys = [f"actor_rollout_ref.actor.fsdp_config.{part}_offload" for part in ("param", "optimizer")]
        both = bring("verl", self.SIZE + " ".join(f"{key}=True" for key in keys))
        assert block(both, "actor", "enable_offload") is True
        one = bring("verl", self.SIZE + f"{keys[0]}=True")
        assert block(one, "actor", "enable_offload") is None
        assert outcomes(one, keys[0]) == ["unmapped"]

    def test_engines_must_divide_the_pool(self) -> None:
        imported = bring("verl", self.SIZE.replace("size=4", "size=3"))
        assert codes(imported)[0] == "import-engines"
        assert imported.findings[0].fix == "actor_rollout_ref.rollout.tensor_model_parallel_size: 2"
        assert spots(imported)["rollout"] == "0-15"

    def test_engines_that_never_sleep(self) -> None:
        imported = bring("verl", self.SIZE + "actor_rollout_ref.rollout.free_cache_engine=False")
        assert "rollout" in block(imported, "cluster", "allow_resident")


class TestRoll:
    def test_devices_by_number(self) -> None:
        text = (
            "rollout_batch_size=512 num_return_sequences_in_group=8 prompt_length=1024 response_length=3072 "
            "'actor_train.device_mapping=list(range(0,16))' actor_train.training_args.per_device_train_batch_size=4 "
            "actor_train.training_args.gradient_accumulation_steps=16 'actor_infer.device_mapping=list(range(0,12))' "
            "actor_infer.num_gpus_per_worker=2 'reference.device_mapping=[0, 1, 2, 3] + list(range(8, 12, 2))' "
            "rewards.rule.world_size=8 'rewards.judge.device_mapping=[12,13]'"
        )
        imported = bring("roll", text)
        assert spots(imported) == {
            "actor": "0-15",
            "reference": "0-3,8,10",
            "rollout": "0-11",
            "reward.judge": "12-13",
        }
        assert block(imported, "algorithm", "train_batch") == 4 * 16 * 16
        assert (block(imported, "algorithm", "max_prompt_length"), block(imported, "algorithm", "max_new_tokens")) == (
            1024,
            3072,
        )
        assert block(imported, "reward") == {"enable_offload": True}
        assert outcomes(imported, "rewards.rule.world_size") == ["unmapped"]

    @pytest.mark.parametrize("text", ["__import__('os')", "range(10**12)", "list(range(x))", "[", "{1}", "'a'"])
    def test_other_expressions_are_refused(self, text: str) -> None:
        setting = Setting(key="actor_train.device_mapping", value=text, written=text)
        with pytest.raises(ConfigError, match="import-value"):
            import_settings("roll", [setting])


class TestSlime:
    def test_engines_after_the_trainer(self) -> None:
        imported = bring(
            "slime", "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --num-gpus-per-node 8"
        )
        assert spots(imported) == {"actor": "0-3", "rollout": "4-7"}
        assert "allow_resident" not in block(imported, "cluster")

    def test_colocated_with_a_critic_and_a_reference(self) -> None:
        imported = bring(
            "slime",
            "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate --advantage-estimator ppo --use-kl-loss "
            "--rollout-num-gpus-per-engine 4 --rollout-batch-size 32 --n-samples-per-prompt 8 "
            "--num-steps-per-rollout 2",
        )
        assert spots(imported) == dict.fromkeys(("actor", "critic", "reference", "rollout"), "0-15")
        assert block(imported, "algorithm", "train_batch") == 128
        assert all(block(imported, c, "enable_offload") for c in ("actor", "critic", "reference", "rollout"))

    def test_engines_that_do_not_fill_their_accelerators(self) -> None:
        imported = bring("slime", "--actor-num-gpus-per-node 8 --rollout-num-gpus 6 --rollout-num-gpus-per-engine 4")
        assert codes(imported)[0] == "import-engines"

    def test_learning_has_keys(self) -> None:
        imported = bring(
            "slime",
            "--colocate --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --rollout-temperature 0.8 "
            "--eps-clip-high 0.28 --num-rollout 3000 --rollout-max-response-len 8192 --eval-interval -1 "
            "--hf-checkpoint /root/Qwen3-4B --lr-decay-style constant",
        )
        assert block(imported, "algorithm") == {
            "name": "grpo",
            "max_new_tokens": 8192,
            "clip_ratio_high": 0.28,
            "kl_coef": 0.01,
            "kl_in": "loss",
            "kl_estimator": "k3",
        }
        assert block(imported, "rollout", "temperature") == 0.8
        assert block(imported, "runner") == {"total_iterations": 3000}
        assert block(imported, "actor", "model", "hidden_size") == 2560
        assert {r.outcome for r in imported.results} == {"equal", "implied"}


class TestSkyrl:
    SIZE = "trainer.placement.policy_num_gpus_per_node=8 trainer.placement.ref_num_gpus_per_node=8 "

    def test_colocated_by_default(self) -> None:
        imported = bring("skyrl", self.SIZE + "generator.num_inference_engines=2")
        assert spots(imported) == dict.fromkeys(("actor", "reference", "rollout"), "0-7")
        assert block(imported, "actor", "enable_offload") is True
        assert not codes(imported)

    def test_engines_that_do_not_fill_the_policy(self) -> None:
        imported = bring("skyrl", self.SIZE)
        assert codes(imported)[0] == "import-engines"
        assert imported.findings[0].fix is not None
        assert imported.findings[0].fix.startswith("generator.num_inference_engines=2 ")

    def test_apart_but_for_pairs(self) -> None:
        text = "trainer.placement.colocate_all=false trainer.critic.model.path=x trainer.reward.model.path=y "
        imported = bring("skyrl", self.SIZE + text + "trainer.placement.colocate_critic_reward=true")
        assert spots(imported) == {
            "actor": "0-7",
            "critic": "8-11",
            "reference": "0-7",
            "reward": "8-11",
            "rollout": "12-15",
        }
        uneven = bring("skyrl", text + "trainer.placement.policy_num_gpus_per_node=8")
        assert "import-partners" in codes(uneven)


class TestAreal:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("allocation_mode=sglang:d4p1t1+d4p1t1", {"rollout": "0-3", "actor": "4-7"}),
            ("allocation_mode=sglang:d2t2+fsdp:d4", {"rollout": "0-3", "actor": "4-7"}),
            ("'allocation_mode=sglang[rollout]:d8|fsdp[actor]:d8'", {"rollout": "0-7", "actor": "0-7"}),
            (
                "'allocation_mode=sglang:d4t4+archon:(attn:d1p4t2c2|ffn:d1p4t1e4)'",
                {"rollout": "0-15", "actor": "16-31"},
            ),
            ("rollout.backend=vllm:d4 actor.backend=fsdp:d4", {"rollout": "0-3", "actor": "4-7"}),
        ],
    )
    def test_sizes_in_one_word(self, text: str, expected: dict[str, str]) -> None:
        assert spots(bring("areal", text)) == expected

    def test_partners_are_where_the_actor_is(self) -> None:
        text = "allocation_mode=sglang:d4+d4 critic.path=x ref.path=y ref.scheduling_strategy.type=separation"
        assert spots(bring("areal", text)) == {
            "rollout": "0-3",
            "actor": "4-7",
            "critic": "4-7",
            "reference": "8-11",
        }

    def test_a_cluster_that_is_too_small(self) -> None:
        imported = bring("areal", "allocation_mode=sglang:d8+fsdp:d8 cluster.n_nodes=1 cluster.n_gpus_per_node=8")
        assert codes(imported) == ["import-counts"]
        assert imported.findings[0].fix == "cluster.n_nodes: 2"
        assert imported.topology.num_nodes == 2

    def test_a_cluster_that_is_larger_than_needed(self) -> None:
        imported = bring("areal", "allocation_mode=sglang:d4+fsdp:d4 cluster.n_nodes=3")
        assert imported.topology.num_nodes == 3

    def test_time_sharing_and_batches(self) -> None:
        text = "'allocation_mode=sglang[rollout]:d8|fsdp[actor]:d8' enable_offload=true train_dataset.batch_size=256 "
        imported = bring("areal", text + "gconfig.n_samples=4 gconfig.max_new_tokens=1024 train_dataset.max_length=512")
        assert block(imported, "algorithm") == {
            "name": "grpo",
            "max_prompt_length": 512,
            "max_new_tokens": 1024,
            "prompts": 256,
            "samples_per_prompt": 4,
            "train_batch": 256,
        }
        assert block(imported, "actor", "enable_offload") is True

    @pytest.mark.parametrize("mode", ["sglang:x4+fsdp:d4", "sglang", "sglang:d4t1+:"])
    def test_sizes_that_cannot_be_read(self, mode: str) -> None:
        with pytest.raises(ConfigError, match="import-value"):
            bring("areal", f"allocation_mode={mode}")
