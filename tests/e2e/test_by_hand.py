"""The shipped workers in a loop of one's own, from a plain config: equal to `train`, and what is refused."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import rlplace
from rlplace.config import compose
from rlplace.errors import (
    ChannelTimeout,
    ClusterError,
    ConfigError,
    PlacementError,
    WorkerError,
    WorkerMisuse,
)
from rlplace.metrics import reduce_metrics
from rlplace.placement.language.slots import PackedPlacementStrategy
from rlplace.placement.schedule import Residency
from rlplace.workers.launch.group import WorkerGroup, wait_all
from rlplace.workers.roles.actor import PolicyActor
from tests.e2e.language import INLINE as INLINE_LLM
from tests.e2e.language import tiny
from tests.e2e.training import ONE_RANK_EACH, SHARED, SMALL, placed, train
from tests.pages import ROOT, blocks, read_page, shell

PAGE = ROOT / "docs" / "by_hand.md"
ITERATIONS = 3
HYBRID = (*SMALL, *placed("0-1", "0", "1"))
INLINE = (*SMALL, *placed(*ONE_RANK_EACH["hybrid_ppo"]), "cluster.launcher=inline")


def composed(name: str, *overrides: str) -> Any:
    """Return the mapping of a shipped config."""
    (found,) = compose.with_hydra(["--config-name", name, *overrides])
    return found.mapping


def launch_three(
    cluster: rlplace.Cluster, cfg: Any, env: Any, rollout: Any = rlplace.Rollout
) -> tuple[WorkerGroup, WorkerGroup, WorkerGroup]:
    placement = rlplace.HybridComponentPlacement(cfg, cluster)
    actor_group = rlplace.FSDPActor.create_group(cfg).launch(
        cluster,
        name=cfg.get("actor", {}).get("group_name"),
        placement_strategy=placement.get_strategy("actor"),
    )
    rollout_group = rollout.create_group(cfg).launch(
        cluster,
        name=cfg.get("rollout", {}).get("group_name"),
        placement_strategy=placement.get_strategy("rollout"),
    )
    env_group = env.create_group(cfg).launch(
        cluster, placement_strategy=placement.get_strategy("env")
    )
    return actor_group, rollout_group, env_group


def iterate(
    actor: WorkerGroup, rollout: WorkerGroup, env: WorkerGroup
) -> dict[str, float]:
    """Run one iteration by the names of this library."""
    ranks = wait_all([actor.push_weights(), rollout.pull_weights()])
    ranks += wait_all([env.run(), rollout.generate()])
    ranks += wait_all([actor.learn()])
    return reduce_metrics([metrics for each in ranks for metrics in each])


def check_equal(
    lines: list[Mapping[str, Any]], by_hand: list[dict[str, float]]
) -> None:
    assert len(lines) == len(by_hand) == ITERATIONS
    for line, numbers in zip(lines, by_hand, strict=True):
        for name in ("env/return", "env/episodes", "actor/policy_loss", "actor/lr"):
            if name in numbers:
                assert numbers[name] == line[name], name


@pytest.mark.slow  # two runs on Ray; threads run the same loop below, and a script of the page runs it on Ray
@pytest.mark.ray
def test_simulators_by_hand_are_equal_to_train(tmp_path: Path) -> None:
    length = f"runner.total_iterations={ITERATIONS}"
    run = train("hybrid_ppo", tmp_path, *HYBRID, length)
    assert run.code == 0, run.err
    names = ("+actor.group_name=ActorGroup", "+rollout.group_name=RolloutGroup")
    cfg = OmegaConf.create(composed("hybrid_ppo", *HYBRID, length, *names))
    with rlplace.Cluster(cluster_cfg=cfg.cluster) as cluster:
        placement = rlplace.HybridComponentPlacement(cfg, cluster)
        assert placement.get_world_size("actor") == 2
        actor, rollout, env = launch_three(cluster, cfg, rlplace.SimulatorEnv)
        assert (actor.name, rollout.name, env.name) == (
            "ActorGroup",
            "RolloutGroup",
            "env",
        )
        by_hand = [iterate(actor, rollout, env) for _ in range(ITERATIONS)]
        actor.save_model(str(tmp_path / "policy.safetensors")).wait()
    check_equal(run.metrics(), by_hand)
    assert run.folder is not None
    saved = (tmp_path / "policy.safetensors").read_bytes()
    assert saved == (run.folder / "policy.safetensors").read_bytes()


def test_a_loop_with_rlinf_s_names_on_threads(tmp_path: Path) -> None:
    run = train(
        "hybrid_ppo", tmp_path, *INLINE, f"runner.total_iterations={ITERATIONS}"
    )
    assert run.code == 0, run.err
    cfg = composed("hybrid_ppo", *INLINE, f"runner.total_iterations={ITERATIONS}")
    by_hand = []
    with rlplace.Cluster(
        num_nodes=1, num_gpus_per_node=4, launcher="inline"
    ) as cluster:
        actor, rollout, env = launch_three(cluster, cfg, rlplace.SimulatorEnv)
        for group in (actor, rollout, env):
            group.init_worker().wait()
        for step in range(ITERATIONS):
            actor.set_global_step(step)
            pulled = rollout.sync_model_from_actor()
            pushed = actor.sync_model_to_rollout()
            pushed.wait()
            pulled.wait()
            stepped = env.interact()
            answered = rollout.generate()
            received = actor.recv_rollout_batch()
            played = stepped.wait()
            answered.wait()
            assert received.wait() == [{}]
            assert actor.compute_advantages_and_returns().wait() == [{}]
            by_hand.append(reduce_metrics([*played, *actor.run_training().wait()]))
    check_equal(run.metrics(), by_hand)


def test_a_language_model_by_hand_on_threads(model: Path, tmp_path: Path) -> None:
    asked = (
        *INLINE_LLM,
        *tiny(model),
        "rollout.seed=0",
        f"runner.total_iterations={ITERATIONS}",
        "runner.eval_every=0",
    )
    run = train("hybrid_grpo_llm", tmp_path, *asked)
    assert run.code == 0, run.err
    cfg = OmegaConf.create(composed("hybrid_grpo_llm", *asked))
    with rlplace.Cluster(cluster_cfg=cfg.cluster) as cluster:
        groups = launch_three(
            cluster, cfg, rlplace.TextEnv, rlplace.TransformersRollout
        )
        by_hand = [iterate(*groups) for _ in range(ITERATIONS)]
    for line, numbers in zip(run.metrics(), by_hand, strict=True):
        for name in ("actor/reward", "actor/tokens_learned", "rollout/tokens"):
            assert numbers[name] == line[name], name


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
def test_a_language_model_by_hand_with_vllm(model: Path) -> None:
    cfg = composed(
        "hybrid_grpo_llm",
        *placed("0-1", "0", "1-2"),
        *tiny(model, "vllm"),
        "runner.eval_every=0",
    )
    with rlplace.Cluster(cluster_cfg=cfg["cluster"]) as cluster:
        groups = launch_three(cluster, cfg, rlplace.TextEnv, rlplace.VLLMRollout)
        numbers = [iterate(*groups) for _ in range(2)]
    assert all(each["rollout/tokens"] > 0 for each in numbers)


def test_a_class_of_one_s_own_takes_the_place_of_a_shipped_one() -> None:
    cfg = composed("hybrid_ppo", *INLINE)
    with rlplace.Cluster(cluster_cfg=cfg["cluster"]) as cluster:
        group = rlplace.FSDPActor.create_group(cfg, worker=Curious).launch(cluster)
        assert group.name == "actor"
        assert group.wonder().wait() == ["actor rank 0 wonders"]
        # What the user moves is known to the schedule.
        assert group.onload().wait()[0].residency == Residency.FULL
        assert group.offload().wait()[0].accelerator_bytes == 0


class Curious(PolicyActor):
    def wonder(self) -> str:
        return f"{self.context.owner} wonders"


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_call_that_would_wait_for_a_group_that_is_not_launched() -> None:
    cfg = composed("hybrid_ppo", *INLINE, "runner.channel_timeout_s=1")
    with rlplace.Cluster(cluster_cfg=cfg["cluster"]) as cluster:
        actor = rlplace.FSDPActor.create_group(cfg).launch(cluster)
        with pytest.raises(ClusterError, match="group-not-launched") as refused:
            actor.push_weights()
        assert "Rollout.create_group(cfg)" in str(refused.value)
        # Another stage's component is missing: the deadline of the channel names it.
        with pytest.raises(WorkerError) as late:
            actor.learn().wait()
        assert isinstance(late.value.cause, ChannelTimeout)
        assert "it waited for env, and none of its ranks" in str(late.value)
        assert "launch env first" in str(late.value)


def test_a_strategy_that_places_elsewhere() -> None:
    cfg = composed("hybrid_ppo", *INLINE)
    with rlplace.Cluster(cluster_cfg=cfg["cluster"]) as cluster:
        builder = rlplace.FSDPActor.create_group(cfg)
        with pytest.raises(ClusterError, match="placed-elsewhere") as refused:
            builder.launch(
                cluster, name="actor", placement_strategy=PackedPlacementStrategy(1, 1)
            )
        assert "rank 0 on 0 of node 0" in str(refused.value)


def test_names_that_the_config_does_not_have() -> None:
    cfg = composed("hybrid_ppo", *INLINE)
    with rlplace.Cluster(cluster_cfg=cfg["cluster"]) as cluster:
        with pytest.raises(PlacementError, match="places no critic"):
            rlplace.Critic.create_group(cfg).launch(cluster)
        with pytest.raises(WorkerMisuse, match="another-worker") as refused:
            rlplace.VLLMRollout.create_group(cfg).launch(cluster)
        assert "fix: Rollout.create_group(cfg)" in str(refused.value)
        with pytest.raises(WorkerMisuse, match="SimulatorEnv"):
            rlplace.TextEnv.create_group(cfg).launch(cluster)
        with pytest.raises(WorkerMisuse, match="not derived from PolicyActor"):
            rlplace.FSDPActor.create_group(cfg, worker=rlplace.Worker).launch(cluster)


def test_what_is_no_config_of_a_job() -> None:
    cfg = composed("hybrid_ppo", *INLINE)
    for given in (None, cfg["actor"], 3):
        with pytest.raises(WorkerMisuse, match="not-a-job-config"):
            rlplace.FSDPActor.create_group(given)
    for given in (None, cfg):
        with pytest.raises(WorkerMisuse, match="FSDPActor") as refused:
            PolicyActor.create_group(given)
        assert "worker=PolicyActor" in str(refused.value)


def test_configs_that_differ_or_are_wrong() -> None:
    cfg = composed("hybrid_ppo", *INLINE)
    apart = placed("0", "2", "3")
    without = composed("disaggregated_ppo", *SMALL, *apart, "cluster.launcher=inline")
    del without["env"]
    other = {**cfg, "algorithm": {**cfg["algorithm"], "gamma": 0.5}}
    with rlplace.Cluster(cluster_cfg=cfg["cluster"]) as cluster:
        with pytest.raises(ConfigError, match=r"env\.id"):
            rlplace.FSDPActor.create_group(without).launch(cluster)
        rlplace.FSDPActor.create_group(cfg).launch(cluster)
        with pytest.raises(ClusterError, match=r"another algorithm\.gamma"):
            rlplace.Rollout.create_group(other).launch(cluster)
    with pytest.raises(ConfigError, match=r"cluster\.num_nodez"):
        rlplace.Cluster(cluster_cfg={**cfg["cluster"], "num_nodez": 2})


def test_jobs_that_a_loop_by_hand_cannot_run(model: Path) -> None:
    threads = "cluster.launcher=inline"
    shared = composed("hybrid_ppo", *SMALL, threads, *SHARED)
    ahead = composed(
        "disaggregated_grpo_llm",
        threads,
        *placed("0", "2", "3"),
        *tiny(model),
        "algorithm.max_staleness=1",
    )
    for cfg, key in ((shared, "process: shared"), (ahead, "max_staleness: 0")):
        with (
            rlplace.Cluster(cluster_cfg=cfg["cluster"]) as cluster,
            pytest.raises(ConfigError, match="not-by-hand") as refused,
        ):
            rlplace.FSDPActor.create_group(cfg).launch(cluster)
        assert key in str(refused.value)


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.ray
def test_its_scripts_print_what_the_page_says(tmp_path: Path) -> None:
    read_page(PAGE, tmp_path, shell(tmp_path))


def test_its_other_code_is_python() -> None:
    for block in blocks(PAGE):
        if block.language == "python":
            ast.parse(block.text)
