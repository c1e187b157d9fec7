"""Experts from engine to actor: those recorded are those that transformers chooses, and the actor learns with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Episode, Request, Sample
from rlplace.workers.engines.contract import EngineSettings
from rlplace.workers.engines.transformers import TransformersEngine
from rlplace.workers.training.lm_learner import SupervisedLearner
from tests.contract.test_lm_ranks import check_update_of_one
from tests.lm_ranks import LmScenario, iterate, run_lm_ranks
from tests.rollout_stage import Ledger
from tests.tiny_experts import (
    CHOSEN,
    LAYERS,
    drawn_routes,
    padded_logprobs,
    tiny_experts,
)
from tests.tiny_lm import request_of, tiny_tokenizer

CLOSE = 1e-5  # of log-probabilities in fp32
APART = 1e-3
Groups = list[tuple[Sample, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replayed")
    tiny_experts(folder, "qwen3_moe")
    tiny_tokenizer(320).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    found: PreTrainedModel = tiny_experts(folder, "qwen3_moe")
    return found.requires_grad_(False)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def engine_of(
    folder: Path, *, routes: bool = True, **rollout: Any
) -> TransformersEngine:
    given = {
        "dtype": "fp32",
        "kv_cache_memory": 1 << 20,
        "seed": 3,
        "step_sequences": 3,
    }
    settings = EngineSettings(
        rollout=TextRolloutConfig(**(given | rollout)),
        model=folder,
        context=48,
        routes=routes,
    )
    engine = TransformersEngine(settings, device=Ledger(), owner="rollout rank 0")
    engine.move(Residency.WEIGHTS)
    return engine


def answers_of(
    engine: TransformersEngine,
    requests: Sequence[Request],
    between: Callable[[], None] = lambda: None,
) -> list[Completion]:
    """All answers; `between` happens after four steps."""
    for request in requests:
        engine.submit(request)
    found: list[Completion] = []
    steps = 0
    while engine.in_flight:
        found += engine.step()
        steps += 1
        if steps == 4:
            between()
    return found


def chosen_by(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """[tokens, layers, k], of a pass over one sequence alone, sorted."""
    output = model(
        input_ids=torch.tensor(tokens)[None].long(),
        output_router_logits=True,
        use_cache=False,
    )
    found = [logits.topk(CHOSEN).indices for logits in output.router_logits]
    return torch.stack(found, 1).sort(-1).values.numpy()


REQUESTS = [
    request_of(0, samples=2, longest=12, length=7),
    request_of(1, samples=2, longest=5, length=11),
    request_of(2, samples=1, longest=1, length=4),
]


def test_an_engine_records_the_experts_of_each_token_it_reads(
    folder: Path, model: PreTrainedModel
) -> None:
    engine = engine_of(folder)
    engine.load(weights_of(model), 0)
    engine.move(Residency.FULL)
    answers = answers_of(engine, REQUESTS)
    assert len(answers) == 5
    for answer in answers:
        prompt = REQUESTS[answer.group].tokens
        whole = np.concatenate([prompt, answer.tokens])[:-1]
        assert answer.routes is not None
        assert answer.routes.dtype == np.int8
        assert answer.routes.shape == (len(whole), LAYERS, CHOSEN)
        assert np.array_equal(np.sort(answer.routes, -1), chosen_by(model, whole))


def test_answers_that_new_weights_read_again_have_their_experts(
    folder: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    other = tiny_experts(tmp_path, "qwen3_moe").requires_grad_(False)
    for parameter in other.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(1))
    engine = engine_of(folder)
    engine.load(weights_of(model), 0)
    engine.move(Residency.FULL)
    answers = answers_of(
        engine, REQUESTS[:1], lambda: engine.load(weights_of(other), 1)
    )
    for answer in answers:
        assert {*answer.versions.tolist()} == {0, 1}
        whole = np.concatenate([REQUESTS[0].tokens, answer.tokens])[:-1]
        assert answer.routes is not None
        assert np.array_equal(np.sort(answer.routes, -1), chosen_by(other, whole))


def test_nothing_is_recorded_for_evaluations_or_unless_asked(
    folder: Path, model: PreTrainedModel
) -> None:
    held_out = dataclasses.replace(REQUESTS[2], held_out=True)
    for engine, request in (
        (engine_of(folder), held_out),
        (engine_of(folder, routes=False), REQUESTS[2]),
    ):
        engine.load(weights_of(model), 0)
        engine.move(Residency.FULL)
        (answer,) = answers_of(engine, [request])
        assert answer.routes is None


def generated(folder: Path, model: PreTrainedModel) -> Groups:
    """Three groups of four, from the engine."""
    engine = engine_of(folder, step_sequences=8)
    engine.load(weights_of(model), 0)
    engine.move(Residency.FULL)
    requests = [request_of(g, samples=4, longest=9, length=5 + g) for g in range(3)]
    answers = answers_of(engine, requests)
    groups: list[list[Sample]] = [[], [], []]
    for answer in sorted(answers, key=lambda a: (a.group, a.sample)):
        episode = Episode(
            group=answer.group,
            sample=answer.sample,
            prompt=requests[answer.group].tokens,
        )
        episode.answered(answer)
        reward = {"made up": float(answer.sample % 3)}
        groups[answer.group].append(episode.finish(reward, {"made up": 1.0}))
    return [tuple(group) for group in groups]


def forced_groups(model: PreTrainedModel, groups: Groups) -> Groups:
    """The same samples of an engine that goes to other experts than its routers say."""
    found = []
    for group in groups:
        prompt = drawn_routes(group[0].prompt_tokens, LAYERS, group[0].group)
        members = []
        for sample in group:
            seed = 100 + 10 * sample.group + sample.sample
            answer = drawn_routes(sample.response_tokens, LAYERS, seed)
            routes = np.concatenate([prompt, answer])
            routes[-1] = -1
            scores = padded_logprobs(model, [sample.tokens], [sample.mask], [routes])
            logprobs = np.zeros(len(sample.tokens), np.float32)
            logprobs[sample.mask] = scores.numpy()
            members.append(
                dataclasses.replace(sample, routes=routes, logprobs=logprobs)
            )
        found.append(tuple(members))
    return found


def without(groups: Groups) -> Groups:
    return [tuple(s.without_routes() for s in group) for group in groups]


def test_with_equal_weights_engine_and_actor_agree(
    folder: Path, model: PreTrainedModel, actor_of: Callable[..., Any]
) -> None:
    actor = actor_of(folder, trained={"router_replay": True})
    found = iterate(actor, groups=generated(folder, model))
    assert found["actor/mismatch_max"].value < CLOSE
    # Four of six experts are not chosen by a token
    assert 1 < found["actor/expert_load_max"].value < 3
    assert 0 <= found["actor/experts_unused"].value < 0.5


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"accumulate_early": True}, {"train_batch": 4, "epochs": 2, "tis_cap": 2.0}],
    ids=["one step", "early", "several steps"],
)
def test_the_actor_learns_with_the_experts_of_the_engine(
    folder: Path,
    model: PreTrainedModel,
    actor_of: Callable[..., Any],
    algorithm: dict[str, Any],
) -> None:
    groups = forced_groups(model, generated(folder, model))
    found = {}
    for routed in (groups, without(groups)):
        actor = actor_of(folder, algorithm=algorithm, trained={"router_replay": True})
        found[routed is groups] = iterate(actor, groups=routed)
    assert found[True]["actor/mismatch_max"].value < CLOSE
    assert found[False]["actor/mismatch"].value > APART


def test_a_reference_takes_its_own_experts(
    folder: Path, model: PreTrainedModel, actor_of: Callable[..., Any]
) -> None:
    """Fresh factors add nothing: actor and reference are one model, apart from their experts."""
    groups = forced_groups(model, generated(folder, model))
    actor = actor_of(
        folder,
        trained={"router_replay": True, "lora_rank": 2},
        algorithm={"kl_coef": 0.1},
        reference={"share_actor": True},
    )
    actor.move(Residency.FULL)
    (shard,) = actor._learner.shards(groups, infer=True)
    with actor._computing("infer", Residency.WEIGHTS):
        inferred = actor._learner.infer(shard, {"old", "reference"})
    samples = [sample for group in groups for sample in group]
    tokens, masks = [s.tokens for s in samples], [s.mask for s in samples]
    free = [np.full((len(t), LAYERS, CHOSEN), -1) for t in tokens]
    expected = padded_logprobs(model, tokens, masks, free).numpy()
    reference = np.concatenate(list(inferred["reference"]))
    np.testing.assert_allclose(reference, expected, atol=CLOSE)
    by_engine = np.concatenate([s.logprobs[s.mask] for s in samples])
    old = np.concatenate(list(inferred["old"]))
    np.testing.assert_allclose(old, by_engine, atol=CLOSE)
    assert np.abs(old - reference).max() > APART


def test_routes_of_another_model_are_refused(
    folder: Path, model: PreTrainedModel, actor_of: Callable[..., Any]
) -> None:
    groups = generated(folder, model)
    fewer = [
        tuple(dataclasses.replace(s, routes=s.routes[:, 1:]) for s in group)
        for group in groups
        if all(s.routes is not None for s in group)
    ]
    actor = actor_of(folder, trained={"router_replay": True})
    with pytest.raises(ValueError, match="routes of 2 routers"):
        iterate(actor, groups=fewer)


def test_the_auxiliary_loss_moves_routers(
    folder: Path, model: PreTrainedModel, actor_of: Callable[..., Any]
) -> None:
    groups = generated(folder, model)
    moved = {}
    for coefficient in (0.0, 1.0):
        actor = actor_of(folder, trained={"router_loss_coef": coefficient})
        found = iterate(actor, groups=groups)
        assert ("actor/router_loss" in found) == (coefficient > 0)
        weights = {n: w.clone() for n, w in actor._model.whole_weights()}
        moved[coefficient] = weights["model.layers.0.mlp.gate.weight"]
        if coefficient:
            # k = 2 if experts are used equally
            assert 2 <= found["actor/router_loss"].value < 3
    assert not torch.allclose(moved[0.0], moved[1.0], atol=1e-5)


def test_early_gradients_have_the_auxiliary_loss_of_one_step(
    folder: Path, model: PreTrainedModel, actor_of: Callable[..., Any]
) -> None:
    """All samples are one micro-batch, in which experts are balanced."""
    groups = generated(folder, model)
    moved, losses = [], []
    for early in (False, True):
        actor = actor_of(
            folder,
            algorithm={"accumulate_early": early},
            trained={"router_loss_coef": 1.0, "token_budget": 4096},
        )
        losses.append(iterate(actor, groups=groups)["actor/router_loss"].value)
        weights = {n: w.clone() for n, w in actor._model.whole_weights()}
        moved.append(weights["model.layers.0.mlp.gate.weight"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(moved[0], moved[1], atol=2e-5, rtol=1e-4)


def test_written_answers_balance_experts_too(
    folder: Path, model: PreTrainedModel, actor_of: Callable[..., Any]
) -> None:
    actor = actor_of(folder, trained={"router_loss_coef": 1.0})
    learner = SupervisedLearner(
        actor.config.config,
        actor._model,
        actor._learner._trainer,
        actor._ranks,
        None,
        4096,
    )
    actor.move(Residency.FULL)
    (shard,) = learner.shards(without(generated(folder, model)), 0)
    with actor._computing("learn", Residency.FULL):
        update = learner.learn(shard, 0)
    assert update.mean is not None
    assert 2 <= update.mean["router_loss"] < 3
    assert update.mean["loss"] > update.mean["router_loss"]
    assert 1 < update.metrics["actor/expert_load_max"].value < 3


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2], ids=["samples apart", "tokens apart"])
def test_ranks_replay_the_routes_of_one(experts: Path, parts: int) -> None:
    """Two ranks with samples of their own, and two with half of the tokens of each."""
    one = LmScenario(
        model=experts,
        iterations=2,
        algorithm={"epochs": 2},
        trained={"router_replay": True},
        routes=(2, 4, 2),
    )
    alone = run_lm_ranks(one)
    two = dataclasses.replace(one, ranks=2, context_parallel=parts)
    check_update_of_one(run_lm_ranks(two), alone, "actor")
    (free,) = run_lm_ranks(dataclasses.replace(one, routes=None))
    assert free.digest != alone[0].digest
