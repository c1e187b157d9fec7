"""The commands and settings of docs/llm.md: what it tells people to type is planned without a problem."""

from __future__ import annotations

import re
import shlex
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlplace.cli import train
from rlplace.config.blocks.training import AlgorithmName
from rlplace.config.read import read_config
from rlplace.envs.registry import TASKS

GUIDE = (Path(__file__).parents[2] / "docs" / "llm.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", GUIDE, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for language, block in BLOCKS
    if language == "bash"
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("scripts/train")
]


@pytest.mark.parametrize(
    "words",
    [c for c in COMMANDS if not any("/models/" in word for word in c)],
    ids=" ".join,
)
def test_every_command_is_planned(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*words, "dry_run=true"]) == 0, capsys.readouterr().err
    assert "nothing was started" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "column"), [("grpo_qwen3_8b", 0), ("grpo_llama_70b", 1)]
)
def test_what_real_sizes_hold_is_as_planned(
    config: str, column: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([config, "dry_run=true"]) == 0
    plan = capsys.readouterr().out
    for stage in ("rollout", "learn"):
        (row,) = re.findall(
            rf"^\| {stage} holds \| (\d+) GiB.*? \| (\d+) GiB", GUIDE, re.MULTILINE
        )
        (held,) = re.findall(
            rf"^[ >]+{stage} +[\d.]+ +[\d.]+ +([\d.]+) +[\d.]+$", plan, re.MULTILINE
        )
        assert int(row[column]) == round(float(held)), stage


def test_the_placement_line_alone_makes_it_another_mode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    modes = []
    for words in COMMANDS[:2]:
        train.main([*words, "dry_run=true"])
        modes.append(capsys.readouterr().out.partition(",")[0])
    assert modes == ["plan: hybrid", "plan: collocated"]


def test_the_settings_are_read() -> None:
    blocks = (yaml.safe_load(block) for language, block in BLOCKS if language == "yaml")
    task, small, another, images, agent, *blocks = blocks
    of_others, on_server, critic, judges, cut, context, experts, real = blocks
    rest: dict[str, Any] = {
        "cluster": {"component_placement": {"actor": 0, "env": 0, "rollout": 0}},
        "algorithm": {"name": "grpo", "prompts": 256},
        "actor": {"model": {"path": "somewhere"}},
    }
    with_taskset = read_config(rest | of_others)
    assert (with_taskset.env.task, with_taskset.env.max_turns) == ("verifiers", 8)
    assert with_taskset.env.kwargs["environment"] == "gsm8k-v1"
    with_server = read_config(rest | on_server)
    assert (with_server.env.task, with_server.env.max_turns) == ("openenv", 8)
    assert with_server.env.kwargs["action"] == "message"
    with_experts = read_config(rest | {"env": {"task": "arithmetic"}} | experts)
    assert with_experts.actor.router_replay
    with_critic = read_config(rest | {"env": {"task": "arithmetic"}} | critic)
    assert (with_critic.critic.warmup_iterations, with_critic.placed) == (
        5,
        ("actor", "critic", "rollout", "env"),
    )
    with_judges = read_config(rest | {"env": {"task": "arithmetic"}} | judges)
    rewards = [name for name in with_judges.placed if name.startswith("reward.")]
    assert [with_judges.reward_of(name).kind for name in rewards] == [
        "model",
        "function",
        "url",
    ]
    cut["cluster"]["component_placement"]["env"] = "cpu"
    with_cut = read_config(rest | {"env": {"task": "arithmetic"}} | cut)
    assert with_cut.placed == ("actor", "reference", "rollout", "env")
    assert with_cut.cluster.component_placement["actor"] == {
        "placement": "0-7",
        "tensor_parallel_size": 2,
    }
    context["cluster"]["component_placement"] |= {"rollout": "0-7", "env": "cpu"}
    with_context = read_config(rest | {"env": {"task": "arithmetic"}} | context)
    assert with_context.cluster.component_placement["actor"] == {
        "placement": "0-7",
        "context_parallel_size": 4,
    }
    assert images["defaults"] == another["defaults"]
    with_images = read_config(rest | {"env": images["env"]})
    assert (
        with_images.env.kwargs["image"],
        with_images.env.max_image_bytes,
    ) == ("image", 1 << 20)
    assert real.pop("defaults") == ["grpo_qwen3_8b", "_self_"]
    whole = read_config(
        {
            "cluster": rest["cluster"],
            "actor": rest["actor"],
            **real,
            "algorithm": {"prompts": 256, **real["algorithm"]},
        }
    )
    assert [reward.name for reward in whole.env.rewards] == [
        "math_verify",
        "length_penalty",
    ]
    assert (whole.algorithm.only_with_signal, whole.runner.eval_temperature) == (
        True,
        0.6,
    )
    assert small.pop("defaults") == [
        "hybrid_grpo_llm",
        {"override /model@actor.model": "tiny"},
        "_self_",
    ]
    of_one_process = read_config(
        {
            **small,
            "actor": rest["actor"] | small["actor"],
            "algorithm": {"name": "grpo", **small["algorithm"]},
        }
    )
    assert (of_one_process.actor.lora_rank, of_one_process.env.chat) == (4, False)
    with_agent = read_config(rest | agent)
    assert (with_agent.env.task, with_agent.env.max_turns) == ("agent", 4)
    assert another["defaults"] == ["hybrid_grpo_llm", "_self_"]
    assert another["env"]["kwargs"] == task["env"]["kwargs"]
    config = read_config(task | rest)
    assert [reward.name for reward in config.env.rewards] == [
        "math_answer",
        "my_rewards:brief",
    ]


def test_every_shipped_task_and_algorithm_is_in_the_guide() -> None:
    told = set(re.findall(r"^\| `([\w.:]+)`", GUIDE, re.MULTILINE))
    assert {*TASKS, *typing.get_args(AlgorithmName)} <= told
