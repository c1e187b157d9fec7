"""Imports at a size that a laptop runs: who shares with whom stays, numbers shrink."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.config.read import read_config
from rlplace.errors import ConfigError
from rlplace.imports import Imported, import_words
from rlplace.imports.rules import shape_of
from rlplace.imports.tiny import shrink
from rlplace.placement.memory.model import read_model
from rlplace.runtime.prepare import prepare


def small(flags: str) -> Imported:
    return shrink(import_words("openrlhf", [flags]))


def lines(imported: Imported) -> dict[str, str]:
    assert imported.layout is not None
    placement = imported.layout.placement
    return {name: str(placement.accelerators(name)) for name in placement.components}


ALL = "--vllm_num_engines 8 --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep"
PAIRS = (
    "--actor_num_nodes 2 --ref_num_nodes 2 --critic_num_nodes 2 --reward_num_nodes 2 --colocate_actor_ref "
    "--colocate_critic_reward --vllm_num_engines 4 --vllm_tensor_parallel_size 4"
)


def test_everything_on_one_stays_together() -> None:
    imported = small(ALL)
    assert lines(imported) == dict.fromkeys(
        ("actor", "critic", "reference", "reward", "rollout"), "0"
    ) | {"env": ""}
    assert imported.topology.num_accelerators == 1
    assert imported.missing == ()
    config = read_config(imported.config)
    assert config.runs
    assert (config.cluster.launcher, config.cluster.accelerator.kind) == (
        "inline",
        "emulated",
    )


@pytest.mark.parametrize(
    ("ref_nodes", "numbers", "launcher"),
    [
        (2, ("0", "0", "1", "1", "2"), "inline"),
        (1, ("0-1", "0", "2-3", "2-3", "4-5"), "ray"),
    ],
)
def test_thirds_stay_thirds_and_uneven_sizes_uneven(
    ref_nodes: int, numbers: tuple[str, ...], launcher: str
) -> None:
    imported = small(PAIRS.replace("--ref_num_nodes 2", f"--ref_num_nodes {ref_nodes}"))
    placed = dict(
        zip(("actor", "reference", "critic", "reward", "rollout"), numbers, strict=True)
    )
    assert lines(imported) == placed | {"env": ""}
    assert read_config(imported.config).cluster.launcher == launcher


def test_what_is_learned_how_stays() -> None:
    learned = "--init_kl_coef 0.05 --kl_estimator k3 --advantage_estimator group_norm --n_samples_per_prompt 8"
    config = read_config(small(f"{ALL} {learned} --actor_learning_rate 1e-4").config)
    algorithm = config.algorithm
    assert (algorithm.name, algorithm.kl_coef, algorithm.kl_estimator) == (
        "grpo",
        0.05,
        "k3",
    )
    assert algorithm.samples_per_prompt == 2  # as many as the comparison needs
    assert config.actor.optimizer.lr == 1e-4
    assert config.actor.enable_offload
    assert config.rollout.engine == "transformers"


@pytest.mark.parametrize(
    ("flag", "kind"),
    [
        ("--remote_rm_url http://judge:5000", "url"),
        ("--remote_rm_url r/mine.py", "function"),
    ],
)
def test_a_remote_reward_stays_remote(flag: str, kind: str) -> None:
    imported = small(f"{ALL} {flag}")
    assert read_config(imported.config).reward_of("reward").kind == kind
    assert lines(imported)["reward"] == ""


HYBRID = (("actor", "0-7"), ("env", "0-3"), ("rollout", "4-7"))


def simulated(*words: str) -> Imported:
    placed = [f"cluster.component_placement.{c}={n}" for c, n in HYBRID]
    return shrink(import_words("rlinf", [*placed, *words]))


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("openvla_oft", "vla"), ("cnn_policy", "cnn"), ("mlp_policy", "mlp")],
)
def test_a_job_on_simulators_keeps_places_and_kind_of_policy(
    kind: str, policy: str
) -> None:
    imported = simulated(
        f"actor.model.model_type={kind}",
        "algorithm.adv_type=gae",
        "algorithm.loss_type=actor_critic",
        "algorithm.gamma=0.9",
        "actor.model.num_action_chunks=8",
        "env.train.total_num_envs=128",
        "env.train.max_steps_per_rollout_epoch=80",
        "actor.optim.lr=1e-5",
        "actor.enable_offload=True",
        "rollout.enable_offload=True",
        "rollout.pipeline_stage_num=2",
    )
    assert lines(imported) == {"actor": "0-1", "env": "0", "rollout": "1"}
    # It passes the checks of a whole config, such as that rows divide over ranks
    config: Any = prepare(imported.config).config
    assert config.runs
    assert (config.actor.policy.kind, config.algorithm.gamma) == (policy, 0.9)
    assert config.actor.optimizer.lr == 1e-5
    assert (config.actor.enable_offload, config.rollout.enable_offload) == (True, True)
    assert (config.rollout.pipeline_stage_num, config.rollout.action_chunk) == (2, 2)
    assert imported.missing == ()


@pytest.mark.parametrize("kind", ["openpi", "gr00t_n1d6", "dexbotic_pi"])
def test_flow_matching_stays_flow_matching(kind: str) -> None:
    """Steps and noise are those of the original; its entropy has no effect, and is not rewarded."""
    imported = simulated(
        f"actor.model.model_type={kind}",
        "algorithm.adv_type=gae",
        "algorithm.loss_type=actor_critic",
        "algorithm.entropy_bonus=0.01",
        "actor.model.num_action_chunks=8",
        "actor.model.num_steps=3",
        "actor.model.openpi.noise_level=0.3",
        "actor.model.openpi.noise_method=flow_sde",
    )
    config: Any = prepare(imported.config).config
    policy = config.actor.policy
    assert (policy.kind, policy.head) == ("vla", "flow")
    assert (policy.denoising_steps, policy.noise_level) == (3, 0.3)
    assert config.algorithm.entropy_coef == 0
    whys = {each.setting.key: each.text for each in imported.results}
    assert "denoising_steps" in whys["actor.model.num_steps"]
    assert "flow_sde" in whys["actor.model.openpi.noise_method"]


def test_flow_matching_with_settings_that_are_not_there_has_the_defaults() -> None:
    imported = simulated(
        "actor.model.model_type=openpi", "actor.model.openpi.noise_level=7"
    )
    config: Any = prepare(imported.config).config
    assert config.actor.policy.noise_level == 0.5


def test_sac_becomes_an_off_policy_job() -> None:
    sac = ("algorithm.adv_type=embodied_sac", "algorithm.loss_type=embodied_sac")
    imported = simulated(*sac)
    assert lines(imported) == {"actor": "0-1", "rollout": "1", "replay": ""}
    prepared = prepare(imported.config)
    assert prepared.plan.placement.world_size("actor") == 2
    assert prepared.mapping["job"] == "off_policy"
    assert prepared.mapping["algorithm"]["name"] == "sac"


def test_grpo_on_simulators_is_said_to_become_ppo() -> None:
    grpo = ("algorithm.adv_type=grpo", "algorithm.loss_type=actor")
    imported = simulated(*grpo)
    reasons = [why for _, why in imported.assumed]
    assert "jobs on simulators have PPO in place of GRPO" in reasons
    config: Any = prepare(imported.config).config
    assert config.algorithm.name == "ppo"


def test_an_algorithm_without_a_job_on_simulators_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        simulated("algorithm.adv_type=rlt_td3", "algorithm.loss_type=rlt_td3")
    (found,) = caught.value.problems
    assert (found.key, found.code) == ("--tiny", "import-value")
    assert found.got == "rlt_td3, rlt_td3"


@pytest.mark.parametrize(
    ("name", "weights"),  # as published, in billions
    [
        ("OpenRLHF/Llama-3-8b-sft", 8.03),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", 70.55),
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494),
        ("Qwen/Qwen2.5-Math-1.5B", 1.544),
        ("Qwen/Qwen2.5-3B-Instruct", 3.086),
        ("Qwen/Qwen2.5-7B", 7.616),
        ("Qwen/Qwen2.5-14B", 14.77),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", 32.76),
        ("/root/Qwen3-0.6B", 0.596),
        ("Qwen/Qwen3-1.7B", 1.72),
        ("Qwen/Qwen3-4B", 4.02),
        ("Qwen/Qwen3-8B", 8.19),
        ("Qwen/Qwen3-14B", 14.77),
        ("Qwen/Qwen3-32B", 32.76),
    ],
)
def test_models_of_a_known_name_have_as_many_weights_as_published(
    name: str, weights: float
) -> None:
    shape = shape_of(name)
    assert shape is not None
    assert "path" not in shape
    assert read_model(shape, key="actor.model").parameters / 1e9 == pytest.approx(
        weights, rel=2e-3
    )


def test_other_names_are_not_known() -> None:
    assert shape_of("mine/other-8b") is None
