"""Command lines of OpenRLHF, pasted as one text: what they become, whether it fits, and a run at tiny scale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlplace.cli import plan
from tests.e2e.training import INLINE_LAUNCHER, train
from tests.tiny_lm import tiny_model, tiny_reward_model

ENTRY = "python3 -m openrlhf.cli.train_ppo_ray "
ROLES = ("ref", "reward", "critic", "actor")
LLAMA_8B = (
    ENTRY
    + "".join(f"--{role}_num_nodes 1 --{role}_num_gpus_per_node 8 " for role in ROLES)
    + "--vllm_num_engines 8 --vllm_tensor_parallel_size 1 --colocate_all_models --vllm_gpu_memory_utilization 0.6 "
    "--pretrain OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k "
    "--micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 1024 "
    "--max_samples 100000 --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024 --zero_stage 3 --bf16 "
    "--actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 "
    "--prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --apply_chat_template "
    "--normalize_reward --packing_samples --gradient_checkpointing "
    "--vllm_sync_backend nccl --vllm_enable_sleep --deepspeed_enable_sleep"
)


def imported(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> str:
    """What the import says; the config is `folder`/imported.yaml."""
    assert (
        plan.main(
            ["import", "openrlhf", text, "--out", str(folder / "imported.yaml"), *more]
        )
        == 0
    )
    return capsys.readouterr().out


def planned(
    folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    code = plan.main(["--config-dir", str(folder), "--config-name", "imported", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_8b_recipe_fits_eight_accelerators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = imported(LLAMA_8B, tmp_path, capsys)
    assert "collocated, uses 8 instead of 40" in said
    assert "Not mapped" not in said
    assert "Does not hold" not in said
    code, out, err = planned(tmp_path, capsys, "cluster=8xH100")
    assert (code, err) == (0, "")
    assert "savings: 8 accelerators do the work of 40, 32 fewer" in out
    assert "8 engines x 1 = 8 accelerators" in out
    assert "memory: fits; tightest accelerators 0-7" in out


def test_a_recipe_that_is_too_large_says_what_would_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(
        LLAMA_8B.replace("--micro_train_batch_size 8", "--micro_train_batch_size 64"),
        tmp_path,
        capsys,
    )
    code, _, err = planned(tmp_path, capsys, "cluster=8xH100")
    assert code == 3
    fixes = re.findall(r" (?:fix|and): (\S+): (\S+)", err)
    assert fixes[0][0].endswith(".token_budget")
    code, _, err = planned(
        tmp_path, capsys, "cluster=8xH100", *(f"{key}={value}" for key, value in fixes)
    )
    assert (code, err) == (0, "")


def test_the_8b_recipe_runs_at_tiny_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "8 accelerators of the original are one here" in imported(
        LLAMA_8B, tmp_path, capsys, "--tiny"
    )
    policy = tiny_model(tmp_path / "policy")
    judge = tiny_reward_model(tmp_path / "judge", like=policy)
    models = (
        f"actor.model.path={policy}",
        f"reward.model.path={judge}",
        "runner.total_iterations=1",
    )
    run = train(
        "imported",
        tmp_path / "runs",
        "--config-dir",
        str(tmp_path),
        INLINE_LAUNCHER,
        *models,
    )
    assert run.code == 0, run.err
    (line,) = run.metrics()
    turns = {
        f"time/{stage}_{turn}_s" for stage in ("infer", "learn") for turn in (1, 2)
    }
    assert turns <= line.keys(), (
        "all five share one accelerator, so that they take turns"
    )
    assert line["actor/tokens_learned"] == line["rollout/tokens"] > 0


def test_two_lines_move_the_critic_and_the_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(LLAMA_8B, tmp_path, capsys, "--tiny")
    apart = ("cluster.component_placement.critic=1", "cluster.accelerators_per_node=2")
    remote = (
        "cluster.component_placement.reward=cpu",
        "+reward.url=http://127.0.0.1:5000/get_reward",
        "~reward.model",
    )
    code, out, err = planned(tmp_path, capsys, *apart, *remote)
    assert (code, err) == (0, "")
    assert "actor + critic        disaggregated   share nothing" in out
