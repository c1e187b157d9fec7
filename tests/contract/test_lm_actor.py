"""One rank of a language model's actor in this process: what it learns, pushes and saves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlplace.algo.packing import optimizer_steps
from rlplace.comm.weights.host_sync import CopyReceiver
from rlplace.errors import OutputError
from rlplace.jobs.language_model.rules.trained import problems
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Sample
from rlplace.workers.arguments import WEIGHTS
from rlplace.workers.roles.actor import LmActor
from rlplace.workers.training.samples import sizes_of
from rlplace.workers.training.trained_model import TrainedLm
from tests.lm_ranks import ADAM, LmScenario, everything, give, iterate, made_up_samples
from tests.reference_rlhf import (
    Rules,
    adamw,
    assert_same,
    clipped_policy_loss,
    grpo_step,
    step,
    targets,
    token_logprobs,
)

MakeActor = Callable[..., LmActor]
TOKENS = [5, 9, 77, 130, 6]
QUICK = ADAM | {"lr": 1e-2}


def pushed(actor: LmActor, version: int = 1) -> dict[str, Tensor]:
    actor.move(Residency.WEIGHTS)
    actor.push_weights(version)
    return dict(CopyReceiver(actor.context.channels[WEIGHTS], 0).pull(version).tensors)


def of_transformers(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, adamw(list(model.parameters()), ADAM)


def logprobs(model: torch.nn.Module) -> Tensor:
    """[4] of TOKENS but the first."""
    scores = torch.log_softmax(model(torch.tensor([TOKENS])).logits[0, :-1], -1)
    return scores.gather(1, torch.tensor(TOKENS)[1:, None])[:, 0]


# ── the update ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rules", "laps"),
    [
        ({"tis_cap": 2.0, "epochs": 2}, {"score", "micro_batch", "step"}),
        ({"accumulate_early": True}, {"micro_batch", "step"}),
    ],
    ids=["learn", "accumulate"],
)
def test_a_lap_ends_when_the_accelerator_has_done_what_it_was_given(
    actor_of: MakeActor,
    qwen: Path,
    rules: dict[str, Any],
    laps: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU is only given its work: without a wait, all of it would be in the lap that reads the first number."""
    actor, log, lap = actor_of(qwen, algorithm=rules), list[str](), Stopwatch.lap
    monkeypatch.setattr(
        TrainedLm, "synchronize", lambda self: log.append("synchronized")
    )

    def noting(self: Stopwatch, part: str, size: float = 0.0) -> None:
        log.append(part)
        lap(self, part, size)

    monkeypatch.setattr(Stopwatch, "lap", noting)
    iterate(actor)
    ended = [(before, part) for before, part in itertools.pairwise(log) if part in laps]
    assert {part for _, part in ended} == laps
    assert {before for before, _ in ended} == {"synchronized"}


RULES: list[dict[str, Any]] = [
    {},
    {"loss": "sequence"},
    {"tis_cap": 1.1},
    {"clip_ratio_high": 0.3},
    {"tis_cap": 1.1, "tis_level": "sequence"},
    {"tis_cap": 1.1, "tis_above": "drop", "tis_floor": 0.7},
    {"surrogate": "cispo"},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_the_update_is_that_of_plain_grpo(
    actor_of: MakeActor,
    request: pytest.FixtureRequest,
    kind: str,
    rules: dict[str, Any],
) -> None:
    folder: Path = request.getfixturevalue(kind)
    model, optimizer = of_transformers(folder)
    others = {name: value for name, value in rules.items() if name != "clip_ratio_high"}
    loss, norm = grpo_step(
        model,
        optimizer,
        everything(),
        Rules(clip_high=rules.get("clip_ratio_high", 0.2)),
        **others,
    )
    actor = actor_of(folder, algorithm=rules)
    metrics = iterate(actor)
    assert metrics["actor/loss"].value == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert metrics["actor/grad_norm"].value == pytest.approx(norm, rel=1e-4)
    assert norm > ADAM["max_grad_norm"], "clipping is part of the comparison"
    assert_same(pushed(actor), model.state_dict())


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"loss": "sequence"},
        {"loss": "constant", "entropy_coef": 0.01},
        {"tis_cap": 1.1, "dynamic_sampling": True},
    ],
    ids=str,
)
def test_gradients_that_are_made_early_make_the_same_step(
    actor_of: MakeActor, qwen: Path, rules: dict[str, Any]
) -> None:
    late = actor_of(qwen, algorithm=rules)
    expected = [iterate(late, iteration) for iteration in range(2)]
    weights = pushed(late)
    early = actor_of(qwen, algorithm=rules | {"accumulate_early": True})
    for iteration in range(2):
        groups = made_up_samples(iteration, version=iteration)
        give(early, groups)
        early.move(Residency.FULL)
        early.accumulate(iteration, iteration)
        begun = [
            group for experience in early._accumulated for group in experience.groups
        ]
        assert 0 < len(begun) < len(groups), (
            "some are learned from before the last has come"
        )
        metrics = early.learn(iteration, iteration)
        same = (
            "loss",
            "grad_norm",
            "entropy",
            "approx_kl",
            "reward",
            "samples",
            "tokens_learned",
            "optimizer_steps",
        )
        for name in (f"actor/{name}" for name in same):
            assert metrics[name].value == pytest.approx(
                expected[iteration][name].value, rel=1e-4, abs=1e-6
            ), name
    assert_same(pushed(early), weights)


def test_a_variant_with_the_same_loss_makes_the_same_step_and_another_another(
    actor_of: MakeActor, qwen: Path
) -> None:
    rules: dict[str, Any] = {"tis_cap": 1.1}
    shipped = iterate(actor_of(qwen, algorithm=rules))
    own = {"variant": {"name": "tests.own_variant:Same"}}
    metrics = iterate(actor_of(qwen, algorithm=rules | own))
    for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
        assert metrics[name].value == pytest.approx(
            shipped[name].value, rel=1e-4, abs=1e-6
        ), name
    assert metrics["actor/own/ratio"].value == pytest.approx(1.0, abs=1e-4)
    doubled = {
        "variant": {"name": "tests.own_variant:Same", "kwargs": {"doubled": True}}
    }
    metrics = iterate(actor_of(qwen, algorithm=rules | doubled))
    assert metrics["actor/grad_norm"].value == pytest.approx(
        2 * shipped["actor/grad_norm"].value, rel=1e-3
    )


def test_what_was_made_early_of_an_iteration_that_begins_again_is_forgotten(
    actor_of: MakeActor, qwen: Path
) -> None:
    early = actor_of(qwen, algorithm={"accumulate_early": True})
    once = iterate(early)
    weights = pushed(early)
    early = actor_of(qwen, algorithm={"accumulate_early": True})
    give(early, made_up_samples(5))
    early.move(Residency.FULL)
    early.accumulate(0, 0)
    early.begin_again(0)
    assert iterate(early)["actor/samples"].value == once["actor/samples"].value
    assert_same(pushed(early), weights)


def test_several_steps_correct_by_the_policy_before_the_first(
    actor_of: MakeActor, qwen: Path
) -> None:
    samples, cap = everything(), 1.5
    model, optimizer = of_transformers(qwen)
    mask, engine, advantages = targets(samples)
    old = token_logprobs(model, samples).detach()
    weighted = (
        torch.exp(old - engine).clamp(max=cap) * advantages[:, None]
    )  # above 0: as good inside the clip
    for epoch in range(2):
        for picks in optimizer_steps(
            sizes_of(samples, shared_prefix_cost=0.25), 5, f"7 0 {epoch}"
        ):
            logprobs = token_logprobs(model, samples)[picks]
            step(
                optimizer,
                clipped_policy_loss(
                    logprobs, old[picks], weighted[picks], mask[picks], Rules()
                ),
                Rules(),
            )
    actor = actor_of(qwen, algorithm={"tis_cap": cap, "epochs": 2, "train_batch": 5})
    assert iterate(actor)["actor/optimizer_steps"].value == 6
    assert_same(pushed(actor), model.state_dict())


@pytest.mark.parametrize(
    ("trained", "temperature"),
    [
        ({"token_budget": 1}, 1.0),  # each sample alone
        ({"token_budget": 10_000}, 0.7),  # all at once
        ({"optimizer": ADAM | {"on_host": True}}, 1.0),
        ({"optimizer": ADAM | {"kind": "adamw_master"}}, 1.0),
        ({"zero_stage": 2}, 1.0),
    ],
    ids=str,
)
def test_how_it_is_computed_changes_nothing(
    actor_of: MakeActor, qwen: Path, trained: dict[str, object], temperature: float
) -> None:
    model, optimizer = of_transformers(qwen)
    actor = actor_of(qwen, trained=trained, rollout={"temperature": temperature})
    for iteration in range(2):
        grpo_step(
            model, optimizer, everything(iteration), Rules(), temperature=temperature
        )
        iterate(actor, iteration)
        actor.move(Residency.OFF)
    assert_same(pushed(actor), model.state_dict())


def test_half_precision_keeps_float32_masters(actor_of: MakeActor, qwen: Path) -> None:
    actor = actor_of(qwen, trained={"compute": "bf16"})
    before = {name: tensor.float() for name, tensor in pushed(actor).items()}
    iterate(actor)
    after = pushed(actor, 2)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert any(
        not torch.equal(before[name], tensor.float()) for name, tensor in after.items()
    )
    assert {tensor.dtype for _, tensor in actor._model.whole_weights()} == {
        torch.float32
    }


# ── the samples ──────────────────────────────────────────────────────────────────────────────────────────────────────


def with_rewards(rewards: list[list[float]]) -> list[tuple[Sample, ...]]:
    return [
        tuple(dataclasses.replace(s, reward=r) for s, r in zip(group, of, strict=True))
        for group, of in zip(made_up_samples(), rewards, strict=True)
    ]


def test_groups_without_signal_are_left_out(actor_of: MakeActor, qwen: Path) -> None:
    groups = with_rewards([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]])
    model, optimizer = of_transformers(qwen)
    actor = actor_of(qwen, algorithm={"dynamic_sampling": True})
    metrics = iterate(actor, groups=with_rewards([[1.0] * 4, [0.0] * 4, [2.0] * 4]))
    assert metrics["actor/optimizer_steps"].value == 0
    assert "actor/loss" not in metrics
    assert_same(pushed(actor), model.state_dict())
    grpo_step(model, optimizer, groups[1], Rules())
    metrics = iterate(actor, groups=groups)
    assert metrics["actor/groups"].value == 3
    assert metrics["actor/groups_with_signal"].value == pytest.approx(1 / 3)
    # Two groups are sampled, and not learned from
    assert metrics["actor/tokens_learned"].value == sum(
        sample.response_tokens for sample in groups[1]
    )
    assert_same(pushed(actor, 2), model.state_dict())


def test_metrics_describe_samples_and_update(actor_of: MakeActor, qwen: Path) -> None:
    actor = actor_of(qwen, algorithm={"tis_cap": 1.2})
    stale = made_up_samples(version=3)
    give(actor, stale)
    actor.move(Residency.FULL)
    metrics = actor.learn(0, 5)
    samples = [sample for group in stale for sample in group]
    assert metrics["actor/reward"].value == pytest.approx(
        np.mean([s.reward for s in samples])
    )
    assert metrics["actor/age"].value == 2.0
    assert metrics["actor/tokens_learned"].value == sum(
        s.response_tokens for s in samples
    )
    assert metrics["actor/approx_kl"].value == pytest.approx(
        0.0, abs=1e-9
    )  # old is of the pass that learns
    assert (
        metrics["actor/mismatch"].weight == 0
    )  # by other weights: nothing is known of the engine
    assert 0.0 < metrics["actor/mismatch_capped"].value < 1.0
    assert 4.0 < metrics["actor/entropy"].value < np.log(320)
    assert metrics["actor/tokens_per_s"].value > 0.0
    assert metrics["actor/lr"].value == ADAM["lr"]


@pytest.mark.parametrize("early", [False, True])
def test_the_mismatch_is_of_the_tokens_that_the_actors_own_version_sampled(
    actor_of: MakeActor, qwen: Path, early: bool
) -> None:
    actor = actor_of(qwen, algorithm={"accumulate_early": early})
    old, current = made_up_samples(version=0)[:1], made_up_samples(version=1)[1:]
    metrics = iterate(actor, 1, [*old, *current])
    assert metrics["actor/mismatch"].weight == sum(
        s.response_tokens for group in current for s in group
    )
    assert metrics["actor/mismatch"].value > 0.2  # no engine sampled these
    (note,) = metrics["actor/mismatch"].notes
    assert "between engine and trainer" in note


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "trained", [{}, {"lora_rank": 4, "optimizer": QUICK}], ids=["all", "factors"]
)
@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_the_saved_policy_is_the_pushed_one_and_can_be_trained_on(
    actor_of: MakeActor,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kind: str,
    trained: dict[str, object],
) -> None:
    folder: Path = request.getfixturevalue(kind)
    actor = actor_of(folder, trained=trained)
    for iteration in range(2):
        iterate(actor, iteration)
    scored, found, digest = actor.logprobs(TOKENS), pushed(actor), actor.digest()
    actor.save_model(str(tmp_path / "policy"))
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert (
        found.keys() == model.state_dict().keys()
    )  # the tied head too: an engine must not be left with a stale one
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(
            found[name], tensor
        )  # factors are merged rank by rank here, and whole there
        assert torch.equal(before[name], tensor) == bool(
            trained and not name.endswith("_proj.weight")
        ), name
    torch.testing.assert_close(
        torch.tensor(scored), logprobs(model), atol=1e-4 if trained else 1e-5, rtol=0
    )
    again = actor_of(tmp_path / "policy")
    again.move(Residency.WEIGHTS)
    assert again.digest() == digest


def test_weights_that_cannot_be_written_are_gathered_to_the_end(
    actor_of: MakeActor, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for that."""
    actor = actor_of(qwen)
    actor.move(Residency.WEIGHTS)
    weights = list(actor._model.whole_weights())
    left = iter(weights)
    monkeypatch.setattr(actor._model, "whole_weights", lambda: left)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError):
        actor.save_model(str(tmp_path / "file" / "policy"))
    assert list(left) == []


def test_after_the_first_sync_only_trained_weights_may_travel(
    actor_of: MakeActor, qwen: Path
) -> None:
    actor = actor_of(
        qwen,
        trained={
            "lora_rank": 2,
            "lora_targets": ["q_proj"],
            "sync": {"mode": "trainable"},
        },
    )
    assert "model.norm.weight" in pushed(actor, 1)
    assert pushed(actor, 2).keys() == {
        f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)
    }


# ── before launch ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("actor", "key", "fix"),
    [
        ({"weights": "fp16"}, "actor.weights", "weights: fp32 or weights: bf16"),
        ({"compute": "fp16"}, "actor.compute", "compute: fp32 or compute: bf16"),
        ({"zero_stage": 1}, "actor.zero_stage", "zero_stage: 2 or zero_stage: 3"),
    ],
    ids=lambda value: (
        value if isinstance(value, str) and value.startswith("actor.") else ""
    ),
)
def test_what_only_a_plan_may_have(
    actor: dict[str, object], key: str, fix: str
) -> None:
    config = LmScenario(model=Path("anywhere"), trained=actor).job.config
    (problem,) = problems(config)
    assert (problem.code, problem.key, problem.fix) == ("plan-only", key, fix)
    config = LmScenario(model=Path("anywhere")).job.config
    assert list(problems(config)) == []
