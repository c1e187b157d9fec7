"""Values are those of transformers' sequence classification, on any packing; the folder is one it reads and writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlplace.errors import ConfigError
from rlplace.models.causal_lm import LmSpec, PackedLm, build
from rlplace.models.heads import value_head_problem
from rlplace.models.lora import LoraSpec, is_factor
from rlplace.models.packed_attention import Packed
from rlplace.models.value_lm import ValueLm, build_actor_critic_lm, build_value_lm, first_head
from rlplace.placement.memory.model import Head, read_model
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedLm

LENGTHS = (17, 2, 40, 9)
HIDDEN = 64


def sequences() -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 300, length) for length in LENGTHS]


def masks() -> list[NDArray[np.bool_]]:
    """Uneven; nothing of the second sequence."""
    return [(np.arange(length) % 3 > 0) & (np.arange(length) > 4) for length in LENGTHS]


def packed() -> Packed:
    return Packed.of(sequences(), masks())


def with_head(folder: Path, copy: Path, heads: dict[str, Tensor]) -> Path:
    """A copy of a model whose files have these heads too."""
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(load_file(folder / "model.safetensors") | heads, copy / "model.safetensors")
    return copy


def of_transformers(folder: Path, head: Tensor) -> tuple[torch.nn.Module, Tensor]:
    """The model, and the values before each learned token, each sequence by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, attn_implementation="eager")
    with torch.no_grad():
        model.score.weight.copy_(head)
    found = []
    for tokens, mask in zip(sequences(), masks(), strict=True):
        states = model.base_model(torch.tensor(tokens)[None]).last_hidden_state
        found.append(model.score(states)[0, :-1, 0][torch.tensor(mask)[1:]])
    return model, torch.cat(found)


def loss(values: Tensor) -> Tensor:
    """Something uneven over tokens."""
    return (torch.linspace(-1.0, 2.0, len(values)) * values).sum()


def test_values_and_gradients_are_those_of_transformers(folder: Path, ranks: Ranks) -> None:
    model, expected = of_transformers(folder, first_head(HIDDEN, 3))
    module = build_value_lm(LmSpec(folder=folder, seed=3), ranks.mesh)
    values = module(packed())
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    loss(expected).backward()
    loss(values).backward()
    found = {name: p.grad.full_tensor() for name, p in module.lm.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-4)


def test_a_value_is_of_the_state_before_its_token(qwen: Path, ranks: Ranks) -> None:
    module = build_value_lm(LmSpec(folder=qwen), ranks.mesh)
    tokens = sequences()[0]
    last = np.arange(len(tokens)) == len(tokens) - 1
    other = np.concatenate([tokens[:-1], [299 if tokens[-1] != 299 else 298]])
    earlier = np.concatenate([tokens[:-2], [299 if tokens[-2] != 299 else 298], tokens[-1:]])
    value, same, moved = (module(Packed.of([t], [last])) for t in (tokens, other, earlier))
    assert torch.equal(value, same)
    assert not torch.equal(value, moved)


def test_no_sequence_has_no_values(qwen: Path, ranks: Ranks) -> None:
    values = build_value_lm(LmSpec(folder=qwen), ranks.mesh)(Packed.of([], []))
    assert values.shape == (0,)
    values.sum().backward()


def test_values_in_half_precision_are_near_it(qwen: Path, ranks: Ranks) -> None:
    head = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(0))
    _, expected = of_transformers(qwen, head)
    module = build_value_lm(LmSpec(folder=qwen, compute="bf16"), ranks.mesh)
    with torch.no_grad():
        module.lm.score.weight.to_local().copy_(head)
    values = module(packed())
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected, atol=0.5, rtol=0.05)


# ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def head_of(module: ValueLm) -> Tensor:
    return dict(module.lm.named_parameters())["score.weight"].full_tensor()


def test_a_new_head_follows_from_the_seed_and_says_little(qwen: Path, ranks: Ranks) -> None:
    heads = [head_of(build_value_lm(LmSpec(folder=qwen, seed=seed), ranks.mesh)) for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert torch.equal(heads[0], first_head(HIDDEN, 0))
    assert float(heads[0].detach().norm()) == pytest.approx(HIDDEN**-0.5, rel=0.3)


@pytest.mark.parametrize("name", ["score.weight", "value_head.weight", "v_head.summary.weight"])
def test_a_head_in_the_folder_is_taken_whatever_it_is_called(
    qwen: Path, ranks: Ranks, tmp_path: Path, name: str
) -> None:
    head = torch.randn(1, HIDDEN)
    folder = with_head(qwen, tmp_path / "model", {name: head})
    assert value_head_problem(folder) is None
    assert torch.equal(head_of(build_value_lm(LmSpec(folder=folder), ranks.mesh)), head)


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ({"score.weight": torch.zeros(3, HIDDEN)}, "score.weight has 3 rows: it tells 3 classes apart"),
        ({"value_head.weight": torch.zeros(1, HIDDEN), "value_head.bias": torch.zeros(1)}, "value_head.bias would be"),
    ],
    ids=["three classes", "a bias"],
)
def test_a_head_that_gives_no_value_is_refused(
    qwen: Path, ranks: Ranks, tmp_path: Path, heads: dict[str, Tensor], said: str
) -> None:
    folder = with_head(qwen, tmp_path / "model", heads)
    problem = value_head_problem(folder)
    assert problem is not None
    assert (problem.code, problem.key) == ("value-head", "critic.model.path")
    assert said in str(problem.why)
    with pytest.raises(ConfigError, match=said) as caught:
        build_value_lm(LmSpec(folder=folder, key="critic.model.path"), ranks.mesh)
    assert caught.value.codes == ("value-head",)


def test_files_of_another_model_are_refused_by_the_key_of_their_folder(
    qwen: Path, ranks: Ranks, tmp_path: Path
) -> None:
    folder = with_head(qwen, tmp_path / "model", {"score.weight": torch.zeros(1, 32)})
    with pytest.raises(ConfigError, match=r"score.weight is \[1, 32\] there, \[1, 64\] in the model") as caught:
        build_value_lm(LmSpec(folder=folder, key="critic.model.path"), ranks.mesh)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == ("model-weights", "critic.model.path")


def test_a_model_without_such_a_head_in_transformers_is_refused(qwen: Path, ranks: Ranks, tmp_path: Path) -> None:
    folder = with_head(qwen, tmp_path / "model", {})
    (folder / "config.json").write_text(json.dumps({"model_type": "cohere"}))
    with pytest.raises(ConfigError, match="AutoModelForSequenceClassification does not know cohere"):
        build_value_lm(LmSpec(folder=folder), ranks.mesh)


def test_factors_go_into_the_trunk_and_the_head_is_trained_whole(qwen: Path, ranks: Ranks) -> None:
    plain = build_value_lm(LmSpec(folder=qwen), ranks.mesh)(packed())
    module = build_value_lm(LmSpec(folder=qwen, lora=LoraSpec(rank=2, alpha=4.0)), ranks.mesh)
    assert torch.equal(module(packed()), plain)  # they begin as nothing
    trained = {name for name, p in module.lm.named_parameters() if p.requires_grad}
    assert {name for name in trained if not is_factor(name)} == {"score.weight"}
    assert len(trained) == 1 + 2 * 2 * 7  # two blocks of seven linear layers


def test_an_unknown_target_is_named_by_the_critics_key(qwen: Path, ranks: Ranks) -> None:
    lora = LoraSpec(rank=2, alpha=4.0, targets=("query",), key="critic.lora_targets")
    with pytest.raises(ConfigError) as caught:
        build_value_lm(LmSpec(folder=qwen, lora=lora), ranks.mesh)
    assert caught.value.problems[0].key == "critic.lora_targets"


# ── beside a policy's head ───────────────────────────────────────────────────────────────────────────────────────────


def test_policy_and_value_come_of_one_pass(folder: Path, ranks: Ranks) -> None:
    spec = LmSpec(folder=folder, seed=3)
    module = build_actor_critic_lm(spec, ranks.mesh)
    found = module(packed(), 0.7)
    alone = build(spec, ranks.mesh)(packed(), 0.7)
    assert torch.equal(found.logprobs, alone.logprobs)
    assert torch.equal(found.entropies, alone.entropies)
    torch.testing.assert_close(found.values, build_value_lm(spec, ranks.mesh)(packed()))
    (found.logprobs.sum() + loss(found.values)).backward()
    gradients = {name: p.grad for name, p in module.lm.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    assert float(gradients["score.weight"].full_tensor().norm()) > 0.0


def test_only_the_learner_has_the_value_head(folder: Path, ranks: Ranks) -> None:
    lm = TrainedLm(LmSpec(folder=folder), ranks, build_actor_critic_lm)
    plain = TrainedLm(LmSpec(folder=folder), ranks)
    assert len(lm.trained_shards()) == len(plain.trained_shards()) + 1
    for names in (lambda of: [s.names for s in of.shards()], lambda of: [n for n, _ in of.whole_weights()]):
        assert names(lm) == names(plain)
    held = [sum(t.numel() for t in of.weight_tensors()) for of in (lm, plain)]
    assert held[0] - held[1] == HIDDEN


@pytest.mark.parametrize(
    ("builder", "head"),
    [(build, Head.LANGUAGE), (build_value_lm, Head.SCORE), (build_actor_critic_lm, Head.LANGUAGE_AND_VALUE)],
    ids=["policy", "critic", "both"],
)
def test_every_weight_is_planned(folder: Path, ranks: Ranks, builder: Callable[..., PackedLm], head: Head) -> None:
    shape = read_model(json.loads((folder / "config.json").read_text()), head=head)
    weights = [p.shape for _, p in builder(LmSpec(folder=folder), ranks.mesh).lm.named_parameters()]
    assert sorted(weights) == sorted(w.shape for w, layers in shape.weights() for _ in range(layers))


def test_beside_factors_the_value_head_is_trained_whole(qwen: Path, ranks: Ranks) -> None:
    lora = LoraSpec(rank=2, alpha=4.0)
    trained = {
        kind: {n for n, p in kind(LmSpec(folder=qwen, lora=lora), ranks.mesh).lm.named_parameters() if p.requires_grad}
        for kind in (build, build_actor_critic_lm)
    }
    assert trained[build_actor_critic_lm] == {*trained[build], "score.weight"}
