"""Packed sequences, one after the other without padding: attention within each, and the scores of their tokens.

Letters: T tokens of all sequences together, s sequences, N tokens that are scored, H query heads, K key heads, D size
of a head, E size of the hidden states, V of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rlplace.placement.memory.formulas import score_tile
from rlplace.tokens import Files

if TYPE_CHECKING:
    from rlplace.models.context_parallel import ContextParallel
    from rlplace.models.tensor_parallel import TensorParallel

_NAME = "rlplace_packed"


class Edges(NamedTuple):
    """Where segments begin."""

    at: Tensor  # [s + 1] int32; the last is where they end
    longest: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """Whole sequences, and the positions of the tokens to score.

    Sequences that begin alike may share these tokens: then they stand once, in a segment that others continue::

        prompt | answer | answer | sequence of its own         lengths  4  2  3  5
        after                                                            -  0  0  -
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, 0 at the first token of each sequence
    edges: Tensor  # [s + 1] int32, where segments begin; the last is T
    lengths: tuple[int, ...]  # [s], the same for the host
    after: tuple[int | None, ...]  # [s], the segment that each continues
    scored: Tensor  # [N] int64 in 1 .. T - 1, never the first token of a sequence: nothing predicts it
    before: Tensor  # [N] int64, the token before each
    images: tuple[Files, ...] = ()  # [s], of each segment
    # Where ranks have a part of the tokens each: those it has come to attention
    context: ContextParallel | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[NDArray[Any]],
        masks: Sequence[NDArray[np.bool_]],
        device: torch.device | str = "cpu",
        alike: Sequence[tuple[int, int]] = (),
        images: Sequence[Files] = (),
    ) -> Packed:
        """Pack sequences; `masks` are true at tokens to score. Without sequences: one token that is not scored.

        `alike`: of each sequence a number and a length; neighbours of the same number begin with so many tokens alike,
        none of which is scored, and all of whose `images` are in these. Nothing: each stands by itself.
        """
        pieces = list[NDArray[Any]]()
        after = list[int | None]()
        before = list[NDArray[np.int64]]()
        scored = list[NDArray[np.int64]]()
        starts = list[int]()
        seen = list[Files]()
        total = 0

        def add(
            piece: NDArray[Any], start: int, follows: int | None, files: Files = ()
        ) -> int:
            nonlocal total
            pieces.append(piece)
            starts.append(start)
            after.append(follows)
            seen.append(files)
            total += len(piece)
            return total - len(piece)

        given = zip(sequences, masks, images or [()] * len(sequences), strict=True)
        numbered = [
            (*each, alike[i] if alike else (i, 0)) for i, each in enumerate(given)
        ]
        for (_, shared), members in itertools.groupby(numbered, key=lambda one: one[3]):
            group = list(members)
            shared = shared if len(group) > 1 else 0
            prompt = None
            last = -1
            if shared:
                prompt = len(pieces)
                last = add(group[0][0][:shared], 0, None, group[0][2]) + shared - 1
            for tokens, mask, files, _ in group:
                if mask[: max(1, shared)].any():
                    raise ValueError(
                        "the first token of a sequence has no probability: nothing comes before it"
                    )
                if len(tokens) == shared:
                    continue  # nothing of its own
                here = np.flatnonzero(mask[shared:])
                first = add(tokens[shared:], shared, prompt, () if shared else files)
                scored.append(here + first)
                before.append(np.where(here == 0, last, here + first - 1))
        if not pieces:
            add(np.zeros(1, np.int64), 0, None)
        nothing = np.zeros(0, np.int64)
        lengths = tuple(map(len, pieces))

        def tensor(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            tokens=tensor(np.concatenate(pieces)),
            positions=tensor(
                np.concatenate(
                    [np.arange(n) + at for n, at in zip(lengths, starts, strict=True)]
                )
            ),
            edges=tensor(np.cumsum([0, *lengths]), torch.int32),
            lengths=lengths,
            after=tuple(after),
            scored=tensor(np.concatenate([nothing, *scored])),
            before=tensor(np.concatenate([nothing, *before])),
            images=tuple(seen),
        )

    @property
    def targets(self) -> Tensor:
        return self.tokens[self.scored]

    @functools.cached_property
    def keys(self) -> tuple[Tensor, Edges] | None:
        """Return which tokens the segments see, int64, one segment after the other; None where each sees itself."""
        if not any(follows is not None for follows in self.after):
            return None
        own = torch.arange(len(self.tokens)).split(self.lengths)
        seen = [
            part if follows is None else torch.cat((own[follows], part))
            for part, follows in zip(own, self.after, strict=True)
        ]
        lengths = [len(part) for part in seen]
        device = self.tokens.device
        edges = torch.tensor(
            [0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device
        )
        return torch.cat(seen).to(device), Edges(edges, max(lengths))

    def padded(self, multiple: int) -> Packed:
        """Return the same with a last sequence that makes T a multiple; nothing of it is scored."""
        more = -len(self.tokens) % multiple
        if not more:
            return self
        return dataclasses.replace(
            self,
            tokens=functional.pad(self.tokens, (0, more)),
            positions=torch.cat(
                (self.positions, torch.arange(more, device=self.positions.device))
            ),
            edges=functional.pad(self.edges, (0, 1), value=len(self.tokens) + more),
            lengths=(*self.lengths, more),
            after=(*self.after, None),
        )


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────────


def attend_packed(model: PreTrainedModel) -> None:
    """Make the decoder `model(..., packed=...)` attend within each sequence alone. ValueError where it cannot."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} does not let its attention be replaced"
        )
    AttentionInterface.register(_NAME, attention)
    # The edges of the sequences define it
    AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
    model.config._attn_implementation = _NAME


def attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, D]
    attention_mask: None,
    *,
    packed: Packed,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return [1, T, H, D]; the signature is that of attention functions in transformers."""
    if softcap is not None or s_aux is not None or dropout:
        raise ValueError(
            f"{type(module).__name__} wants capped scores, sinks or dropout: packed attention has none"
        )
    # Which hands it to masks alone
    if getattr(getattr(module, "config", None), "model_type", "") == "qwen2_moe":
        sliding_window = getattr(module, "sliding_window", None)
    if packed.context is None:
        return _attention(query, key, value, packed, scaling, sliding_window), None
    exchanged = packed.context.by_heads(query, key, value)
    return packed.context.by_tokens(
        _attention(*exchanged, packed, scaling, sliding_window)
    ), None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Packed,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    # All segments by one kernel
    if query.is_cuda and query.dtype in (
        torch.bfloat16,
        torch.float16,
    ):
        # [T, heads, D]
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        own = seen = Edges(packed.edges, max(packed.lengths))
        if packed.keys is not None:
            places, seen = packed.keys
            k = k[places]
            v = v[places]
        limits = (-1 if sliding_window is None else sliding_window - 1, 0)
        return _whole_kernel(q, k, v, own, seen, scaling, limits).unsqueeze(0)
    groups = query.shape[1] // key.shape[1]
    attended = list[Tensor]()
    if query.is_cuda and groups > 1:
        # The one kernel for float32 that keeps no scores, [heads, T, T], wants as many key heads.
        key, value = (of.repeat_interleave(groups, dim=1) for of in (key, value))
        groups = 1
    attend = functools.partial(
        functional.scaled_dot_product_attention, scale=scaling, enable_gqa=groups > 1
    )
    parts = [tensor.split(packed.lengths, dim=2) for tensor in (query, key, value)]
    continued = any(follows is not None for follows in packed.after)
    for q, k, v, follows in zip(*parts, packed.after, strict=True):
        own = q.shape[2]
        first = 0
        if follows is not None:
            k, v = (
                torch.cat((of[follows], more), dim=2)
                for of, more in zip(parts[1:], (k, v), strict=True)
            )
            first = packed.lengths[follows]
        elif continued:  # a view would keep what is copied above
            q = q.clone()
            k = k.clone()
            v = v.clone()
        length = first + own
        mask = None
        # [own, length], true where a token sees another
        if sliding_window is not None and length > sliding_window:
            mask = torch.ones(own, length, dtype=torch.bool, device=q.device).tril(
                first
            )
            mask = mask.triu(first + 1 - sliding_window)
        elif first:  # attended whole, which takes no mask, and cut
            q = torch.cat((parts[0][follows], q), dim=2)
        whole = attend(q, k, v, attn_mask=mask, is_causal=mask is None)
        attended.append(whole[:, :, -own:])
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()


def _whole_kernel(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [keys, K, D], as v
    v: Tensor,
    own: Edges,
    seen: Edges,
    scale: float | None,
    limits: tuple[
        int, int
    ],  # how many tokens before and behind itself a token sees; -1: all
) -> Tensor:
    """Return [T, H, D] by FlashAttention, as torch has it.

    The last token of a segment sees all keys of its own, the one before it all but the last, and so on.
    """
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {}
    if q.shape[1] != k.shape[1] and _asks_for_groups(varlen_attn):
        grouped["enable_gqa"] = True
    attended = varlen_attn(
        *(q, k, v),
        *(own.at, seen.at),
        *(own.longest, seen.longest),
        scale=scale,
        window_size=limits,
        **grouped,
    )
    return cast(Tensor, attended)  # alone, where no auxiliary output is asked for


@functools.cache
def _asks_for_groups(kernel: Callable[..., object]) -> bool:
    """Return whether fewer key heads than query heads have to be announced.

    Since torch 2.12 they have to be. The kernel of torch 2.11 takes them as they are, and has no such argument.
    """
    return "enable_gqa" in inspect.signature(kernel).parameters


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Never of the whole vocabulary for all tokens at once. A tile is R of the N tokens by C of the V entries; its scores
# are made in the forward pass, thrown away and made again in the backward pass. R and C are both large, so that neither
# the head nor its gradient is read again for every few tokens.


class TokenScores(NamedTuple):
    logprobs: Tensor  # [N] float32
    # [N] float32, of the whole distribution that the token was drawn from
    entropies: Tensor


def token_scores(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    tile: tuple[int, int] | None = None,
    parallel: TensorParallel | None = None,
) -> TokenScores:
    """Score `targets` [N] given `hidden` [N, E] before the head [V, E]: float32, from products in the head's dtype.

    `parallel`: ranks that have some rows of the head each. Then a collective, of four numbers for a token; the gradient
    of `hidden` is this rank's part.
    """
    tile = tile or score_tile(len(hidden), *head.shape)
    places = targets if parallel is None else targets - parallel.first_row(head)
    return TokenScores(
        *_TokenScores.apply(hidden, head, places, temperature, tile, parallel)
    )


class _TokenScores(torch.autograd.Function):
    """With z the scores, log p = z - logsumexp(z) and H = -sum p log p:

    d log p_t / d z = [t] - p        dH / d z = -p * (z - sum p z)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        tile: tuple[int, int],
        parallel: TensorParallel | None,
    ) -> tuple[Tensor, Tensor]:
        normalisers, means, chosen = (
            hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3)
        )
        for rows in _parts(len(hidden), tile[0]):
            highest = torch.full_like(chosen[rows], -torch.inf)
            total = torch.zeros_like(chosen[rows])
            for entries in _parts(len(head), tile[1]):
                place = targets[rows] - entries.start
                terms = (highest, total, means[rows], chosen[rows])
                highest = _add_tile(
                    hidden[rows], head[entries], place, temperature, *terms
                )
            if parallel is not None:
                now = parallel.reduce_(highest.clone(), dist.ReduceOp.MAX)
                shrink = (highest - now).exp()
                highest = now
                sums = torch.stack((total * shrink, means[rows] * shrink, chosen[rows]))
                total, means[rows], chosen[rows] = parallel.reduce_(sums)
            normalisers[rows] = highest + total.log()
            means[rows] /= total
        ctx.save_for_backward(hidden, head, targets, normalisers, means)
        ctx.temperature = temperature
        ctx.tile = tile
        ctx.set_materialize_grads(False)
        return chosen - normalisers, normalisers - means

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, head, targets, normalisers, means = ctx.saved_tensors
        by_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        by_head = (
            torch.zeros_like(head, dtype=torch.float32)
            if ctx.needs_input_grad[1]
            else None
        )
        for rows in _parts(len(hidden), ctx.tile[0]):
            logprob = None if by_logprob is None else by_logprob[rows].unsqueeze(1)
            entropy = None if by_entropy is None else by_entropy[rows].unsqueeze(1)
            # Itself, where it is float32
            sums = None if by_hidden is None else by_hidden[rows].float()
            for entries in _parts(len(head), ctx.tile[1]):
                places = targets[rows] - entries.start
                terms = (
                    normalisers[rows].unsqueeze(1),
                    means[rows].unsqueeze(1),
                    places.unsqueeze(1),
                )
                by_scores = _tile_gradient(
                    hidden[rows],
                    head[entries],
                    terms,
                    logprob,
                    entropy,
                    ctx.temperature,
                )
                if sums is not None:
                    _add_product(sums, by_scores, head[entries])
                if by_head is not None:
                    _add_product(by_head[entries], by_scores.t(), hidden[rows])
                del by_scores  # before the next tile is made
            if by_hidden is not None and sums is not None:
                by_hidden[rows] = sums
        return (
            by_hidden,
            None if by_head is None else by_head.to(head.dtype),
            None,
            None,
            None,
            None,
        )


def _parts(size: int, each: int) -> Iterator[slice]:
    return (slice(first, first + each) for first in range(0, size, each))


# Functions of their own, so that a tile's tensors are gone before the next one's are made.


def _add_tile(
    hidden: Tensor,
    head: Tensor,
    places: Tensor,  # [R], of the targets among these entries; outside 0 .. C - 1 where they are others
    temperature: float,
    highest: Tensor,  # [R] of the entries so far, as the next three
    total: Tensor,  # of exp(z - highest)
    mean: Tensor,  # of z * exp(z - highest)
    chosen: Tensor,
) -> Tensor:
    """Add a tile to the terms of its rows, in place; return the highest scores so far."""
    scores = _scores(hidden, head, temperature)
    here = (places >= 0) & (places < len(head))
    chosen += (
        scores.gather(1, places.clamp(0, len(head) - 1).unsqueeze(1)).squeeze(1) * here
    )
    now = torch.maximum(highest, scores.amax(dim=1))
    shrink = (highest - now).exp()
    likely = (scores - now.unsqueeze(1)).exp_()
    total.mul_(shrink).add_(likely.sum(dim=1))
    mean.mul_(shrink).add_(likely.mul_(scores).sum(dim=1))
    return now


def _tile_gradient(
    hidden: Tensor,
    head: Tensor,
    terms: tuple[
        Tensor, Tensor, Tensor
    ],  # logsumexp(z), sum p z, places of the targets: [R, 1] each
    by_logprob: Tensor | None,  # [R, 1], as by_entropy
    by_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return [R, C] in the dtype of the head: the gradient by its products, before the temperature."""
    scores, (normaliser, mean, places) = _scores(hidden, head, temperature), terms
    likely = (scores - normaliser).exp_()
    by_scores = (
        likely
        if by_entropy is None
        else scores.sub_(mean).mul_(by_entropy).mul_(likely)
    )
    if by_logprob is not None:
        if by_entropy is None:
            by_scores.mul_(by_logprob)
        else:
            by_scores.addcmul_(likely, by_logprob)
        here = (places >= 0) & (places < len(head))
        by_scores.scatter_add_(1, places.clamp(0, len(head) - 1), -by_logprob * here)
    return by_scores.mul_(-1.0 / temperature).to(head.dtype)


def _scores(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Return [R, C] float32, in new memory."""
    scores = (hidden @ head.t()).float()
    if temperature == 1.0:
        return scores
    return scores.div_(temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, which is float32; the product is in the dtype of both."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right
