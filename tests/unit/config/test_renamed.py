"""Keys of earlier configs: each is refused with a line that makes the config right when it is pasted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from rlplace.config.read import moved, read_config
from rlplace.errors import ConfigError, Problem

RENAMED = (*moved(), "algorithm.name: rlhf")
CLUSTER = {"component_placement": {"actor": "0", "env": "0", "rollout": "0"}}
SIMULATED: dict[str, Any] = {
    "cluster": CLUSTER,
    "env": {"id": "CartPole-v1", "total_num_envs": 128},
    "algorithm": {"rollout_steps": 32},
}
LANGUAGE: dict[str, Any] = {
    "cluster": CLUSTER,
    "env": {"kind": "text", "task": "arithmetic"},
    "actor": {"model": {"path": "models/tiny"}},
    "algorithm": {"name": "grpo", "prompts": 4},
}
MASTER = {
    "optimizer": "adamw_master",
    "optimizer_on_host": True,
    "adam": {"lr": 5.0e-6},
}
# Old key -> the rest of the job, the old block, the attributes that it means now.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, object]]] = {
    "env.adapter": (
        SIMULATED,
        {"env": {"adapter": "tests.gyms:Adapter"}},
        {"env.kind": "tests.gyms:Adapter"},
    ),
    "runner.stop_at_reward": (
        LANGUAGE,
        {"runner": {"stop_at_reward": 0.5}},
        {"runner.stop_at_return": 0.5},
    ),
    "actor.precision": (
        SIMULATED,
        {"actor": {"precision": "bf16"}},
        {"actor.compute": "bf16"},
    ),
    "algorithm.clip_ratio": (
        SIMULATED,
        {"algorithm": {"clip_ratio": 0.1}},
        {"algorithm.clip_high": 0.1},
    ),
    "algorithm.whiten_advantages": (
        LANGUAGE,
        {"algorithm": {"whiten_advantages": True}},
        {"algorithm.advantages_normalized": True},
    ),
    "runner.total_env_steps": (
        SIMULATED,
        {"runner": {"total_env_steps": 300_000}},
        {"runner.total_iterations": 74},
    ),
    "runner.total_timesteps": (
        SIMULATED,
        {"runner": {"total_timesteps": 300_000}},
        {"runner.total_iterations": 74},
    ),
    "algorithm.total_timesteps": (
        SIMULATED,
        {"algorithm": {"total_timesteps": 300_000}},
        {"runner.total_iterations": 74},
    ),
    "total_timesteps": (
        SIMULATED,
        {"total_timesteps": 300_000},
        {"runner.total_iterations": 74},
    ),
    "actor.adam": (
        LANGUAGE,
        {"actor": {"adam": {"lr": 0.005}}},
        {"actor.optimizer.lr": 0.005},
    ),
    "actor.optimizer": (
        LANGUAGE,
        {"actor": MASTER},
        {"actor.optimizer.kind": "adamw_master"},
    ),
    "actor.optimizer_on_host": (
        LANGUAGE,
        {"actor": MASTER},
        {"actor.optimizer.on_host": True},
    ),
    "critic.adam": (LANGUAGE, {"critic": MASTER}, {"critic.optimizer.lr": 5.0e-6}),
    "critic.optimizer": (
        LANGUAGE,
        {"critic": {"optimizer": "adamw_8bit"}},
        {"critic.optimizer.kind": "adamw_8bit"},
    ),
    "critic.optimizer_on_host": (
        LANGUAGE,
        {"critic": {"optimizer_on_host": True}},
        {"critic.optimizer.on_host": True},
    ),
    "model": (
        {key: block for key, block in LANGUAGE.items() if key != "actor"},
        {"model": {"path": "models/tiny"}},
        {"model_path": "models/tiny"},
    ),
    "algorithm.name: rlhf": (
        LANGUAGE,
        {"algorithm": {"name": "rlhf"}},
        {"algorithm.name": "ppo", "job": "language_model"},
    ),
}


def pasted(mapping: dict[str, Any], problem: Problem) -> None:
    """Replace the key by the line of the fix, which is for its block, or has the whole path."""
    assert problem.fix is not None
    block, _, leaf = problem.key.rpartition(".")
    (mapping[block] if block else mapping).pop(leaf, None)
    ((key, value),) = yaml.safe_load(problem.fix).items()
    path = f"{block}.{key}" if block and "." not in key else key
    block, _, leaf = path.rpartition(".")
    mapping.setdefault(block, {})[leaf] = value


def test_every_renamed_key_has_a_case() -> None:
    assert {*CASES} == {*RENAMED}


@pytest.mark.parametrize("old", RENAMED)
def test_the_fix_of_a_renamed_key_can_be_pasted(old: str) -> None:
    rest, written, means = CASES[old]
    blocks = {
        k: {**rest.get(k, {}), **block} if isinstance(block, dict) else block
        for k, block in written.items()
    }
    mapping = copy.deepcopy({**rest, **blocks})
    with pytest.raises(ConfigError) as caught:
        read_config(mapping)
    assert set(caught.value.codes) == {"renamed-key"}
    assert old.partition(":")[0] in [problem.key for problem in caught.value.problems]
    for problem in caught.value.problems:
        pasted(mapping, problem)
    config: Any = read_config(mapping)
    for path, expected in means.items():
        value = config
        for name in path.split("."):
            value = getattr(value, name)
        assert value == expected, path


@pytest.mark.parametrize(
    ("old", "value"),
    [("clip_ratio", "0.3"), ("clip_ratio", "30%"), ("whiten_advantages", "yes")],
)
def test_the_fix_is_a_value_that_the_new_key_takes(old: str, value: object) -> None:
    mapping = {**SIMULATED, "algorithm": {old: value}}
    with pytest.raises(ConfigError) as caught:
        read_config(mapping)
    (problem,) = caught.value.problems
    pasted(mapping, problem)
    read_config(mapping)


def test_both_the_old_and_the_new_key_leave_the_new_one() -> None:
    mapping = {**SIMULATED, "actor": {"precision": "bf16", "compute": "fp32"}}
    with pytest.raises(ConfigError) as caught:
        read_config(mapping)
    assert [(p.code, p.fix) for p in caught.value.problems] == [
        (
            "renamed-key",
            "actor.compute: bf16        (a line without indent, in place of precision)",
        )
    ]


def test_an_old_key_of_the_optimizer_goes_before_the_new_one() -> None:
    actor = {
        **LANGUAGE["actor"],
        "optimizer": {"lr": 0.1, "on_host": False},
        "optimizer_on_host": True,
    }
    with pytest.raises(ConfigError) as caught:
        read_config({**LANGUAGE, "actor": actor})
    assert [p.fix for p in caught.value.problems] == [
        "optimizer: {lr: 0.1, on_host: true}"
    ]


def problems_of(actor: dict[str, Any]) -> list[tuple[str, str | None]]:
    with pytest.raises(ConfigError) as caught:
        read_config({**SIMULATED, "actor": actor})
    return [(p.key, p.fix) for p in caught.value.problems]


def test_an_old_optimizer_goes_before_the_new_one() -> None:
    found = problems_of({"adam": {"lr": 0.1}, "optimizer": {"lr": 0.003, "eps": 0.5}})
    assert found == [
        ("actor.adam", "optimizer: {lr: 0.1, eps: 0.5}        (and remove adam)")
    ]


@pytest.mark.parametrize(
    "beside", [{}, {"optimizer": None}, {"optimizer": {"lr": 0.1}}], ids=str
)
def test_what_is_removed_is_the_key_that_is_written(beside: dict[str, Any]) -> None:
    found = problems_of({**beside, "optimizer_on_host": True})
    assert found == [("actor.optimizer_on_host", "remove actor.optimizer_on_host")]
