"""One rank of a language model's critic in this process: its values and update, what it refuses and saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlplace.algo.packing import SampleSizes, optimizer_steps
from rlplace.config.blocks.engine import FaultsConfig
from rlplace.errors import ChannelMisuse, ConfigError
from rlplace.jobs.language_model.rules.trained import critic_problems
from rlplace.models.causal_lm import first_head
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample, Scores
from rlplace.workers.arguments import RETURNS
from rlplace.workers.roles.actor import Critic
from tests.lm_ranks import (
    ADAM,
    LmScenario,
    everything,
    give,
    iterate,
    made_up_samples,
    returns_of,
    scores,
    whole_weights,
)
from tests.reference_rlhf import (
    Rules,
    adamw,
    assert_same,
    clipped_value_loss,
    critic_values,
    responses_of,
    step,
)

MakeCritic = Callable[..., Critic]
SEED, HIDDEN = 7, 64  # of the scenario's run; of the tiny models


def scenario(model: Path, **others: Any) -> LmScenario:
    return LmScenario(model=model, component="critic", **others)


def reference(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    with torch.no_grad():
        model.score.weight.copy_(first_head(HIDDEN, SEED))
    return model, adamw(list(model.parameters()), ADAM)


def plain_iteration(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    iteration: int = 0,
    *,
    rules: Rules | None = None,
    steps: list[list[int]] | None = None,
) -> tuple[Tensor, list[float], list[float]]:
    """Values before [M], and by step the loss and the norm."""
    samples, rules = everything(iteration), rules or Rules()
    mask = responses_of(samples)
    returns = torch.zeros_like(mask)
    returns[mask.bool()] = torch.tensor(
        np.concatenate([returns_of(s, iteration) for s in samples])
    )
    old = critic_values(model, samples).detach()
    losses, norms = [], []
    for picks in steps or [list(range(len(samples)))]:
        values = critic_values(model, samples)[picks]
        loss = clipped_value_loss(
            values, old[picks], returns[picks], mask[picks], rules
        )
        norms.append(step(optimizer, loss, rules))
        losses.append(loss.item())
    return old[mask.bool()], losses, norms


# ── values and the update ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("clip", [0.2, None, 0.01], ids=str)
@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_values_and_update_are_those_of_a_plain_critic(
    critic_of: MakeCritic, request: pytest.FixtureRequest, kind: str, clip: float | None
) -> None:
    folder: Path = request.getfixturevalue(kind)
    model, optimizer = reference(folder)
    critic = critic_of(folder, algorithm={"value_clip": clip})
    for iteration in range(2):
        old, (loss,), (norm,) = plain_iteration(
            model, optimizer, iteration, rules=Rules(value_clip=clip)
        )
        metrics = iterate(critic, iteration)
        found = scores(critic)
        assert [(s.group, s.sample) for s in found] == [
            (s.group, s.sample) for s in everything(iteration)
        ]
        torch.testing.assert_close(
            torch.tensor(np.concatenate([s.values for s in found])),
            old,
            atol=1e-4,
            rtol=1e-4,
        )
        assert metrics["critic/value_loss"].value == pytest.approx(loss, rel=1e-3)
        assert metrics["critic/grad_norm"].value == pytest.approx(norm, rel=1e-3)
        assert norm > ADAM["max_grad_norm"], "clipping is part of the comparison"
    assert_same(whole_weights(critic), dict(model.named_parameters()))


def test_its_steps_are_of_the_samples_of_the_actors(
    critic_of: MakeCritic, qwen: Path
) -> None:
    sizes = SampleSizes((1,) * 12, groups=(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2))
    steps = [
        picks
        for epoch in range(2)
        for picks in optimizer_steps(sizes, 5, f"{SEED} 0 {epoch}")
    ]
    model, optimizer = reference(qwen)
    _, losses, _ = plain_iteration(
        model, optimizer, steps=steps, rules=Rules(value_clip=0.001)
    )
    critic = critic_of(
        qwen, algorithm={"epochs": 2, "train_batch": 5, "value_clip": 0.001}
    )
    metrics = iterate(critic)
    assert metrics["critic/optimizer_steps"].value == len(steps) == 6
    assert metrics["critic/value_loss"].value == pytest.approx(
        np.mean(losses), rel=1e-3
    )
    assert metrics["critic/clip_share"].value > 0.1
    assert_same(whole_weights(critic), dict(model.named_parameters()))


def test_means_are_over_what_is_not_poisoned(critic_of: MakeCritic, qwen: Path) -> None:
    """The loss, and the update, are those of a critic that has never seen the poisoned samples."""
    model, optimizer = reference(qwen)
    poisoned, samples = (1, 4), everything()
    others = [number for number in range(len(samples)) if number not in poisoned]
    _, (loss,), (norm,) = plain_iteration(model, optimizer, steps=[others])
    critic = inferring(critic_of(qwen))
    for number, sample in enumerate(samples):
        values = (
            np.full(sample.response_tokens, np.nan, np.float32)
            if number in poisoned
            else returns_of(sample)
        )
        critic.context.channels[RETURNS].put(
            (Scores(group=sample.group, sample=sample.sample, values=values),)
        )
    critic.config = dataclasses.replace(
        critic.config,
        config=dataclasses.replace(
            critic.config.config, faults=FaultsConfig(on_poison="skip")
        ),
    )
    metrics = critic.learn(0, 0)
    assert metrics["critic/value_loss"].value == pytest.approx(loss, rel=1e-3)
    assert metrics["critic/grad_norm"].value == pytest.approx(norm, rel=1e-3)
    assert_same(whole_weights(critic), dict(model.named_parameters()))


def test_its_learning_rate_is_its_own(critic_of: MakeCritic, qwen: Path) -> None:
    critic = critic_of(
        qwen,
        trained={
            "optimizer": ADAM | {"lr": 4e-3, "schedule": "linear", "warmup_steps": 2}
        },
    )
    rates = [iterate(critic, iteration)["critic/lr"].value for iteration in range(3)]
    assert rates == pytest.approx([2e-3, 4e-3 * 3 / 4, 4e-3 * 2 / 4])


def test_metrics_describe_values_and_returns(critic_of: MakeCritic, qwen: Path) -> None:
    critic = critic_of(qwen)
    metrics = iterate(critic)
    returns = torch.tensor(
        np.concatenate([returns_of(sample) for sample in everything()])
    )
    values = torch.tensor(np.concatenate([s.values for s in scores(critic)]))
    assert metrics["critic/return"].value == pytest.approx(
        float(returns.mean()), rel=1e-5
    )
    assert metrics["critic/value"].value == pytest.approx(
        float(values.mean()), rel=1e-5
    )
    explained = 1 - float(
        (returns - values).var(correction=0) / returns.var(correction=0)
    )
    assert metrics["critic/explained_variance"].value == pytest.approx(
        explained, abs=1e-5
    )
    assert all(
        metrics[f"critic/{name}"].value > 0.0
        for name in ("tokens_per_s", "infer_s", "learn_s")
    )


# ── samples and returns ──────────────────────────────────────────────────────────────────────────────────────────────


def without_response(sample: Sample) -> Sample:
    return dataclasses.replace(sample, mask=np.zeros_like(sample.mask))


def test_samples_without_response_tokens_have_no_values(
    critic_of: MakeCritic, qwen: Path
) -> None:
    critic, groups = critic_of(qwen), made_up_samples()
    iterate(
        critic, groups=[(without_response(groups[0][0]), *groups[0][1:]), *groups[1:]]
    )
    assert [len(s.values) for s in scores(critic)[:2]] == [
        0,
        groups[0][1].response_tokens,
    ]
    critic.move(Residency.WEIGHTS)
    before = critic.digest()
    metrics = iterate(
        critic, groups=[tuple(map(without_response, group)) for group in groups]
    )
    assert metrics["critic/optimizer_steps"].value == 0
    assert "critic/value_loss" not in metrics
    assert critic.digest() == before


def inferring(critic: Critic, iteration: int = 0) -> Critic:
    critic.move(Residency.FULL)
    give(critic, made_up_samples())
    critic.infer(iteration, iteration)
    return critic


@pytest.mark.parametrize("iteration", [0, 3])
def test_learning_needs_the_values_of_its_iteration(
    critic_of: MakeCritic, qwen: Path, iteration: int
) -> None:
    critic = critic_of(qwen)
    if iteration:
        inferring(critic, 2)
    with pytest.raises(ChannelMisuse, match="has no values to start from") as caught:
        critic.learn(iteration, iteration)
    assert caught.value.code == "out-of-step"


def test_returns_of_other_samples_are_refused(
    critic_of: MakeCritic, qwen: Path
) -> None:
    critic, (first, *_) = inferring(critic_of(qwen)), made_up_samples()
    returns = Scores(group=first[0].group, sample=99, values=returns_of(first[0]))
    critic.context.channels[RETURNS].put((returns,))
    with pytest.raises(ChannelMisuse) as caught:
        critic.learn(0, 0)
    assert caught.value.code == "out-of-step"


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "trained",
    [{}, {"lora_rank": 4, "optimizer": ADAM | {"lr": 1e-2}}],
    ids=["all", "factors"],
)
@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_a_saved_critic_loads_in_transformers_and_can_be_trained_on(
    critic_of: MakeCritic,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kind: str,
    trained: dict[str, object],
) -> None:
    folder: Path = request.getfixturevalue(kind)
    critic = critic_of(folder, trained=trained)
    for iteration in range(2):
        iterate(critic, iteration)
    scores(critic)
    expected = np.concatenate([s.values for s in scores(inferring(critic))])
    critic.save_model(str(tmp_path / "critic"))
    digest, found, before = (
        critic.digest(),
        whole_weights(critic),
        load_file(folder / "model.safetensors"),
    )
    changed = {
        name
        for name, tensor in found.items()
        if name not in before or not torch.equal(before[name], tensor)
    }
    assert all(
        name.endswith("_proj.weight") or name == "score.weight" for name in changed
    ) == bool(trained)
    model, how = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "critic", output_loading_info=True
    )
    assert (model.config.num_labels, how["missing_keys"], how["unexpected_keys"]) == (
        1,
        set(),
        set(),
    )
    assert all(
        torch.equal(found[name], tensor) for name, tensor in model.named_parameters()
    )
    values = critic_values(model, everything()).detach()[
        responses_of(everything()).bool()
    ]
    torch.testing.assert_close(torch.tensor(expected), values, atol=1e-4, rtol=1e-4)
    again = critic_of(folder, trained={"model": {"path": str(tmp_path / "critic")}})
    again.move(Residency.WEIGHTS)
    assert again.digest() == digest


def test_a_folder_that_is_no_value_model_is_refused(
    critic_of: MakeCritic, qwen: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((qwen / "config.json").read_bytes())
    weights = load_file(qwen / "model.safetensors")
    trained = {"model": {"path": str(tmp_path)}, "zero_stage": 1}
    save_file(
        weights | {"score.weight": torch.zeros(3, HIDDEN)},
        tmp_path / "model.safetensors",
    )
    plan_only, head = critic_problems(scenario(qwen, trained=trained).job.config)
    assert (plan_only.code, plan_only.key) == ("plan-only", "critic.zero_stage")
    assert (head.code, head.key) == ("value-head", "critic.model.path")
    with pytest.raises(ConfigError) as caught:
        critic_of(qwen, trained=trained)
    assert caught.value.codes == ("value-head",)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        critic_of(qwen, trained=trained)
    assert [(p.code, p.key) for p in caught.value.problems] == [
        ("model-weights", "critic.model.path")
    ]


@pytest.mark.parametrize(
    ("tokens", "codes"), [(319, ["critic-vocabulary"]), (320, []), (None, [])]
)
def test_a_critic_of_fewer_tokens_than_the_actor_is_refused(
    qwen: Path, tokens: int | None, codes: list[str]
) -> None:
    model = {} if tokens is None else {"model": {"vocab_size": tokens}}
    config = scenario(qwen, trained=model).job.config
    actor = dataclasses.replace(
        config.actor, model={"path": str(qwen), "vocab_size": 320}
    )
    assert [
        problem.code
        for problem in critic_problems(dataclasses.replace(config, actor=actor))
    ] == codes
