"""Scores and values are those of transformers, sequence by sequence, on any packing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.errors import ConfigError
from rlplace.models import BUILDING
from rlplace.models.causal_lm import (
    ActorCriticLm,
    CausalLm,
    FrozenLm,
    LmSpec,
    PackedLm,
    ValueLm,
    build,
    first_head,
)
from rlplace.models.heads import value_head_problem
from rlplace.models.lora import LoraSpec, is_factor
from rlplace.models.packed import Packed, TokenScores
from rlplace.placement.memory.model import Head, read_model
from rlplace.workers.engines.contract import EngineSettings
from rlplace.workers.engines.transformers import TransformersEngine
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedLm
from tests.rollout_stage import Ledger

LENGTHS = (17, 2, 40, 9)


def sequences() -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 300, length) for length in LENGTHS]


def pack(chosen: Sequence[NDArray[np.int64]]) -> Packed:
    return Packed.of(chosen, [np.arange(len(s)) > 0 for s in chosen])


def of_transformers(
    folder: Path, temperature: float = 1.0
) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """The model, and log-probabilities and entropies of all sequences, each by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    found, entropies = [], []
    for tokens in map(torch.tensor, sequences()):
        logprobs = torch.log_softmax(
            model(tokens[None]).logits[0, :-1] / temperature, dim=-1
        )
        found.append(logprobs.gather(1, tokens[1:, None])[:, 0])
        entropies.append(-(logprobs.exp() * logprobs).sum(dim=-1))
    return model, torch.cat(found), torch.cat(entropies)


def loss(scores: TokenScores) -> Tensor:
    """Something uneven over tokens, of both kinds of score."""
    weights = torch.linspace(-1.0, 2.0, len(scores.logprobs))
    return (weights * scores.logprobs + 0.1 * scores.entropies).sum()


def gradients(module: PackedLm) -> dict[str, Tensor]:
    return {
        name: p.grad.full_tensor()
        for name, p in module.lm.named_parameters()
        if p.grad is not None
    }


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_transformers(
    folder: Path, ranks: Ranks, temperature: float
) -> None:
    _, logprobs, entropies = of_transformers(folder, temperature)
    scores = build(CausalLm, LmSpec(folder=folder), ranks.mesh)(
        pack(sequences()), temperature
    )
    torch.testing.assert_close(scores.logprobs, logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropies, entropies, atol=1e-5, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_transformers(
    folder: Path, ranks: Ranks, checkpointing: bool
) -> None:
    model, logprobs, entropies = of_transformers(folder)
    loss(TokenScores(logprobs, entropies, logprobs)).backward()
    module = build(
        CausalLm, LmSpec(folder=folder, checkpointing=checkpointing), ranks.mesh
    )
    loss(module(pack(sequences()))).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert_near(gradients(module), expected)  # tied weights have one


def test_inputs_of_layers_wait_on_the_host(
    qwen: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, logprobs, entropies = of_transformers(qwen)
    loss(TokenScores(logprobs, entropies, logprobs)).backward()
    moved: dict[str, list[tuple[int, ...]]] = {"to": [], "from": []}

    def by_way_of_the_host(
        pin_memory: bool,
    ) -> torch.autograd.graph.saved_tensors_hooks:
        def seen(way: str) -> Callable[[Tensor], Tensor]:
            def note(tensor: Tensor) -> Tensor:
                if tensor.numel():  # torch 2.11 saves an empty one for each layer, too
                    moved[way].append(tuple(tensor.shape))
                return tensor.clone()

            return note

        assert not pin_memory  # there is no GPU
        return torch.autograd.graph.saved_tensors_hooks(seen("to"), seen("from"))

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", by_way_of_the_host)
    module = build(CausalLm, LmSpec(folder=qwen, activation_offload=True), ranks.mesh)
    packed = pack(sequences())
    scores = module(packed)
    inputs = [
        (1, len(packed.tokens), model.config.hidden_size)
    ] * model.config.num_hidden_layers
    assert moved == {"to": inputs, "from": []}
    loss(scores).backward()
    assert moved == {"to": inputs, "from": inputs}
    assert_near(
        gradients(module), {name: p.grad for name, p in model.named_parameters()}
    )


def test_only_the_tokens_asked_for_are_scored(qwen: Path, ranks: Ranks) -> None:
    module = build(CausalLm, LmSpec(folder=qwen), ranks.mesh)
    everything = module(pack(sequences())).logprobs
    asked = [np.arange(len(s)) % 3 == 1 for s in sequences()]
    some = module(Packed.of(sequences(), asked)).logprobs
    torch.testing.assert_close(
        some, everything[np.concatenate([mask[1:] for mask in asked])]
    )


def test_half_precision_computes_near_it(qwen: Path, ranks: Ranks) -> None:
    _, logprobs, _ = of_transformers(qwen)
    module = build(CausalLm, LmSpec(folder=qwen, compute="bf16"), ranks.mesh)
    scores = module(pack(sequences()))
    torch.testing.assert_close(scores.logprobs, logprobs, atol=0.2, rtol=0)
    loss(scores).backward()
    assert (
        {p.dtype for p in module.parameters()}
        == {g.dtype for g in gradients(module).values()}
        == {torch.float32}
    )


def edited(folder: Path, copy: Path, change: Mapping[str, Tensor | None]) -> Path:
    """A copy of a model with some weights replaced or left out."""
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = {**load_file(folder / "model.safetensors"), **change}
    save_file(
        {name: w for name, w in weights.items() if w is not None},
        copy / "model.safetensors",
    )
    return copy


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "have no weight model.norm.weight"),
        (torch.zeros(3), r"model.norm.weight is \[3\] there, \[64\] in"),
    ],
    ids=["missing", "of another shape"],
)
def test_files_of_another_model_are_refused(
    qwen: Path, ranks: Ranks, tmp_path: Path, value: Tensor | None, why: str
) -> None:
    folder = edited(qwen, tmp_path / "model", {"model.norm.weight": value})
    with pytest.raises(ConfigError, match=why) as caught:
        build(CausalLm, LmSpec(folder=folder), ranks.mesh)
    assert caught.value.codes == ("model-weights",)


def test_weights_in_half_precision_are_read_as_they_are_trained(
    qwen: Path, ranks: Ranks, tmp_path: Path
) -> None:
    halves = {
        name: w.bfloat16() for name, w in load_file(qwen / "model.safetensors").items()
    }
    spec = LmSpec(folder=edited(qwen, tmp_path / "halves", halves))
    for weights, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        module = build(CausalLm, dataclasses.replace(spec, weights=weights), ranks.mesh)
        norm = dict(module.named_tensors())["model.norm.weight"].full_tensor()
        assert norm.dtype == dtype
        assert torch.equal(norm, halves["model.norm.weight"].to(dtype))


def test_nothing_is_dropped_out(qwen: Path, ranks: Ranks, tmp_path: Path) -> None:
    folder = edited(qwen, tmp_path / "model", {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    module = build(CausalLm, LmSpec(folder=folder), ranks.mesh)
    assert module.training
    assert torch.equal(
        module(pack(sequences())).logprobs, module(pack(sequences())).logprobs
    )


# ── threads ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether others had to wait, each time transformers was asked for a model."""
    seen: list[bool] = []
    made = AutoModelForCausalLM.from_config

    def from_config(*args: Any, **kwargs: Any) -> Any:
        seen.append(BUILDING.locked())
        return made(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    return seen


def test_others_wait_while_a_model_is_built(
    folder: Path, ranks: Ranks, seen: list[bool]
) -> None:
    build(CausalLm, LmSpec(folder=folder, lora=LoraSpec(rank=2, alpha=4.0)), ranks.mesh)
    FrozenLm(CausalLm, folder, "bf16", None, torch.device("cpu"))
    settings = EngineSettings(
        rollout=TextRolloutConfig(kv_cache_memory=1 << 20), model=folder, context=64
    )
    TransformersEngine(settings, device=Ledger(), owner="rollout rank 0")
    assert seen == [True, True, True]
    assert not BUILDING.locked()


# ── values ────────────────────────────────────────────────────────────────────────────────────────────────────────────


HIDDEN = 64


def masks() -> list[NDArray[np.bool_]]:
    """Uneven; nothing of the second sequence."""
    return [(np.arange(length) % 3 > 0) & (np.arange(length) > 4) for length in LENGTHS]


def packed() -> Packed:
    return Packed.of(sequences(), masks())


def values_of_transformers(
    folder: Path, head: Tensor
) -> tuple[torch.nn.Module, Tensor]:
    """The model, and the values before each scored token, each sequence by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, attn_implementation="eager"
    )
    with torch.no_grad():
        model.score.weight.copy_(head)
    found = []
    for tokens, mask in zip(sequences(), masks(), strict=True):
        states = model.base_model(torch.tensor(tokens)[None]).last_hidden_state
        found.append(model.score(states)[0, :-1, 0][torch.tensor(mask)[1:]])
    return model, torch.cat(found)


def value_loss(values: Tensor) -> Tensor:
    """Something uneven over tokens."""
    return (torch.linspace(-1.0, 2.0, len(values)) * values).sum()


def test_values_and_gradients_are_those_of_sequence_classification(
    folder: Path, ranks: Ranks
) -> None:
    model, expected = values_of_transformers(folder, first_head(HIDDEN, 3))
    module = build(ValueLm, LmSpec(folder=folder, seed=3), ranks.mesh)
    values = module(packed())
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    value_loss(expected).backward()
    value_loss(values).backward()
    assert_near(
        gradients(module), {name: p.grad for name, p in model.named_parameters()}
    )


# ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def head_of(module: ValueLm) -> Tensor:
    return dict(module.lm.named_parameters())["score.weight"].full_tensor()


def test_a_new_head_follows_from_the_seed_and_says_little(
    qwen: Path, ranks: Ranks
) -> None:
    heads = [
        head_of(build(ValueLm, LmSpec(folder=qwen, seed=seed), ranks.mesh))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert torch.equal(heads[0], first_head(HIDDEN, 0))
    assert float(heads[0].detach().norm()) == pytest.approx(HIDDEN**-0.5, rel=0.3)


@pytest.mark.parametrize(
    "name", ["score.weight", "value_head.weight", "v_head.summary.weight"]
)
def test_a_head_in_the_folder_is_taken_whatever_it_is_called(
    qwen: Path, ranks: Ranks, tmp_path: Path, name: str
) -> None:
    head = torch.randn(1, HIDDEN)
    folder = edited(qwen, tmp_path / "model", {name: head})
    assert value_head_problem(folder) is None
    assert torch.equal(head_of(build(ValueLm, LmSpec(folder=folder), ranks.mesh)), head)


@pytest.mark.parametrize(
    ("heads", "why"),
    [
        (
            {"score.weight": torch.zeros(3, HIDDEN)},
            "score.weight has 3 rows: it tells 3 classes apart",
        ),
        (
            {
                "value_head.weight": torch.zeros(1, HIDDEN),
                "value_head.bias": torch.zeros(1),
            },
            "value_head.bias would be",
        ),
    ],
    ids=["three classes", "a bias"],
)
def test_a_head_that_gives_no_value_is_refused(
    qwen: Path, ranks: Ranks, tmp_path: Path, heads: dict[str, Tensor], why: str
) -> None:
    folder = edited(qwen, tmp_path / "model", heads)
    problem = value_head_problem(folder)
    assert problem is not None
    assert (problem.code, problem.key) == ("value-head", "critic.model.path")
    assert why in str(problem.why)
    with pytest.raises(ConfigError, match=why) as caught:
        build(ValueLm, LmSpec(folder=folder, key="critic.model.path"), ranks.mesh)
    assert caught.value.codes == ("value-head",)


def test_a_model_without_such_a_head_in_transformers_is_refused(
    qwen: Path, ranks: Ranks, tmp_path: Path
) -> None:
    folder = edited(qwen, tmp_path / "model", {})
    (folder / "config.json").write_text(json.dumps({"model_type": "cohere"}))
    with pytest.raises(
        ConfigError, match="AutoModelForSequenceClassification does not know cohere"
    ):
        build(ValueLm, LmSpec(folder=folder), ranks.mesh)


def test_factors_go_into_the_trunk_and_the_head_is_trained_whole(
    qwen: Path, ranks: Ranks
) -> None:
    plain = build(ValueLm, LmSpec(folder=qwen), ranks.mesh)(packed())
    module = build(
        ValueLm, LmSpec(folder=qwen, lora=LoraSpec(rank=2, alpha=4.0)), ranks.mesh
    )
    assert torch.equal(module(packed()), plain)  # they begin as nothing
    trained = {name for name, p in module.lm.named_parameters() if p.requires_grad}
    assert {name for name in trained if not is_factor(name)} == {"score.weight"}
    assert len(trained) == 1 + 2 * 2 * 7  # two blocks of seven linear layers


# ── beside a policy's head ───────────────────────────────────────────────────────────────────────────────────────────


def test_policy_and_value_come_of_one_pass(folder: Path, ranks: Ranks) -> None:
    spec = LmSpec(folder=folder, seed=3)
    module = build(ActorCriticLm, spec, ranks.mesh)
    found = module(packed(), 0.7)
    alone = build(CausalLm, spec, ranks.mesh)(packed(), 0.7)
    assert torch.equal(found.logprobs, alone.logprobs)
    assert torch.equal(found.entropies, alone.entropies)
    torch.testing.assert_close(found.values, build(ValueLm, spec, ranks.mesh)(packed()))
    (found.logprobs.sum() + value_loss(found.values)).backward()
    assert gradients(module).keys() == dict(module.lm.named_parameters()).keys()
    assert float(gradients(module)["score.weight"].norm()) > 0.0


def test_only_the_learner_has_the_value_head(folder: Path, ranks: Ranks) -> None:
    lm = TrainedLm(LmSpec(folder=folder), ranks, ActorCriticLm)
    plain = TrainedLm(LmSpec(folder=folder), ranks)
    assert len(lm.trained_shards()) == len(plain.trained_shards()) + 1
    for names in (
        lambda of: [s.names for s in of.shards()],
        lambda of: [n for n, _ in of.whole_weights()],
    ):
        assert names(lm) == names(plain)
    held = [sum(t.numel() for t in of.weight_tensors()) for of in (lm, plain)]
    assert held[0] - held[1] == HIDDEN


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (CausalLm, Head.LANGUAGE),
        (ValueLm, Head.SCORE),
        (ActorCriticLm, Head.LANGUAGE_AND_VALUE),
    ],
    ids=["policy", "critic", "both"],
)
def test_every_weight_is_planned(
    folder: Path, ranks: Ranks, kind: type[PackedLm], head: Head
) -> None:
    shape = read_model(json.loads((folder / "config.json").read_text()), head=head)
    weights = [
        p.shape
        for _, p in build(kind, LmSpec(folder=folder), ranks.mesh).lm.named_parameters()
    ]
    assert sorted(weights) == sorted(
        w.shape for w, layers in shape.weights() for _ in range(layers)
    )
