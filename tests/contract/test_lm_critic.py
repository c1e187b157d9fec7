"""One rank of a language model's critic in this process: what it says, learns, refuses, releases and leaves behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlplace.algo.packing import optimizer_steps
from rlplace.errors import AcceleratorOutOfMemory, ChannelMisuse, ConfigError, DivergedError, NotResident
from rlplace.models.value_lm import first_head
from rlplace.placement.schedule import Residency
from rlplace.tokens import Returns, Sample
from rlplace.workers.arguments import RETURNS
from rlplace.workers.launch.devices import CudaDevice, Device
from rlplace.workers.roles.critic import Critic, critic_problems
from tests.critic_ranks import (
    CriticScenario,
    give_returns,
    give_samples,
    iterate,
    make_critic,
    returns_of,
    scores,
    whole_weights,
)
from tests.lm_ranks import ADAM, made_up_samples
from tests.reference_critic import critic_step, value_model, values_of
from tests.worker_ranks import listen, rendezvous_at

MakeCritic = Callable[..., Critic]
SEED, HIDDEN = 7, 64  # of the scenario's run; of the tiny models


@pytest.fixture
def critic_of() -> Iterator[MakeCritic]:
    """Makes a critic of one rank; one at a time, since a process has one default process group."""
    made: list[Critic] = []

    def make(scenario: CriticScenario, device: Device | None = None) -> Critic:
        for critic in made:
            critic.close()
        made.append(make_critic(scenario, 0, rendezvous_at(listen()), device=device))
        return made[-1]

    yield make
    for critic in made:
        critic.close()


def everything(iteration: int = 0) -> list[Sample]:
    return [sample for group in made_up_samples(iteration) for sample in group]


def wanted(iteration: int = 0) -> list[Tensor]:
    return [torch.tensor(returns_of(sample, iteration)) for sample in everything(iteration)]


def reference(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = value_model(str(folder), first_head(HIDDEN, SEED))
    return model, torch.optim.AdamW(model.parameters(), lr=ADAM["lr"], eps=ADAM["eps"], weight_decay=0.0)


def plain_iteration(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    iteration: int = 0,
    *,
    clip: float | None = 0.2,
    steps: list[list[int]] | None = None,
) -> tuple[list[Tensor], list[float], list[float]]:
    """Values before, and by step the loss and the norm."""
    samples, returns = everything(iteration), wanted(iteration)
    old = [values_of(model, sample).detach() for sample in samples]
    losses, norms = [], []
    for picks in steps or [list(range(len(samples)))]:
        chosen = ([of[i] for i in picks] for of in (samples, old, returns))
        loss, norm = critic_step(model, optimizer, *chosen, clip=clip, max_grad_norm=ADAM["max_grad_norm"])
        losses.append(loss)
        norms.append(norm)
    return old, losses, norms


def assert_same_weights(critic: Critic, model: torch.nn.Module) -> None:
    found, expected = whole_weights(critic), dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor.detach(), atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


# ── values and the update ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("clip", [0.2, None, 0.01], ids=str)
@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_values_and_update_are_those_of_a_plain_critic(
    critic_of: MakeCritic, request: pytest.FixtureRequest, kind: str, clip: float | None
) -> None:
    folder: Path = request.getfixturevalue(kind)
    model, optimizer = reference(folder)
    critic = critic_of(CriticScenario(model=folder, algorithm={"value_clip": clip}))
    for iteration in range(2):
        old, (loss,), (norm,) = plain_iteration(model, optimizer, iteration, clip=clip)
        metrics = iterate(critic, iteration)
        said = scores(critic)
        assert [(s.group, s.sample) for s in said] == [(s.group, s.sample) for s in everything(iteration)]
        for one, values in zip(said, old, strict=True):
            torch.testing.assert_close(torch.tensor(one.values), values, atol=1e-4, rtol=1e-4)
        assert metrics["critic/value_loss"].value == pytest.approx(loss, rel=1e-3)
        assert metrics["critic/grad_norm"].value == pytest.approx(norm, rel=1e-3)
        assert norm > ADAM["max_grad_norm"], "clipping is part of the comparison"
    assert_same_weights(critic, model)


def test_its_steps_are_of_the_samples_of_the_actors(critic_of: MakeCritic, qwen: Path) -> None:
    steps = [picks for epoch in range(2) for picks in optimizer_steps(12, 5, f"{SEED} 0 {epoch}")]
    model, optimizer = reference(qwen)
    _, losses, _ = plain_iteration(model, optimizer, steps=steps, clip=0.001)
    rules = {"epochs": 2, "train_batch": 5, "value_clip": 0.001}
    critic = critic_of(CriticScenario(model=qwen, algorithm=rules))
    metrics = iterate(critic)
    assert metrics["critic/optimizer_steps"].value == len(steps) == 6
    assert metrics["critic/value_loss"].value == pytest.approx(np.mean(losses), rel=1e-3)
    assert metrics["critic/clip_share"].value > 0.1
    assert_same_weights(critic, model)


@pytest.mark.parametrize(
    "critic",
    [
        {"token_budget": 1},
        {"token_budget": 10_000},
        {"optimizer": ADAM | {"on_host": True}},
        {"optimizer": ADAM | {"kind": "adamw_master"}},
        {"zero_stage": 2},
        {"checkpointing": False},
    ],
    ids=str,
)
def test_how_it_is_computed_changes_nothing(critic_of: MakeCritic, qwen: Path, critic: dict[str, object]) -> None:
    model, optimizer = reference(qwen)
    plain_iteration(model, optimizer)
    worker = critic_of(CriticScenario(model=qwen, critic=critic))
    iterate(worker)
    assert_same_weights(worker, model)


def test_its_learning_rate_is_its_own(critic_of: MakeCritic, qwen: Path) -> None:
    adam = ADAM | {"lr": 4e-3, "schedule": "linear", "warmup_steps": 2}
    critic = critic_of(CriticScenario(model=qwen, critic={"optimizer": adam}))
    rates = [iterate(critic, iteration)["critic/lr"].value for iteration in range(3)]
    assert rates == pytest.approx([2e-3, 4e-3 * 3 / 4, 4e-3 * 2 / 4])


def test_it_comes_to_explain_what_it_sees(critic_of: MakeCritic, qwen: Path) -> None:
    adam = ADAM | {"lr": 3e-3, "max_grad_norm": 10.0}
    critic = critic_of(CriticScenario(model=qwen, algorithm={"value_clip": None}, critic={"optimizer": adam}))
    explained = []
    for iteration in range(12):
        give_samples(critic, made_up_samples())
        critic.move(Residency.FULL)
        critic.infer(iteration, iteration)
        give_returns(critic, made_up_samples())
        explained.append(critic.learn(iteration, iteration)["critic/explained_variance"].value)
    assert abs(explained[0]) < 0.2
    assert explained[-1] > 0.6


def test_factors_learn_and_are_saved_merged(critic_of: MakeCritic, qwen: Path, tmp_path: Path) -> None:
    critic = critic_of(CriticScenario(model=qwen, critic={"lora_rank": 4, "optimizer": ADAM | {"lr": 1e-2}}))
    for iteration in range(2):
        iterate(critic, iteration)
    before, after = load_file(qwen / "model.safetensors"), whole_weights(critic)
    changed = {name for name, tensor in after.items() if name not in before or not torch.equal(before[name], tensor)}
    assert {name for name in changed if not name.endswith("_proj.weight")} == {"score.weight"}
    assert len(changed) == 1 + 2 * 7
    scores(critic)
    give_samples(critic, made_up_samples())
    critic.infer(2, 2)
    expected = scores(critic)
    critic.save_policy(str(tmp_path / "critic"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    for one, sample in zip(expected, everything(), strict=True):
        torch.testing.assert_close(torch.tensor(one.values), values_of(model, sample).detach(), atol=1e-4, rtol=1e-4)


# ── what it is told ──────────────────────────────────────────────────────────────────────────────────────────────────


def without_learned(groups: list[tuple[Sample, ...]]) -> list[tuple[Sample, ...]]:
    """The first sample has nothing to learn."""
    first = dataclasses.replace(groups[0][0], mask=np.zeros_like(groups[0][0].mask))
    return [(first, *groups[0][1:]), *groups[1:]]


def test_a_sample_without_learned_tokens_is_scored_by_nothing(critic_of: MakeCritic, qwen: Path) -> None:
    critic = critic_of(CriticScenario(model=qwen))
    iterate(critic, groups=without_learned(made_up_samples()))
    assert [len(s.values) for s in scores(critic)[:2]] == [0, made_up_samples()[0][1].response_tokens]


def test_nothing_to_learn_is_no_step(critic_of: MakeCritic, qwen: Path) -> None:
    critic = critic_of(CriticScenario(model=qwen))
    critic.move(Residency.WEIGHTS)
    before = critic.digest()
    nothing = [tuple(dataclasses.replace(s, mask=np.zeros_like(s.mask)) for s in group) for group in made_up_samples()]
    metrics = iterate(critic, groups=nothing)
    assert metrics["critic/optimizer_steps"].value == 0
    assert "critic/value_loss" not in metrics
    assert critic.digest() == before


def test_metrics_say_how_it_went(critic_of: MakeCritic, qwen: Path) -> None:
    critic = critic_of(CriticScenario(model=qwen))
    metrics = iterate(critic)
    returns = torch.cat(wanted())
    values = torch.cat([torch.tensor(s.values) for s in scores(critic)])
    assert metrics["critic/return"].value == pytest.approx(float(returns.mean()), rel=1e-5)
    assert metrics["critic/value"].value == pytest.approx(float(values.mean()), rel=1e-5)
    explained = 1 - float((returns - values).var(correction=0) / returns.var(correction=0))
    assert metrics["critic/explained_variance"].value == pytest.approx(explained, abs=1e-5)
    assert metrics["critic/tokens_per_s"].value > 0.0
    assert metrics["critic/infer_s"].value > 0.0
    assert metrics["critic/learn_s"].value > 0.0


@pytest.mark.parametrize("iteration", [0, 3])
def test_learning_needs_the_values_of_its_iteration(critic_of: MakeCritic, qwen: Path, iteration: int) -> None:
    critic = critic_of(CriticScenario(model=qwen))
    critic.move(Residency.FULL)
    if iteration:
        give_samples(critic, made_up_samples())
        critic.infer(2, 2)
    with pytest.raises(ChannelMisuse, match="has no values to start from") as caught:
        critic.learn(iteration, iteration)
    assert caught.value.code == "out-of-step"


@pytest.mark.parametrize("wrong", ["another sample", "another length", "twice"])
def test_returns_of_other_samples_are_refused(critic_of: MakeCritic, qwen: Path, wrong: str) -> None:
    critic = critic_of(CriticScenario(model=qwen))
    critic.move(Residency.FULL)
    give_samples(critic, made_up_samples())
    critic.infer(0, 0)
    for group in made_up_samples():
        told = [Returns(group=s.group, sample=s.sample, returns=returns_of(s)) for s in group]
        if group[0].group == 0:
            one = told[0]
            told[0] = {
                "another sample": dataclasses.replace(one, sample=99),
                "another length": dataclasses.replace(one, returns=one.returns[:-1]),
                "twice": told[1],
            }[wrong]
        critic.context.channels[RETURNS].put(tuple(told))
    with pytest.raises(ChannelMisuse, match="returns are of other samples than the values") as caught:
        critic.learn(0, 0)
    assert caught.value.code == "out-of-step"


def test_missing_returns_are_named(critic_of: MakeCritic, qwen: Path) -> None:
    critic = critic_of(CriticScenario(model=qwen))
    critic.move(Residency.FULL)
    give_samples(critic, made_up_samples())
    critic.infer(0, 0)
    give_returns(critic, [group[:-1] if group[0].group == 1 else group for group in made_up_samples()])
    with pytest.raises(ChannelMisuse, match="none of samples 1/3"):
        critic.learn(0, 0)


def test_numbers_that_are_none_are_an_error(critic_of: MakeCritic, qwen: Path) -> None:
    critic = critic_of(CriticScenario(model=qwen))
    critic.move(Residency.FULL)
    before = critic.digest()
    give_samples(critic, made_up_samples())
    critic.infer(0, 0)
    for group in made_up_samples():
        told = [Returns(group=s.group, sample=s.sample, returns=returns_of(s) * np.nan) for s in group]
        critic.context.channels[RETURNS].put(tuple(told))
    with pytest.raises(DivergedError, match="iteration 0 is not a finite number") as caught:
        critic.learn(0, 0)
    assert caught.value.code == "diverged"
    assert "critic.optimizer.lr" in str(caught.value)
    assert critic.digest() == before


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_is_born_off_and_refuses_to_compute(critic_of: MakeCritic, qwen: Path, tmp_path: Path) -> None:
    critic = critic_of(CriticScenario(model=qwen))
    refused = {
        "infer": lambda: critic.infer(0, 0),
        "save_policy": lambda: critic.save_policy(str(tmp_path / "critic")),
        "digest": critic.digest,
    }
    for method, call in refused.items():
        with pytest.raises(NotResident, match=f"critic rank 0: {method} was called while the worker is off"):
            call()
    critic.move(Residency.WEIGHTS)
    give_samples(critic, made_up_samples())
    critic.infer(0, 0)
    with pytest.raises(NotResident, match="learn needs residency full"):
        critic.learn(0, 0)


@pytest.mark.parametrize("on_host", [False, True])
def test_moves_release_what_they_say_and_bring_it_back_to_the_bit(
    critic_of: MakeCritic, qwen: Path, on_host: bool
) -> None:
    critic = critic_of(CriticScenario(model=qwen, critic={"optimizer": ADAM | {"on_host": on_host}}))
    iterate(critic)
    full = critic.move(Residency.FULL)
    assert critic.context.device.held_bytes() == full.accelerator_bytes
    digest = critic.digest()
    state = [{key: t.clone() for key, t in of.items()} for of in critic._optimizer.state()]
    off = critic.move(Residency.OFF)
    assert off.accelerator_bytes == critic.context.device.held_bytes() == 0
    assert off.host_bytes == full.accelerator_bytes + full.host_bytes
    parameters = sum(t.numel() for n, t in load_file(qwen / "model.safetensors").items() if n != "lm_head.weight")
    assert off.host_bytes > (3 + on_host) * 4 * (parameters + HIDDEN)
    again = critic.move(Residency.FULL)
    assert (again.accelerator_bytes, again.host_bytes) == (full.accelerator_bytes, full.host_bytes)
    assert critic.digest() == digest
    for before, after in zip(state, critic._optimizer.state(), strict=True):
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


def test_computing_leaves_nothing_gathered(critic_of: MakeCritic, qwen: Path) -> None:
    critic = critic_of(CriticScenario(model=qwen))
    full = critic.move(Residency.FULL).accelerator_bytes
    iterate(critic)
    assert critic.context.device.held_bytes() == full
    assert critic.move(Residency.FULL).accelerator_bytes == full


def test_out_of_memory_names_what_did_not_fit(critic_of: MakeCritic, qwen: Path) -> None:
    critic = critic_of(CriticScenario(model=qwen))
    weights = critic.move(Residency.WEIGHTS).accelerator_bytes
    critic.context.device.acquire((1 << 30) - weights - 8, "somebody else")
    with pytest.raises(AcceleratorOutOfMemory, match="optimizer state"):
        critic.move(Residency.FULL)
    critic.context.device.release("somebody else")
    critic.move(Residency.FULL)


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_a_saved_critic_loads_in_transformers_and_can_be_trained_on(
    critic_of: MakeCritic, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    folder: Path = request.getfixturevalue(kind)
    critic = critic_of(CriticScenario(model=folder))
    iterate(critic)
    critic.save_policy(str(tmp_path / "critic"))
    digest, found = critic.digest(), whole_weights(critic)
    model, how = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert (model.config.num_labels, how["missing_keys"], how["unexpected_keys"]) == (1, set(), set())
    assert all(torch.equal(found[name], tensor) for name, tensor in model.named_parameters())
    own = {"model": {"path": str(tmp_path / "critic")}}
    again = critic_of(CriticScenario(model=folder, critic=own))
    again.move(Residency.WEIGHTS)
    assert again.digest() == digest


def test_a_folder_that_is_no_value_model_is_refused(critic_of: MakeCritic, qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((qwen / "config.json").read_bytes())
    weights = load_file(qwen / "model.safetensors")
    scenario = CriticScenario(model=qwen, critic={"model": {"path": str(tmp_path)}, "optimizer": {"kind": "sgd"}})
    save_file(weights | {"score.weight": torch.zeros(3, HIDDEN)}, tmp_path / "model.safetensors")
    plan_only, head = critic_problems(scenario.job.config)
    assert (plan_only.code, plan_only.key) == ("plan-only", "critic.optimizer.kind")
    assert (head.code, head.key) == ("value-head", "critic.model.path")
    with pytest.raises(ConfigError) as caught:
        critic_of(scenario)
    assert caught.value.codes == ("value-head",)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        critic_of(scenario)
    assert [(p.code, p.key) for p in caught.value.problems] == [("model-weights", "critic.model.path")]


@pytest.mark.parametrize(("tokens", "codes"), [(319, ["critic-vocabulary"]), (320, []), (512, [])])
def test_a_critic_of_fewer_tokens_than_the_actor_is_refused(qwen: Path, tokens: int, codes: list[str]) -> None:
    config = CriticScenario(model=qwen, critic={"model": {"vocab_size": tokens}}).job.config
    actor = dataclasses.replace(config.actor, model={"path": str(qwen), "vocab_size": 320})
    config = dataclasses.replace(config, actor=actor)
    assert [problem.code for problem in critic_problems(config)] == codes


def test_what_runs_is_not_refused(qwen: Path) -> None:
    assert critic_problems(CriticScenario(model=qwen).job.config) == []


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
def test_a_gpu_learns_the_same_and_lets_go_of_its_memory(critic_of: MakeCritic, qwen: Path) -> None:
    model, optimizer = reference(qwen)
    plain_iteration(model, optimizer)
    critic = critic_of(CriticScenario(model=qwen), device=CudaDevice())
    iterate(critic)
    for name, expected in model.named_parameters():
        torch.testing.assert_close(whole_weights(critic)[name], expected.detach(), atol=5e-5, rtol=1e-3)
    held, resident = torch.cuda.memory_allocated(), critic.move(Residency.FULL).accelerator_bytes
    critic.move(Residency.OFF)
    assert held - torch.cuda.memory_allocated() >= resident > 0
