"""What the learner computes is what transformers computes, sequence by sequence, on any packing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlplace.errors import ConfigError
from rlplace.models.causal_lm import CausalLm, LmSpec, build
from rlplace.models.packed_attention import Packed
from rlplace.models.token_scores import TokenScores
from rlplace.workers.training.ranks import Ranks

LENGTHS = (17, 2, 40, 9)


def sequences() -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 300, length) for length in LENGTHS]


def pack(chosen: Sequence[NDArray[np.int64]]) -> Packed:
    return Packed.of(chosen, [np.arange(len(s)) > 0 for s in chosen])


def of_transformers(folder: Path, temperature: float = 1.0) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """The model, and log-probabilities and entropies of all sequences, each by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    found, entropies = [], []
    for tokens in map(torch.tensor, sequences()):
        logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1] / temperature, dim=-1)
        found.append(logprobs.gather(1, tokens[1:, None])[:, 0])
        entropies.append(-(logprobs.exp() * logprobs).sum(dim=-1))
    return model, torch.cat(found), torch.cat(entropies)


def loss(scores: TokenScores) -> Tensor:
    """Something uneven over tokens, of both kinds of score."""
    weights = torch.linspace(-1.0, 2.0, len(scores.logprobs))
    return (weights * scores.logprobs + 0.1 * scores.entropies).sum()


def gradients(module: CausalLm) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in module.lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_transformers(folder: Path, ranks: Ranks, temperature: float) -> None:
    _, logprobs, entropies = of_transformers(folder, temperature)
    scores = build(LmSpec(folder=folder), ranks.mesh)(pack(sequences()), temperature)
    torch.testing.assert_close(scores.logprobs, logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropies, entropies, atol=1e-5, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_transformers(folder: Path, ranks: Ranks, checkpointing: bool) -> None:
    model, logprobs, entropies = of_transformers(folder)
    loss(TokenScores(logprobs, entropies)).backward()
    module = build(LmSpec(folder=folder, checkpointing=checkpointing), ranks.mesh)
    loss(module(pack(sequences()))).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    found = gradients(module)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=2e-5, rtol=1e-4)


def test_packing_changes_neither_loss_nor_gradient(folder: Path, ranks: Ranks) -> None:
    module = build(LmSpec(folder=folder), ranks.mesh)
    together = module(pack(sequences()))
    apart = [module(pack([s])) for s in sequences()]
    one_by_one = TokenScores(*map(torch.cat, zip(*apart, strict=True)))
    assert abs(loss(one_by_one) / loss(together) - 1.0) < 1e-5


def test_nobody_sees_another_sequence(qwen: Path, ranks: Ranks) -> None:
    module = build(LmSpec(folder=qwen), ranks.mesh)
    first, *others = sequences()
    before = module(pack([first, *others])).logprobs[: len(first) - 1]
    after = module(pack([first, *(other[::-1].copy() for other in others)])).logprobs[: len(first) - 1]
    assert torch.equal(before, after)


def test_only_the_tokens_asked_for_are_scored(qwen: Path, ranks: Ranks) -> None:
    module = build(LmSpec(folder=qwen), ranks.mesh)
    everything = module(pack(sequences())).logprobs
    asked = [np.arange(len(s)) % 3 == 1 for s in sequences()]
    some = module(Packed.of(sequences(), asked)).logprobs
    torch.testing.assert_close(some, everything[np.concatenate([mask[1:] for mask in asked])])


def test_tied_weights_stay_tied(folder: Path, ranks: Ranks) -> None:
    module = build(LmSpec(folder=folder), ranks.mesh)
    tied = module.lm.get_input_embeddings().weight is module.lm.get_output_embeddings().weight
    assert tied == ("lm_head.weight" not in load_file(folder / "model.safetensors"))


def test_half_precision_computes_near_it(qwen: Path, ranks: Ranks) -> None:
    _, logprobs, _ = of_transformers(qwen)
    module = build(LmSpec(folder=qwen, compute="bf16"), ranks.mesh)
    scores = module(pack(sequences()))
    torch.testing.assert_close(scores.logprobs, logprobs, atol=0.2, rtol=0)
    loss(scores).backward()
    assert {p.dtype for p in module.parameters()} == {g.dtype for g in gradients(module).values()} == {torch.float32}


def edited(folder: Path, copy: Path, change: dict[str, Tensor | None]) -> Path:
    """A copy of a model with some weights replaced or left out."""
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = load_file(folder / "model.safetensors") | change
    save_file({name: w for name, w in weights.items() if w is not None}, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "have no weight model.norm.weight"), (torch.zeros(3), r"model.norm.weight is \[3\] there, \[64\] in")],
    ids=["missing", "of another shape"],
)
def test_files_of_another_model_are_refused(
    qwen: Path, ranks: Ranks, tmp_path: Path, value: Tensor | None, said: str
) -> None:
    folder = edited(qwen, tmp_path / "model", {"model.norm.weight": value})
    with pytest.raises(ConfigError, match=said) as caught:
        build(LmSpec(folder=folder), ranks.mesh)
    assert caught.value.codes == ("model-weights",)


def test_a_folder_without_weights_is_refused(qwen: Path, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((qwen / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="it has neither") as caught:
        build(LmSpec(folder=tmp_path), ranks.mesh)
    assert caught.value.codes == ("model-weights",)


def test_weights_in_half_precision_are_read_as_they_are_trained(qwen: Path, ranks: Ranks, tmp_path: Path) -> None:
    halves = {name: w.bfloat16() for name, w in load_file(qwen / "model.safetensors").items()}
    spec = LmSpec(folder=edited(qwen, tmp_path / "halves", dict(halves)))
    for weights, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        module = build(dataclasses.replace(spec, weights=weights), ranks.mesh)
        norm = dict(module.named_tensors())["model.norm.weight"].full_tensor()
        assert norm.dtype == dtype
        assert torch.equal(norm, halves["model.norm.weight"].to(dtype))


def test_nothing_is_dropped_out(qwen: Path, ranks: Ranks, tmp_path: Path) -> None:
    folder = edited(qwen, tmp_path / "model", {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    module = build(LmSpec(folder=folder), ranks.mesh)
    assert module.training
    assert torch.equal(module(pack(sequences())).logprobs, module(pack(sequences())).logprobs)
