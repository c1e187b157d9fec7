"""What runs say and save of settings that count for something else than they seem to, seen in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.nn import functional

from rlplace.envs.contract import DiscreteActions, Spaces
from tests.e2e.language import INLINE as INLINE_TEXT
from tests.e2e.language import tiny
from tests.e2e.training import INLINE, placed, train
from tests.gyms import Script

ONE_EACH = (*INLINE, *placed("0", "0", "1"), "runner.total_iterations=1")


class Idle:
    """A callback that gets an address with a password."""

    def __init__(self, folder: Path, config: dict[str, Any], *, to: str) -> None:
        self.to = to

    def on_end(self, state: str) -> None:
        """Do nothing."""


def test_a_password_is_saved_nowhere_and_not_compared(tmp_path: Path) -> None:
    def callbacks(password: str) -> str:
        address = f"postgres://me:{password}@there/db"
        return f"runner.callbacks=[{{name: '{__name__}:Idle', kwargs: {{to: '{address}'}}}}]"

    run = train("hybrid_ppo", tmp_path, *ONE_EACH, callbacks("s3cr3t"))
    assert run.code == 0, run.err
    assert run.folder is not None
    config = yaml.safe_load((run.folder / "config.yaml").read_text(encoding="utf-8"))
    assert config["runner"]["callbacks"][0]["kwargs"]["to"] == "postgres://***@there/db"
    texts = (*run.folder.rglob("*.yaml"), *run.folder.rglob("*.json"))
    assert not [file for file in texts if "s3cr3t" in file.read_text(encoding="utf-8")]
    # Another password is no other experiment
    again = train(
        "hybrid_ppo",
        tmp_path,
        *ONE_EACH,
        callbacks("n3w"),
        "runner.total_iterations=2",
        f"resume={run.folder}",
    )
    assert again.code == 0, again.err
    assert again.summary()["iterations"] == 2


def test_bounds_of_actions_that_do_not_suit_are_said_by_the_run(tmp_path: Path) -> None:
    run = train(
        "hybrid_ppo",
        tmp_path,
        *ONE_EACH,
        "env.id=tests.unit.envs.test_action_bounds:Far",
        "runner.stop_at_return=null",
    )
    assert run.code == 0, run.err
    assert run.out.count("gymnasium.wrappers:RescaleAction") == 1


class Camera(Script):
    """Shows images that were converted to float32 and not divided. Its wrapper discounts rewards by 0.9."""

    def __init__(self) -> None:
        super().__init__(terminate_at=4)
        self.observation_space = Box(0.0, 255.0, (9, 9, 1), np.float32)  # type: ignore[assignment]

    def _show(self, action: float) -> Any:
        return np.full((9, 9, 1), 200, np.float32)


DISCOUNTED = (
    "env.wrappers=[{name: 'gymnasium.wrappers:NormalizeReward', kwargs: {gamma: 0.9}}]"
)


@pytest.mark.slow
def test_float_images_and_another_discount_of_rewards_are_said_by_the_run(
    tmp_path: Path,
) -> None:
    camera = (
        *ONE_EACH,
        f"env.id={__name__}:Camera",
        "actor.model={kind: cnn, network: impala, hidden: [8], channels: [2, 2, 2]}",
        "runner.stop_at_return=null",
    )
    run = train(
        "hybrid_ppo",
        tmp_path,
        *camera,
        DISCOUNTED,
        "algorithm.normalize_observations=false",
    )
    assert run.code == 0, run.err
    assert run.out.count("are float32 numbers up to 200") == 1
    assert run.out.count("has gamma=0.9, and algorithm.gamma is 0.99") == 1
    # The fixes
    other = train(
        "hybrid_ppo",
        tmp_path,
        *camera,
        DISCOUNTED,
        "algorithm.normalize_observations=true",
        "algorithm.gamma=0.9",
    )
    assert other.code == 0, other.err
    assert "float32" not in other.out
    assert "gamma" not in other.out


class Outside(Script):
    """Returns numbers outside of its Box."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Box(-1.0, 1.0, (1,), np.float64)

    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        return np.array([7.0]), {}

    def step(self, action: Any) -> Any:
        return (np.array([7.0]), *super().step(action)[1:])


class OldStep(Outside):
    """Its step returns four values."""

    def step(self, action: Any) -> Any:
        shown, reward, terminated, truncated, info = super().step(action)
        return shown, reward, terminated or truncated, info


class Shaped(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper with a step of its own."""

    def step(self, action: Any) -> Any:
        shown, reward, *rest = self.env.step(action)
        return shown, float(reward) + 1.0, *rest


def shaped() -> Shaped:
    return Shaped(Outside())


def said_by_a_run(folder: Path, environment: str) -> str:
    run = train(
        "hybrid_ppo",
        folder,
        *ONE_EACH,
        f"env.id={__name__}:{environment}",
        "runner.stop_at_return=null",
        "runner.total_iterations=2",
    )
    assert run.code == 0, run.err
    return run.out


def test_numbers_outside_of_their_box_are_said_once_by_the_run(tmp_path: Path) -> None:
    said = said_by_a_run(tmp_path, "Outside")
    assert said.count("shows numbers outside of its observation_space") == 1


def test_the_old_interface_is_said_once_by_the_run(tmp_path: Path) -> None:
    said = said_by_a_run(tmp_path, "OldStep")
    assert said.count("returns the four values of the old interface") == 1


def test_changed_rewards_are_said_once_by_the_run(tmp_path: Path) -> None:
    said = said_by_a_run(tmp_path, "shaped")
    assert said.count("with a step() of its own") == 1


class Sure(nn.Module):
    """A network whose output follows from its weights and one observation."""

    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        (numbers,) = spaces.observation_shape
        assert isinstance(spaces.actions, DiscreteActions)
        self.layer = nn.Linear(numbers, 16)
        self.head = nn.Linear(16, spaces.actions.n + 1)

    def features(self, observations: Tensor) -> Tensor:
        return torch.tanh(self.layer(observations))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        found = self.head(self.features(observations))
        return found[:, 1:], found[:, 0]


class Dropped(Sure):
    """A network with dropout that eval mode does not end."""

    def features(self, observations: Tensor) -> Tensor:
        return functional.dropout(super().features(observations), 0.5, training=True)


class OfBatch(Sure):
    """A network that normalises by the batch: a batch of the rollout has other statistics than a minibatch."""

    def features(self, observations: Tensor) -> Tensor:
        centred = observations - observations.mean(dim=0)
        return super().features(centred / (observations.std(0, correction=0) + 0.01))


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ("Sure", 0),
        pytest.param("Dropped", 1, marks=pytest.mark.slow),
        pytest.param("OfBatch", 1, marks=pytest.mark.slow),
    ],
)
def test_a_network_with_other_probabilities_in_rollout_and_actor_is_said(
    network: str, said: int, tmp_path: Path
) -> None:
    run = train(
        "hybrid_ppo_cartpole",
        tmp_path,
        *ONE_EACH,
        f"actor.model={{kind: module, name: '{__name__}:{network}'}}",
        "runner.stop_at_return=null",
        "runner.total_iterations=2",
    )
    assert run.code == 0, run.err
    assert run.out.count("between rollout and actor") == said
    apart = [line["actor/mismatch"] for line in run.metrics()]
    assert all((each > 0.01) == bool(said) for each in apart), apart


def test_both_learning_rates_are_said_by_a_resume(tmp_path: Path) -> None:
    scheduled = ("actor.optimizer.schedule=linear", "actor.optimizer.lr=0.001")
    first = train(
        "hybrid_ppo", tmp_path, *ONE_EACH, *scheduled, "runner.total_iterations=2"
    )
    assert first.code == 0, first.err
    longer = (
        "runner.total_iterations=4",
        f"resume={first.folder}",
        "resume_allow=[runner.total_iterations]",
    )
    run = train("hybrid_ppo", tmp_path, *ONE_EACH, *scheduled, *longer)
    assert run.code == 0, run.err
    assert "actor: learning rate 0 -> 0.0005, since it falls over 4" in run.out


def test_dropped_prompts_of_an_evaluation_are_said(model: Path, tmp_path: Path) -> None:
    texts = [f"say {number}" for number in range(8)] + ["long " * 60] * 3
    for name in ("train", "test"):
        lines = [
            json.dumps({"prompt": f"{name} {text}", "answer": "a"}) for text in texts
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    run = train(
        "hybrid_grpo_llm",
        tmp_path / "runs",
        *INLINE_TEXT,
        *tiny(model),
        "env.task=prompts",
        f"+env.kwargs={{path: {tmp_path / 'train.jsonl'}}}",
        f"env.eval_kwargs={{path: {tmp_path / 'test.jsonl'}}}",
        "env.rewards=[{name: tests.e2e.text_tasks:share_of_small_letters}]",
        "env.chat=false",
        "env.long_prompts=drop",
        "runner.total_iterations=1",
        "runner.eval_every=1",
    )
    assert run.code == 0, run.err
    (last,) = [line for line in run.metrics() if line["iteration"] == 1]
    assert (last["eval/prompts_dropped"], last["env/prompts_dropped"]) == (3, 3)
    assert "left out 3 held-out prompts of more than" in run.out
    assert "left out 3 train prompts of more than" in run.out


def test_answers_to_which_no_reward_applies_are_said(
    model: Path, tmp_path: Path
) -> None:
    """A function of TRL's form returns None for some answers: they are no part of its mean."""
    run = train(
        "hybrid_grpo_llm",
        tmp_path,
        *INLINE_TEXT,
        *tiny(model),
        "env.rewards=[{name: tests.foreign_rewards:trl_even}]",
        "env.chat=false",
        "runner.total_iterations=2",
        "runner.eval_every=2",
        "runner.eval_prompts=16",
    )
    assert run.code == 0, run.err
    lines = [line for line in run.metrics() if line["iteration"]]
    for line in lines:
        share = line["env/reward"]
        assert 0 < share < 1
        assert line["env/reward/trl_even"] == line["actor/reward/trl_even"] == 1.0
        assert line["actor/reward"] == pytest.approx(share)
        assert line["actor/unrewarded"] == round((1 - share) * line["actor/samples"])
    assert lines[-1]["eval/reward/trl_even"] == 1.0
    assert run.out.count("actor/unrewarded: no reward function applies") == 1


def test_answers_that_are_in_no_mean_are_said(model: Path, tmp_path: Path) -> None:
    """The mean of an evaluation is of the answers that were graded."""
    run = train(
        "hybrid_grpo_llm",
        tmp_path,
        *INLINE_TEXT,
        *tiny(model),
        "env.rewards=[{name: tests.odd_rewards:not_a_number_for_a_third}]",
        "faults.on_poison=skip",
        "runner.total_iterations=1",
        "runner.eval_every=1",
        "runner.eval_prompts=16",
        "runner.eval_samples=4",
    )
    assert run.code == 0, run.err
    for line in run.metrics():
        assert line["eval/left_out"] > 0
        assert line["eval/left_out"] + line["eval/episodes"] == 64
    assert run.out.count("answers are in no mean") == 2, "of env and of the evaluation"
