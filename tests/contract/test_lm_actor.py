"""One rank of a language model's actor in this process: what it learns, refuses, releases, pushes and leaves behind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlplace.algo.packing import optimizer_steps
from rlplace.comm.weights.receiver import CopyReceiver
from rlplace.errors import AcceleratorOutOfMemory, DivergedError, NotResident
from rlplace.metrics import Metric
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample
from rlplace.workers.arguments import WEIGHTS
from rlplace.workers.launch.devices import CudaDevice, Device
from rlplace.workers.roles.actor import LmActor
from rlplace.workers.training.worker import not_run
from tests.lm_ranks import ADAM, LmScenario, give, made_up_samples, make_lm_actor
from tests.reference_grpo import grpo_step, targets, token_logprobs
from tests.worker_ranks import listen, rendezvous_at

MakeActor = Callable[..., LmActor]
LEARNING_RATE, LARGEST_NORM = ADAM["lr"], ADAM["max_grad_norm"]


@pytest.fixture
def actor_of() -> Iterator[MakeActor]:
    """Makes an actor of one rank; one at a time, since a process has one default process group."""
    made: list[LmActor] = []

    def make(scenario: LmScenario, device: Device | None = None) -> LmActor:
        for actor in made:
            actor.close()
        made.append(make_lm_actor(scenario, 0, rendezvous_at(listen()), device=device))
        return made[-1]

    yield make
    for actor in made:
        actor.close()


def learn(actor: LmActor, groups: list[tuple[Sample, ...]] | None = None, iteration: int = 0) -> dict[str, Metric]:
    give(actor, groups or made_up_samples(iteration))
    actor.move(Residency.FULL)
    return dict(actor.learn(iteration, iteration))


def pushed(actor: LmActor, version: int = 1) -> dict[str, Tensor]:
    actor.push_weights(version)
    return dict(CopyReceiver(actor.context.channels[WEIGHTS], 0).pull(version).tensors)


def everything() -> list[Sample]:
    return [sample for group in made_up_samples() for sample in group]


def of_transformers(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM["eps"], weight_decay=0.0)


def assert_same_weights(found: dict[str, Tensor], model: torch.nn.Module) -> None:
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].float(), tensor, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


# ── the update ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rules", [{}, {"loss": "sequence"}, {"tis_cap": 1.1}, {"clip_ratio_high": 0.3}], ids=str)
@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_the_update_is_that_of_plain_grpo(
    actor_of: MakeActor, request: pytest.FixtureRequest, kind: str, rules: dict[str, object]
) -> None:
    folder: Path = request.getfixturevalue(kind)
    model, optimizer = of_transformers(folder)
    expected = {"loss": "token", "tis_cap": None, "clip_ratio_high": 0.2} | rules
    loss, norm = grpo_step(
        model,
        optimizer,
        everything(),
        clip_high=expected["clip_ratio_high"],
        loss=expected["loss"],
        tis_cap=expected["tis_cap"],
        max_grad_norm=LARGEST_NORM,
    )
    actor = actor_of(LmScenario(model=folder, algorithm=rules))
    metrics = learn(actor)
    assert metrics["actor/loss"].value == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert metrics["actor/grad_norm"].value == pytest.approx(norm, rel=1e-4)
    assert norm > LARGEST_NORM, "clipping is part of the comparison"
    assert_same_weights(pushed(actor), model)


def test_several_steps_correct_by_the_policy_before_the_first(actor_of: MakeActor, qwen: Path) -> None:
    samples, cap = everything(), 1.5
    model, optimizer = of_transformers(qwen)
    mask, engine, advantages = targets(samples)
    old = token_logprobs(model, samples).detach()
    for epoch in range(2):
        for picks in optimizer_steps(len(samples), 5, f"7 0 {epoch}"):
            logprobs = token_logprobs(model, samples)
            ratio = torch.exp((logprobs - old) * mask)
            better = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
            weighed = better * torch.exp(old - engine).clamp(max=cap) * mask
            optimizer.zero_grad()
            (-weighed[picks].sum() / mask[picks].sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
    actor = actor_of(LmScenario(model=qwen, algorithm={"tis_cap": cap, "epochs": 2, "train_batch": 5}))
    metrics = learn(actor)
    assert metrics["actor/optimizer_steps"].value == 6
    assert_same_weights(pushed(actor), model)


@pytest.mark.parametrize("budget", [1, 10_000], ids=["each sample alone", "all at once"])
def test_micro_batches_change_nothing(actor_of: MakeActor, qwen: Path, budget: int) -> None:
    model, optimizer = of_transformers(qwen)
    grpo_step(model, optimizer, everything(), max_grad_norm=LARGEST_NORM)
    actor = actor_of(LmScenario(model=qwen, actor={"token_budget": budget}))
    learn(actor)
    assert_same_weights(pushed(actor), model)


@pytest.mark.parametrize(
    "actor",
    [{"optimizer": ADAM | {"on_host": True}}, {"optimizer": ADAM | {"kind": "adamw_master"}}, {"zero_stage": 2}],
    ids=str,
)
def test_where_the_optimizer_lies_changes_nothing(actor_of: MakeActor, qwen: Path, actor: dict[str, object]) -> None:
    model, optimizer = of_transformers(qwen)
    for iteration in range(2):
        samples = [sample for group in made_up_samples(iteration) for sample in group]
        grpo_step(model, optimizer, samples, max_grad_norm=LARGEST_NORM)
    worker = actor_of(LmScenario(model=qwen, actor=actor))
    for iteration in range(2):
        learn(worker, iteration=iteration)
        worker.move(Residency.OFF)
    worker.move(Residency.WEIGHTS)
    assert_same_weights(pushed(worker), model)


def test_the_temperature_of_the_engine_is_that_of_the_learner(actor_of: MakeActor, qwen: Path) -> None:
    model, optimizer = of_transformers(qwen)
    grpo_step(model, optimizer, everything(), temperature=0.7, max_grad_norm=LARGEST_NORM)
    actor = actor_of(LmScenario(model=qwen, rollout={"temperature": 0.7}))
    learn(actor)
    assert_same_weights(pushed(actor), model)


def test_half_precision_keeps_float32_masters(actor_of: MakeActor, qwen: Path) -> None:
    actor = actor_of(LmScenario(model=qwen, actor={"compute": "bf16"}))
    before = {name: tensor.float() for name, tensor in pushed_after_move(actor).items()}
    learn(actor)
    after = pushed(actor, 2)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert any(not torch.equal(before[name], tensor.float()) for name, tensor in after.items())
    assert {tensor.dtype for _, tensor in actor._model.whole_weights()} == {torch.float32}


def pushed_after_move(actor: LmActor) -> dict[str, Tensor]:
    actor.move(Residency.WEIGHTS)
    return pushed(actor)


# ── what is learned from ─────────────────────────────────────────────────────────────────────────────────────────────


def with_rewards(rewards: list[list[float]]) -> list[tuple[Sample, ...]]:
    return [
        tuple(dataclasses.replace(s, reward=r) for s, r in zip(group, of, strict=True))
        for group, of in zip(made_up_samples(), rewards, strict=True)
    ]


def test_groups_without_signal_are_left_out(actor_of: MakeActor, qwen: Path) -> None:
    groups = with_rewards([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]])
    model, optimizer = of_transformers(qwen)
    grpo_step(model, optimizer, groups[1], max_grad_norm=LARGEST_NORM)
    actor = actor_of(LmScenario(model=qwen, algorithm={"dynamic_sampling": True}))
    metrics = learn(actor, groups)
    assert metrics["actor/groups"].value == 3
    assert metrics["actor/groups_with_signal"].value == pytest.approx(1 / 3)
    assert_same_weights(pushed(actor), model)


def test_nothing_to_learn_is_no_step(actor_of: MakeActor, qwen: Path) -> None:
    actor = actor_of(LmScenario(model=qwen, algorithm={"dynamic_sampling": True}))
    metrics = learn(actor, with_rewards([[1.0] * 4, [0.0] * 4, [2.0] * 4]))
    assert metrics["actor/optimizer_steps"].value == 0
    assert "actor/loss" not in metrics
    found = pushed(actor)
    assert all(torch.equal(found[name], tensor) for name, tensor in load_file(qwen / "model.safetensors").items())


def test_metrics_say_how_it_went(actor_of: MakeActor, qwen: Path) -> None:
    actor = actor_of(LmScenario(model=qwen, algorithm={"tis_cap": 1.2}))
    stale = made_up_samples(version=3)
    give(actor, stale)
    actor.move(Residency.FULL)
    metrics = actor.learn(0, 5)
    samples = [sample for group in stale for sample in group]
    assert metrics["actor/reward"].value == pytest.approx(np.mean([s.reward for s in samples]))
    assert metrics["actor/age"].value == 2.0
    assert metrics["actor/tokens_learned"].value == sum(s.response_tokens for s in samples)
    assert metrics["actor/approx_kl"].value == pytest.approx(0.0, abs=1e-9)  # old is of the pass that learns
    assert metrics["actor/mismatch"].value > 0.1  # nobody sampled these
    assert 0.0 < metrics["actor/mismatch_capped"].value < 1.0
    assert 4.0 < metrics["actor/entropy"].value < np.log(320)
    assert metrics["actor/tokens_per_s"].value > 0.0
    assert metrics["actor/lr"].value == LEARNING_RATE


def test_numbers_that_are_none_are_an_error(actor_of: MakeActor, qwen: Path) -> None:
    groups = made_up_samples()
    poisoned = dataclasses.replace(groups[0][0], logprobs=np.full_like(groups[0][0].logprobs, np.nan))
    actor = actor_of(LmScenario(model=qwen))
    actor.move(Residency.FULL)
    before = actor.digest()
    with pytest.raises(DivergedError, match="iteration 0 is not a finite number") as caught:
        learn(actor, [(poisoned, *groups[0][1:]), *groups[1:]])
    assert caught.value.code == "diverged"
    assert actor.digest() == before


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_is_born_off_and_refuses_to_compute(actor_of: MakeActor, qwen: Path, tmp_path: Path) -> None:
    actor = actor_of(LmScenario(model=qwen))
    refused = {
        "learn": lambda: actor.learn(0, 0),
        "push_weights": lambda: actor.push_weights(0),
        "save_policy": lambda: actor.save_policy(str(tmp_path / "policy")),
        "logprobs": lambda: actor.logprobs([1, 2]),
        "digest": actor.digest,
    }
    for method, call in refused.items():
        with pytest.raises(NotResident, match=f"actor rank 0: {method} was called while the worker is off") as caught:
            call()
        assert caught.value.code == "not-resident"
    actor.move(Residency.WEIGHTS)
    with pytest.raises(NotResident, match="learn needs residency full"):
        actor.learn(0, 0)


@pytest.mark.parametrize("on_host", [False, True])
def test_moves_release_what_they_say(actor_of: MakeActor, qwen: Path, on_host: bool) -> None:
    actor = actor_of(LmScenario(model=qwen, actor={"optimizer": ADAM | {"on_host": on_host}}))
    parameters = sum(tensor.numel() for tensor in load_file(qwen / "model.safetensors").values())
    tensors = len(load_file(qwen / "model.safetensors"))
    frequencies = json.loads((qwen / "config.json").read_text())["head_dim"] // 2  # of the rotary embedding, twice
    weights = 4 * parameters + 2 * 4 * frequencies
    adam = (3 if on_host else 2) * 4 * parameters + 4 * tensors
    on_accelerator, stays = (0, adam) if on_host else (adam, 0)
    expected = {
        Residency.FULL: (weights + on_accelerator, stays),
        Residency.WEIGHTS: (weights, adam),
        Residency.OFF: (0, weights + adam),
    }
    for residency in (Residency.FULL, Residency.WEIGHTS, Residency.OFF, Residency.WEIGHTS, Residency.FULL):
        report = actor.move(residency)
        assert (report.accelerator_bytes, report.host_bytes) == expected[residency]
        assert actor.context.device.held_bytes() == report.accelerator_bytes


def test_learning_leaves_nothing_gathered(actor_of: MakeActor, qwen: Path) -> None:
    actor = actor_of(LmScenario(model=qwen))
    full = actor.move(Residency.FULL).accelerator_bytes
    learn(actor)
    assert actor.context.device.held_bytes() == full
    assert actor.move(Residency.FULL).accelerator_bytes == full


@pytest.mark.parametrize("missing", ["optimizer state", "gathered weights and gradients"])
def test_out_of_memory_names_what_did_not_fit(actor_of: MakeActor, qwen: Path, missing: str) -> None:
    actor = actor_of(LmScenario(model=qwen))
    weights = actor.move(Residency.WEIGHTS).accelerator_bytes
    full = actor.move(Residency.FULL).accelerator_bytes
    actor.move(Residency.OFF)
    room = {"optimizer state": weights, "gathered weights and gradients": full}[missing]
    actor.context.device.acquire((1 << 30) - room - 8, "somebody else")
    with pytest.raises(AcceleratorOutOfMemory, match=missing):
        learn(actor)
    actor.context.device.release("somebody else")
    assert actor.move(Residency.FULL).accelerator_bytes == full


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_the_saved_policy_is_the_pushed_one(
    actor_of: MakeActor, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    actor = actor_of(LmScenario(model=request.getfixturevalue(kind)))
    learn(actor)
    actor.save_policy(str(tmp_path / "policy"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    found = pushed(actor)
    assert found.keys() == model.state_dict().keys()  # the tied head too: an engine must not be left with a stale one
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    tokens = [5, 9, 77, 130, 6]
    expected = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)
    expected = expected.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(actor.logprobs(tokens)), expected, atol=1e-5, rtol=0)


def test_a_saved_policy_can_be_trained_on(actor_of: MakeActor, qwen: Path, tmp_path: Path) -> None:
    actor = actor_of(LmScenario(model=qwen))
    learn(actor)
    actor.save_policy(str(tmp_path / "policy"))
    digest = actor.digest()
    again = actor_of(LmScenario(model=tmp_path / "policy"))
    again.move(Residency.WEIGHTS)
    assert again.digest() == digest


@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_factors_are_pushed_and_saved_merged(
    actor_of: MakeActor, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    folder: Path = request.getfixturevalue(kind)
    actor = actor_of(LmScenario(model=folder, actor={"lora_rank": 4, "optimizer": ADAM | {"lr": 1e-2}}))
    for iteration in range(2):
        learn(actor, iteration=iteration)
    tokens = [5, 9, 77, 130, 6]
    scored, found = actor.logprobs(tokens), pushed(actor)
    actor.save_policy(str(tmp_path / "policy"))
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor)
        assert torch.equal(before[name], tensor) != name.endswith("_proj.weight"), name
    again = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)
    again = again.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    torch.testing.assert_close(again, torch.tensor(scored), atol=1e-4, rtol=0)


def test_after_the_first_sync_only_what_is_trained_may_travel(actor_of: MakeActor, qwen: Path) -> None:
    lora = {"lora_rank": 2, "lora_targets": ["q_proj"], "sync": {"mode": "trainable"}}
    actor = actor_of(LmScenario(model=qwen, actor=lora))
    actor.move(Residency.WEIGHTS)
    assert "model.norm.weight" in pushed(actor, 1)
    assert pushed(actor, 2).keys() == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}


# ── what is refused before launch ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("actor", "key", "fix"),
    [
        ({"optimizer": {"kind": "sgd"}}, "actor.optimizer.kind", "kind: adamw or kind: adamw_master"),
        ({"weights": "fp16"}, "actor.weights", "weights: fp32 or weights: bf16"),
        ({"compute": "fp16"}, "actor.compute", "compute: fp32 or compute: bf16"),
        ({"zero_stage": 1}, "actor.zero_stage", "zero_stage: 2 or zero_stage: 3"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("actor.") else "",
)
def test_what_only_a_plan_may_say(actor: dict[str, object], key: str, fix: str) -> None:
    (problem,) = not_run("actor", LmScenario(model=Path("anywhere"), actor=actor).job.config.actor)
    assert (problem.code, problem.key, problem.fix) == ("plan-only", key, fix)


def test_what_runs_is_not_refused() -> None:
    assert not_run("actor", LmScenario(model=Path("anywhere")).job.config.actor) == []


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_gpu_learns_the_same_and_lets_go_of_its_memory(actor_of: MakeActor, qwen: Path, compute: str) -> None:
    model, optimizer = of_transformers(qwen)
    grpo_step(model, optimizer, everything(), max_grad_norm=LARGEST_NORM)
    scenario = LmScenario(model=qwen, actor={"compute": compute})
    actor = actor_of(scenario, device=CudaDevice())
    metrics = learn(actor)
    assert metrics["actor/learn_s"].value > 0.0
    found = {name: tensor.cpu() for name, tensor in actor._model.whole_weights()}
    for name, expected in model.state_dict().items():
        near = {"atol": 5e-5, "rtol": 1e-3} if compute == "fp32" else {"atol": 1e-3, "rtol": 0.0}
        torch.testing.assert_close(found[name], expected, **near)
    held, resident = torch.cuda.memory_allocated(), actor.move(Residency.FULL).accelerator_bytes
    actor.move(Residency.OFF)
    assert held - torch.cuda.memory_allocated() >= resident > 0
    actor.move(Residency.FULL)
    assert actor.logprobs([5, 9, 77])
