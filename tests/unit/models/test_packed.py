"""Sequences side by side: nothing is padded, none sees the tokens of another; scores in chunks are those at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch.nn import functional
from transformers import MistralConfig, MistralModel

from rlplace.algo.packing import SampleSizes
from rlplace.models.packed import (
    Edges,
    Packed,
    _whole_kernel,
    attend_packed,
    attention,
    token_scores,
)
from rlplace.placement.memory.model import read_model

LENGTHS = (3, 1, 6)
TOKENS, HIDDEN, VOCABULARY = 7, 5, 11


def packed(lengths: tuple[int, ...] = LENGTHS) -> Packed:
    return Packed.of(
        [np.arange(n) + 10 * i for i, n in enumerate(lengths)],
        [np.arange(n) > 1 for n in lengths],
    )


def heads(
    lengths: tuple[int, ...] = LENGTHS, queries: int = 4, keys: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(
        torch.randn(1, n, sum(lengths), 8, generator=generator)
        for n in (queries, keys, keys)
    )


def alone(
    query: Tensor, key: Tensor, value: Tensor, window: int | None = None
) -> Tensor:
    """Textbook attention of one sequence: [1, T, H, D]."""
    key, value = (
        t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value)
    )
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    hidden = (distance < 0) | (distance >= (window or query.shape[2]))
    return (scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ value).transpose(
        1, 2
    )


def test_a_first_token_cannot_be_scored() -> None:
    with pytest.raises(ValueError, match="nothing comes before it"):
        Packed.of([np.arange(3), np.arange(2)], [np.zeros(3, bool), np.ones(2, bool)])
    with pytest.raises(
        ValueError, match="nothing comes before it"
    ):  # nor one that others share
        Packed.of(
            [np.arange(4)] * 2,
            [np.arange(4) > 2, np.arange(4) > 1],
            alike=[(0, 3), (0, 3)],
        )


@pytest.mark.parametrize(
    "sequences", [[], [np.zeros(0, np.int32)]], ids=["none", "an empty one"]
)
def test_nothing_is_one_token_that_is_not_scored(sequences: list[np.ndarray]) -> None:
    batch = Packed.of(sequences, [np.zeros(len(s), bool) for s in sequences])
    assert (batch.lengths, batch.targets.tolist()) == ((1,), [])


def test_parts_of_a_sequence_do_not_see_each_other() -> None:
    long, short = np.array([5, 6, 7, 8, 5, 6, 9, 4]), np.array([5, 6, 3])
    masks = [np.isin(long, [7, 8, 9]), short == 3]
    alike = [(0, 2), (0, 2)]
    batch = Packed.of([long, short], masks, alike=alike, parts=[(4, 4), ()])
    assert batch.tokens.tolist() == [5, 6, 7, 8, 5, 6, 9, 4, 3]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 2]
    assert (batch.lengths, batch.after) == ((2, 2, 4, 1), (None, 0, None, 0))
    assert batch.targets.tolist() == [7, 8, 9, 3]
    assert batch.before.tolist() == [1, 2, 5, 1]
    # Without a common beginning, it is as if each part were a sequence
    alone = Packed.of([long[:4], long[4:]], [masks[0][:4], masks[0][4:]])
    parted = Packed.of([long], masks[:1], parts=[(4, 4)])
    for name in ("tokens", "positions", "edges", "scored", "before"):
        assert getattr(parted, name).tolist() == getattr(alone, name).tolist()
    with pytest.raises(ValueError, match="nothing comes before it"):
        Packed.of([long], [long == 5], parts=[(4, 4)])
    with pytest.raises(ValueError, match="nothing comes before it"):
        Packed.of([long], [np.arange(8) == 4], parts=[(4, 4)])


@pytest.mark.parametrize("window", [None, 2, 50])
@pytest.mark.parametrize(
    "keys", [4, 2], ids=["every head its keys", "heads share keys"]
)
def test_each_sequence_is_attended_alone(window: int | None, keys: int) -> None:
    batch, whole = packed(), heads(keys=keys)
    result, _ = attention(
        nn.Module(), *whole, None, packed=batch, scaling=8**-0.5, sliding_window=window
    )
    pieces = (t.split(LENGTHS, dim=2) for t in whole)
    expected = torch.cat(
        [alone(*piece, window=window) for piece in zip(*pieces, strict=True)], dim=1
    )
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(("prompt", "answer", "answers"), [(60, 60, 4), (200, 10, 8)])
@pytest.mark.parametrize(
    "width", [16, 64], ids=["queries as wide as states", "four times as wide"]
)
@pytest.mark.parametrize("window", [None, 50])
def test_a_pass_saves_no_more_than_its_size_in_tokens_that_stand_alone(
    window: int | None, width: int, prompt: int, answer: int, answers: int
) -> None:
    config = MistralConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width,
        sliding_window=window,
    )
    trunk = MistralModel(config)
    attend_packed(trunk)
    sequences = [
        np.concatenate([np.arange(prompt), np.arange(answer) + i])
        for i in range(answers)
    ]
    masks = [np.arange(prompt + answer) >= prompt] * answers

    def saved(batch: Packed) -> int:
        held: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: held.setdefault(tensor.untyped_storage().data_ptr(), tensor),
            lambda tensor: tensor,
        ):
            trunk(
                input_ids=batch.tokens[None],
                position_ids=batch.positions[None],
                use_cache=False,
                packed=batch,
            )
        weights = {
            parameter.untyped_storage().data_ptr() for parameter in trunk.parameters()
        }
        return sum(
            tensor.untyped_storage().nbytes()
            for at, tensor in held.items()
            if at not in weights
        )

    again = read_model(config.to_dict()).read_again
    sizes = SampleSizes(
        (prompt + answer,) * answers, (prompt,) * answers, (0,) * answers, again
    )
    alone = saved(Packed.of(sequences, masks)) / sum(sizes.tokens)
    everything = range(answers)
    together = saved(Packed.of(sequences, masks, alike=sizes.alike(everything)))
    assert (
        (0.7 if window is None else 0.5) * sizes.size(everything)
        < together / alone
        <= sizes.size(everything)
    )


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="capped scores"):
        attention(nn.Module(), *heads(), None, packed=packed(), softcap=50.0)


class OnGpu(Tensor):
    """Says that it is there, which decides how it is attended."""

    is_cuda = True


@pytest.mark.parametrize("window", [None, 2])
def test_float32_on_a_gpu_is_attended_by_the_kernel_that_keeps_no_scores(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has one for float32, which wants as many key heads as query heads (sdp_utils.cpp); else it keeps them."""
    asked, attend = (
        list[tuple[int, int, bool]](),
        functional.scaled_dot_product_attention,
    )

    def asking(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        asked.append((q.shape[1], k.shape[1], named["enable_gqa"]))
        return attend(q, k, v, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", asking)
    whole, batch = heads(), packed()
    there = tuple(t.as_subclass(OnGpu) for t in whole)
    result, _ = attention(
        nn.Module(), *there, None, packed=batch, scaling=8**-0.5, sliding_window=window
    )
    assert asked == [(4, 4, False)] * len(LENGTHS)
    expected, _ = attention(
        nn.Module(), *whole, None, packed=batch, scaling=8**-0.5, sliding_window=window
    )
    torch.testing.assert_close(result.as_subclass(Tensor), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 2])
def test_one_kernel_for_all_sequences(window: int | None) -> None:
    whole = tuple(t.cuda().bfloat16() for t in heads())
    batch = Packed.of(
        [np.arange(n) for n in LENGTHS], [np.arange(n) > 1 for n in LENGTHS], "cuda"
    )
    result, _ = attention(
        nn.Module(), *whole, None, packed=batch, scaling=8**-0.5, sliding_window=window
    )
    pieces = (t.float().split(LENGTHS, dim=2) for t in whole)
    with torch.device("cuda"):
        expected = torch.cat(
            [alone(*piece, window=window) for piece in zip(*pieces, strict=True)], dim=1
        )
    torch.testing.assert_close(result.float(), expected, atol=2e-2, rtol=2e-2)


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def kernel_of_torch_2_11(
    q: Tensor, k: Tensor, v: Tensor, *places: Any, scale: Any, window_size: Any
) -> Tensor:
    return q


def kernel_of_torch_2_13(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *places: Any,
    scale: Any,
    window_size: Any,
    enable_gqa: bool = False,
) -> Tensor:
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return q


@pytest.mark.parametrize("kernel", [kernel_of_torch_2_11, kernel_of_torch_2_13])
@pytest.mark.parametrize(
    "keys", [4, 2], ids=["every head its keys", "heads share keys"]
)
def test_shared_keys_are_announced_where_the_kernel_asks(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor], keys: int
) -> None:
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
    batch = packed()
    query, key, value = (part.squeeze(0).transpose(0, 1) for part in heads(keys=keys))
    edges = Edges(batch.edges, max(batch.lengths))
    assert _whole_kernel(query, key, value, edges, edges, None, (-1, 0)) is query


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = (
        torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    )
    return hidden, head, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def plain(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax((hidden @ head.t()).float() / temperature, dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(
        dim=-1
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tile", [(1, 1), (3, 7), (TOKENS, 5), (4, VOCABULARY), None])
def test_tiles_change_nothing(temperature: float, tile: tuple[int, int] | None) -> None:
    hidden, head, targets = inputs(torch.float32)
    scores = token_scores(hidden, head, targets, temperature, tile)
    logprobs, entropies = plain(hidden, head, targets, temperature)
    torch.testing.assert_close(scores.logprobs, logprobs)
    torch.testing.assert_close(scores.entropies, entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "weights",
    [(1.0, 0.0), (0.0, 1.0), (0.6, -0.3)],
    ids=["logprobs", "entropies", "both"],
)
def test_gradients_are_those_of_the_plain_formula(
    temperature: float, weights: tuple[float, float]
) -> None:
    hidden, head, targets = inputs(torch.float32)
    uneven = torch.linspace(-1.0, 1.0, TOKENS)

    def gradients(scores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        used = [
            (weight * uneven * score).sum()
            for weight, score in zip(weights, scores, strict=True)
            if weight
        ]
        return torch.autograd.grad(torch.stack(used).sum(), [hidden, head])

    expected = gradients(plain(hidden, head, targets, temperature))
    torch.testing.assert_close(
        gradients(token_scores(hidden, head, targets, temperature, (2, 7))[:2]),
        expected,
    )


@pytest.mark.parametrize("tile", [(3, 4), None])
def test_the_likeliest_token_is_recognised_exactly(
    tile: tuple[int, int] | None,
) -> None:
    hidden, head, targets = inputs(torch.float32)
    best = (hidden @ head.t()).argmax(dim=1)
    targets = torch.where(torch.arange(TOKENS) % 2 == 0, best, targets)
    scores = token_scores(hidden, head, targets, tile=tile)
    assert (scores.logprobs == scores.likeliest).tolist() == (targets == best).tolist()
    assert not scores.likeliest.requires_grad


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, targets = inputs(torch.float32)
    head.requires_grad_(False)
    token_scores(hidden, head, targets).logprobs.sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_no_token_is_a_loss_of_nothing() -> None:
    hidden, head, targets = inputs(torch.float32)
    token_scores(hidden[:0], head, targets[:0]).logprobs.sum().backward()
    assert head.grad is not None
    assert not head.grad.any()


def test_half_precision_is_summed_in_float32() -> None:
    hidden, head, targets = inputs(torch.bfloat16)
    scores = token_scores(hidden, head, targets)
    logprobs, _ = plain(hidden, head, targets, 1.0)
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs, logprobs)
    scores.logprobs.sum().backward()
    assert hidden.grad is not None
    assert head.grad is not None
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16


def test_large_scores_do_not_overflow() -> None:
    hidden, head, targets = inputs(torch.float32)
    assert torch.stack(token_scores(hidden * 1e4, head, targets)).isfinite().all()
