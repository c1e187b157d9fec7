"""Critic, reference and reward beside an actor, in this process: the update is that of a plain implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlplace.models.causal_lm import first_head
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample
from tests.lm_ranks import ADAM, everything, made_up_samples
from tests.reference_rlhf import (
    Models,
    Rules,
    adamw,
    assert_same,
    clipped_policy_loss,
    clipped_value_loss,
    estimates,
    responses_of,
    rlhf_step,
    state_values,
    step,
    targets,
    token_logprobs,
)
from tests.rlhf_stage import RlhfStage
from tests.tiny_lm import tiny_model, tiny_reward_model

ROLES = ("actor", "critic", "reference", "reward")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference that the actor does not begin as."""
    return tiny_model(tmp_path_factory.mktemp("models") / "other", seed=3)


@pytest.fixture(scope="module")
def scorer(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the critic's first values, and of the reward's scores."""
    return tiny_reward_model(tmp_path_factory.mktemp("models") / "scorer", like=qwen)


@pytest.fixture
def blocks(other: Path, scorer: Path) -> dict[str, dict[str, Any]]:
    own = {"model": {"path": str(scorer)}}
    return {
        "critic": {"compute": "fp32", "token_budget": 48, "optimizer": ADAM, **own},
        "reference": {"dtype": "fp32", "model": {"path": str(other)}},
        "reward": {"dtype": "fp32", "weight": 0.5, **own},
    }


def plain(actor: Path, critic: Path, reference: Path) -> Models:
    models = {
        "actor": AutoModelForCausalLM.from_pretrained(actor),
        "critic": AutoModelForSequenceClassification.from_pretrained(
            critic, num_labels=1
        ),
        "reference": AutoModelForCausalLM.from_pretrained(reference),
    }
    optimizers = {
        f"{name}_optimizer": adamw(list(models[name].parameters()), ADAM)
        for name in ("actor", "critic")
    }
    return Models(**models, **optimizers)


def rewards_of(samples: list[Sample], scorer: Path, weight: float) -> list[float]:
    """Rewards of the environment and, weighed, the reward model's score of each whole episode."""
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    with torch.no_grad():
        scores = [
            float(model(torch.tensor(s.tokens[None]).long()).logits[0, 0])
            for s in samples
        ]
    return [s.reward + weight * score for s, score in zip(samples, scores, strict=True)]


@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        Rules(kl_in="loss", kl_estimator="k2"),
        Rules(gamma=0.9, gae_lambda=0.8, kl_coef=0.0),
        Rules(reward_clip=1.0),
    ],
    ids=["kl in the reward", "kl in the loss", "discounted", "clipped"],
)
def test_the_update_of_actor_and_critic_is_that_of_plain_ppo(
    qwen: Path,
    other: Path,
    scorer: Path,
    blocks: dict[str, dict[str, Any]],
    rules: Rules,
) -> None:
    models = plain(qwen, scorer, other)
    names = ("kl_coef", "kl_in", "kl_estimator", "gamma", "gae_lambda", "reward_clip")
    with RlhfStage(
        qwen, ROLES, **blocks, algorithm={name: getattr(rules, name) for name in names}
    ) as stage:
        for iteration in range(2 if rules == Rules() else 1):
            samples = everything(iteration)
            expected = rlhf_step(
                models, samples, rewards_of(samples, scorer, 0.5), rules
            )
            numbers = stage.iterate(made_up_samples(iteration), iteration)
            for name, value in expected.items():
                assert numbers[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        assert_same(stage.weights("actor"), dict(models.actor.named_parameters()))
        assert_same(stage.weights("critic"), dict(models.critic.named_parameters()))


def test_a_value_head_on_the_trunk_learns_with_the_policy(
    qwen: Path, other: Path
) -> None:
    rules, coefficient, samples = Rules(), 0.3, everything()
    actor, reference = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (qwen, other)
    )
    head = torch.nn.Parameter(first_head(64, seed=7))
    optimizer = adamw([*actor.parameters(), head], ADAM)
    mask = responses_of(samples)
    with torch.no_grad():
        old, frozen = token_logprobs(actor, samples), token_logprobs(reference, samples)
        before = state_values(actor.model, head, samples)
    advantages, returns = estimates(
        mask, before, (old - frozen) * mask, [s.reward for s in samples], rules
    )
    values = state_values(actor.model, head, samples)
    value_loss = clipped_value_loss(values, before, returns, mask, rules)
    policy_loss = clipped_policy_loss(
        token_logprobs(actor, samples), old, advantages, mask, rules
    )
    step(optimizer, policy_loss + coefficient * value_loss, rules)

    blocks = {
        "reference": {"model": {"path": str(other)}, "dtype": "fp32"},
        "critic": {"on_actor": True},
    }
    asked = {"kl_coef": rules.kl_coef, "value_coef": coefficient}
    with RlhfStage(qwen, ("actor", "reference"), **blocks, algorithm=asked) as stage:
        numbers = stage.iterate(made_up_samples())
        assert numbers["actor/value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
        assert numbers["actor/loss"] == pytest.approx(
            (policy_loss + coefficient * value_loss).item(), rel=1e-4
        )
        assert "actor/explained_variance" in numbers
        assert_same(
            stage.weights("actor"), dict(actor.named_parameters())
        )  # which are without the head


def test_the_actor_without_its_factors_is_the_reference(qwen: Path) -> None:
    lora = {"lora_rank": 4, "optimizer": {**ADAM, "lr": 0.05}}
    asked = {"name": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward"}
    kept = AutoModelForCausalLM.from_pretrained(qwen)
    with RlhfStage(
        qwen, ("actor",), actor=lora, reference={"share_actor": True}, algorithm=asked
    ) as stage:
        assert stage.iterate(made_up_samples())["actor/kl_reference"] == pytest.approx(
            0.0, abs=1e-6
        )
        moved = AutoModelForCausalLM.from_pretrained(qwen)
        moved.load_state_dict(stage.weights("actor"))
        samples = everything(1)
        mask = responses_of(samples)
        with torch.no_grad():
            apart = (
                token_logprobs(moved, samples) - token_logprobs(kept, samples)
            ) * mask
        assert abs(float(apart.sum())) > 1.0
        numbers = stage.iterate(made_up_samples(1), 1)
        assert numbers["actor/kl_reference"] == pytest.approx(
            float(apart.sum()) / len(samples), rel=1e-3
        )


def test_a_reference_that_is_refreshed_becomes_the_actor(qwen: Path) -> None:
    """Seen by the engine's made-up log-probabilities, from which only those of the reference are taken."""
    model = AutoModelForCausalLM.from_pretrained(qwen)

    def kl(iteration: int) -> float:
        samples = everything(iteration)
        mask, engine, _ = targets(samples)
        return float(
            ((engine - token_logprobs(model, samples).detach()) * mask).sum()
        ) / len(samples)

    block = {"dtype": "fp32", "refresh_every": 2}
    with RlhfStage(
        qwen, ("actor", "reference"), reference=block, algorithm={"name": "grpo"}
    ) as stage:
        for iteration in range(3):
            for worker in stage.workers.values():
                worker.move(Residency.WEIGHTS)
            refreshed = [
                worker.refresh(iteration, iteration)
                for worker in stage.workers.values()
            ]
            assert all(refreshed) == (iteration == 2)
            if iteration == 2:
                model.load_state_dict(stage.weights("actor"))
            numbers = stage.iterate(made_up_samples(iteration), iteration)
            assert numbers["actor/kl_reference"] == pytest.approx(
                kl(iteration), rel=1e-5
            ), iteration


def test_the_critic_learns_before_the_actor_does(
    qwen: Path, blocks: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    with RlhfStage(
        qwen, ("actor", "critic"), critic={**blocks["critic"], "warmup_iterations": 1}
    ) as stage:
        before = stage.weights("actor"), stage.weights("critic")
        numbers = stage.iterate(made_up_samples())
        after = stage.weights("actor"), stage.weights("critic")
        assert numbers["actor/optimizer_steps"] == 0
        assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
        assert any(
            not torch.equal(before[1][name], after[1][name]) for name in before[1]
        )
        assert stage.iterate(made_up_samples(1), 1)["actor/optimizer_steps"] == 1


def test_the_average_is_saved_beside_the_policy(qwen: Path, tmp_path: Path) -> None:
    decay, path = 0.75, tmp_path / "policy"
    with RlhfStage(
        qwen, ("actor",), actor={"ema_decay": decay}, algorithm={"name": "grpo"}
    ) as stage:
        expected = stage.weights("actor")
        for iteration in range(2):
            stage.iterate(made_up_samples(iteration), iteration)
            for name, tensor in stage.weights("actor").items():
                expected[name] = decay * expected[name] + (1 - decay) * tensor
        last = stage.weights("actor")
        stage.workers["actor"].move(Residency.WEIGHTS)
        stage.workers["actor"].save_model(str(path))
        assert all(
            torch.equal(tensor, last[name])
            for name, tensor in stage.weights("actor").items()
        )
    for folder, weights in ((path, last), (tmp_path / "policy_ema", expected)):
        saved = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        for name, tensor in weights.items():
            torch.testing.assert_close(
                saved[name].detach(), tensor, atol=1e-7, rtol=1e-5
            )
