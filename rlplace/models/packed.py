"""Packed sequences, one after the other without padding: attention within each sequence, and scores of tokens.

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

from rlplace.models.routers import FREE
from rlplace.placement.memory.formulas import score_tile
from rlplace.tokens import Files, Routes

if TYPE_CHECKING:
    from rlplace.models.context_parallel import ContextParallel
    from rlplace.models.tensor_parallel import TensorParallel

_NAME = "rlplace_packed"


class Edges(NamedTuple):
    """Where the segments of a packed tensor begin.

    `at` [segments + 1] int32: index of the first token of each segment, and the end of the last segment. `longest`:
    number of tokens of the longest segment.
    """

    at: Tensor  # [s + 1] int32: first token of each segment, and the end of the last
    longest: int  # tokens of the longest segment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """Whole sequences in one tensor without padding, and the positions of the tokens to score.

    Sequences may share a common beginning. The beginning is then stored once, as a segment that other segments
    continue::

        prompt | answer | answer | sequence of its own         lengths  4  2  3  5
        after                                                            -  0  0  -

    For T tokens in s segments, N of them scored: `tokens` [T]: ids. `positions` [T]: position of each token in its
    sequence. `edges` [s + 1]: where segments begin, and T. `lengths`: lengths of the segments. `after`: for each
    segment, the index of the segment that it continues, or None. `scored` [N]: indices of the scored tokens. `before`
    [N]: index of the token before each scored token. `images`: image files of each segment. `context`: the ranks that
    split the tokens; None: the tokens are not split. `routes` [T, routers, k]: the experts that each router shall take
    for each token, see `routers`; None: routers choose.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, 0 at the first token of each sequence
    edges: Tensor  # [s + 1] int32, where segments begin; the last is T
    lengths: tuple[int, ...]  # [s], lengths of the segments, on the host
    after: tuple[int | None, ...]  # [s], the segment that each continues, or None
    # [N] int64 in 1 .. T - 1; never the first token of a sequence, which nothing predicts
    scored: Tensor
    before: Tensor  # [N] int64, the token before each scored one
    images: tuple[Files, ...] = ()  # [s], image files of each segment
    # Ranks that split the tokens; they exchange them around attention
    context: ContextParallel | None = None
    # [T, routers, k] int8 or int16; FREE where the router chooses
    routes: Tensor | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[NDArray[Any]],
        masks: Sequence[NDArray[np.bool_]],
        device: torch.device | str = "cpu",
        alike: Sequence[tuple[int, int]] = (),
        images: Sequence[Files] = (),
        parts: Sequence[Sequence[int]] = (),
        routes: Sequence[Routes | None] = (),
    ) -> Packed:
        """Return `sequences`, packed. Without sequences, the result has one token, which is not scored.

        `masks`: for each sequence, true at the tokens to score. `alike`: for each sequence, (number of its group,
        length of the common beginning): neighbouring sequences of the same group begin with that many equal tokens.
        None of these tokens is scored, and all image tokens are among these tokens. An empty `alike`: no tokens are
        shared. `images`: the image files of each sequence; empty: no images. `parts`: for each sequence, the lengths of
        its parts, which do not see each other; empty: the sequence is one part. An empty `parts`: all sequences are. A
        common beginning and images are in the first part. `routes`: for each sequence, the experts of its tokens
        [tokens, routers, k], equal in a common beginning; None: routers choose. An empty `routes`: they always choose.
        """
        # One entry for each segment, and for each piece of scored tokens
        pieces = list[NDArray[Any]]()
        after = list[int | None]()
        before = list[NDArray[np.int64]]()
        scored = list[NDArray[np.int64]]()
        starts = list[int]()
        seen = list[Files]()
        ways = list[Routes | None]()
        total = 0

        def add(
            sequence: _Sequence,
            first: int,
            stop: int,
            start: int,
            follows: int | None,
            files: Files = (),
        ) -> int:
            """Append a segment; return the index of its first token in the packed tensor.

            `sequence`: the sequence that has it. `first`, `stop`: its first token in the sequence, and the one behind
            it. `start`: position of its first token. `follows`: index of the segment that it continues; None: it
            continues no segment. `files`: its image files.
            """
            nonlocal total
            pieces.append(sequence.tokens[first:stop])
            chosen = sequence.routes
            ways.append(None if chosen is None else chosen[first:stop])
            starts.append(start)
            after.append(follows)
            seen.append(files)
            total += stop - first
            return total - (stop - first)

        # Each sequence with its mask, its images, and the (number, length) of its shared beginning
        given = list[_Sequence]()
        for i, (tokens, mask) in enumerate(zip(sequences, masks, strict=True)):
            given.append(
                _Sequence(
                    tokens=tokens,
                    mask=mask,
                    files=images[i] if images else (),
                    parts=parts[i] if parts else (),
                    routes=routes[i] if routes else None,
                    alike=alike[i] if alike else (i, 0),
                )
            )
        for (_, shared), members in itertools.groupby(given, key=lambda s: s.alike):
            group = list(members)
            # A beginning that only one sequence has is no segment of its own
            shared = shared if len(group) > 1 else 0
            prompt = None
            last = -1
            if shared:
                prompt = len(pieces)
                last = add(group[0], 0, shared, 0, None, group[0].files) + shared - 1
            for each in group:
                mask = each.mask
                stops = [*itertools.accumulate(each.parts or [len(each.tokens)])]
                starts_of_parts = [0, *stops[:-1]]
                unscored = [max(1, shared), *(at + 1 for at in stops[:-1])]
                for start, least in zip(starts_of_parts, unscored, strict=True):
                    if mask[start:least].any():
                        raise ValueError(
                            "the first token of a sequence has no probability: nothing comes before it"
                        )
                # A sequence may consist of the shared beginning alone
                if stops[0] > shared:
                    own_files = () if shared else each.files
                    first = add(each, shared, stops[0], shared, prompt, own_files)
                    # Before a segment's first token stands the last shared one
                    here = np.flatnonzero(mask[shared : stops[0]])
                    scored.append(here + first)
                    before.append(np.where(here == 0, last, here + first - 1))
                for start, stop in itertools.pairwise(stops):
                    first = add(each, start, stop, 0, None)
                    here = np.flatnonzero(mask[start:stop])
                    scored.append(here + first)
                    before.append(here + first - 1)
        if not pieces:
            filler = np.zeros(1, np.int64)
            add(_Sequence(tokens=filler, mask=filler > 0), 0, 1, 0, None)
        nothing = np.zeros(0, np.int64)
        lengths = tuple(map(len, pieces))
        positions = []
        for length, start in zip(lengths, starts, strict=True):
            positions.append(np.arange(length) + start)

        def tensor(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            tokens=tensor(np.concatenate(pieces)),
            positions=tensor(np.concatenate(positions)),
            edges=tensor(np.cumsum([0, *lengths]), torch.int32),
            lengths=lengths,
            after=tuple(after),
            scored=tensor(np.concatenate([nothing, *scored])),
            before=tensor(np.concatenate([nothing, *before])),
            images=tuple(seen),
            routes=_joined_routes(ways, lengths, device),
        )

    @property
    def targets(self) -> Tensor:
        """Ids of the N tokens that are scored, [N]."""
        return self.tokens[self.scored]

    @functools.cached_property
    def keys(self) -> tuple[Tensor, Edges] | None:
        """The indices of the tokens that each segment sees, one segment after the other, and the edges of these lists.

        A segment sees itself and the segment that it continues. None if every segment sees only itself.
        """
        if not any(follows is not None for follows in self.after):
            return None
        # A continued segment sees the segment before it, and itself
        own = torch.arange(len(self.tokens)).split(self.lengths)
        seen = []
        for part, follows in zip(own, self.after, strict=True):
            if follows is not None:
                part = torch.cat((own[follows], part))
            seen.append(part)
        lengths = [len(part) for part in seen]
        device = self.tokens.device
        edges = torch.tensor(
            [0, *itertools.accumulate(lengths)],
            dtype=torch.int32,
            device=device,
        )
        return torch.cat(seen).to(device), Edges(edges, max(lengths))

    def padded(self, multiple: int) -> Packed:
        """Return these sequences with filler tokens at the end, so that the token count is a multiple of `multiple`.

        The filler tokens are a sequence of their own, and none of them is scored. If the token count is already a
        multiple of `multiple`, return these sequences unchanged.
        """
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
            routes=self._padded_routes(more),
        )

    def _padded_routes(self, more: int) -> Tensor | None:
        """Return the routes with `more` filler tokens at the end, for which routers choose; None without routes."""
        if self.routes is None:
            return None
        return functional.pad(self.routes, (0, 0, 0, 0, 0, more), value=FREE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """A sequence to be packed: its tokens, the arguments of `Packed.of` for it, and its (group, shared beginning)."""

    tokens: NDArray[Any]
    mask: NDArray[np.bool_]
    files: Files = ()
    parts: Sequence[int] = ()
    routes: Routes | None = None
    alike: tuple[int, int] = (0, 0)


def _joined_routes(
    routes: Sequence[Routes | None],
    lengths: Sequence[int],
    device: torch.device | str,
) -> Tensor | None:
    """Return the routes of all segments, one after the other, [T, routers, k]; None if no segment has routes.

    In a segment without routes, routers choose. `lengths`: tokens of each segment.
    """
    known = [each for each in routes if each is not None]
    if not known:
        return None
    shape = known[0].shape[1:]
    found = []
    for each, length in zip(routes, lengths, strict=True):
        if each is None:
            each = np.full((length, *shape), FREE, known[0].dtype)
        found.append(each)
    return torch.tensor(np.concatenate(found), device=device)


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────────


def attend_packed(model: PreTrainedModel) -> None:
    """Make the attention of a decoder stay within each sequence, when the decoder is called with `packed=...`.

    Raises ValueError if the decoder's attention cannot be replaced.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} does not let its attention be replaced"
        )
    AttentionInterface.register(_NAME, attention)
    # No mask: the edges of the sequences define which tokens see each other
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
    """Return the attended values [1, T, H, D], and None in place of attention weights.

    The signature is the one that transformers expects of an attention function. Letters: T tokens, H query heads, D
    size of a head.
    """
    if softcap is not None or s_aux is not None or dropout:
        raise ValueError(
            f"{type(module).__name__} wants capped scores, sinks or dropout: packed attention has none"
        )
    # Qwen2-MoE gives its window to masks only, not to attention
    if getattr(getattr(module, "config", None), "model_type", "") == "qwen2_moe":
        sliding_window = getattr(module, "sliding_window", None)
    if packed.context is None:
        return _attention(query, key, value, packed, scaling, sliding_window), None
    # Context parallelism: exchange tokens for heads, attend to whole sequences, exchange back
    exchanged = packed.context.by_heads(query, key, value)
    attended = _attention(*exchanged, packed, scaling, sliding_window)
    return packed.context.by_tokens(attended), None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Packed,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Return the attended values [1, T, H, D] of whole sequences: T tokens, H query heads, D size of a head.

    `scaling`: factor of the scores; None: the usual 1 / sqrt(D). `sliding_window`: the most tokens that a token sees,
    itself included; None: all tokens. On CUDA below float32 one kernel attends in all segments; otherwise each segment
    has a call of its own.
    """
    # On CUDA below float32: all segments in one call
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        # [T, heads, D]
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        own = seen = Edges(packed.edges, max(packed.lengths))
        if packed.keys is not None:
            places, seen = packed.keys
            k = k[places]
            v = v[places]
        # Tokens seen before and behind a token; a window counts the token itself
        window = -1 if sliding_window is None else sliding_window - 1
        limits = (window, 0)
        return _whole_kernel(q, k, v, own, seen, scaling, limits).unsqueeze(0)
    groups = query.shape[1] // key.shape[1]
    attended = list[Tensor]()
    if query.is_cuda and groups > 1:
        # The only float32 kernel that does not store scores [heads, T, T] needs as many key heads
        key, value = (of.repeat_interleave(groups, dim=1) for of in (key, value))
        groups = 1
    attend = functools.partial(
        functional.scaled_dot_product_attention,
        scale=scaling,
        enable_gqa=groups > 1,
    )
    # One call for each segment
    parts = [tensor.split(packed.lengths, dim=2) for tensor in (query, key, value)]
    continued = any(follows is not None for follows in packed.after)
    for q, k, v, follows in zip(*parts, packed.after, strict=True):
        # A continued segment attends to the one before it, too
        own = q.shape[2]
        first = 0
        if follows is not None:
            k = torch.cat((parts[1][follows], k), dim=2)
            v = torch.cat((parts[2][follows], v), dim=2)
            first = packed.lengths[follows]
        elif continued:
            # As views they would keep the whole tensors alive for the backward pass
            q = q.clone()
            k = k.clone()
            v = v.clone()
        length = first + own
        mask = None
        # [own, length], true where a token sees another
        if sliding_window is not None and length > sliding_window:
            seen_before = torch.ones(own, length, dtype=torch.bool, device=q.device)
            mask = seen_before.tril(first).triu(first + 1 - sliding_window)
        elif first:
            # Attend for the whole sequence, which needs no mask, and keep the end
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
    # Tokens that a token sees before and behind itself; -1: all
    limits: tuple[int, int],
) -> Tensor:
    """Return the attended values [T tokens, H heads, D numbers of a head] of all segments, computed by FlashAttention
    in torch.

    `q` [T, H, D]: queries. `k`, `v`: keys and values. `own`: the edges of segments in `q`. `seen`: the edges of the
    keys that each segment sees in `k` and `v`. `scale`: factor of the scores; None: 1 / sqrt(D). `limits`: the most
    tokens that a token sees before and after itself; -1: all. The last token of a segment sees all of the segment's
    keys, the token before it all but the last key, and so on, within `limits`.
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
    # The result is a plain tensor, since no auxiliary output is asked for
    return cast(Tensor, attended)


@functools.cache
def _asks_for_groups(kernel: Callable[..., object]) -> bool:
    """Return whether an attention kernel must be told that there are fewer key heads than query heads.

    The kernel of torch 2.12 must be told. The kernel of torch 2.11 accepts fewer key heads without an argument.
    """
    return "enable_gqa" in inspect.signature(kernel).parameters


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Scores are never made for all tokens and the whole vocabulary at once. A tile is R of the N tokens by C of the V
# entries. Its scores are computed in the forward pass, dropped, and computed again in the backward pass. R and C are
# both large, so that the head and its gradient are not read again for every few tokens.


class TokenScores(NamedTuple):
    """Log-probabilities of N given tokens, and entropies of the distributions they were drawn from, [N] each.

    `likeliest`: log-probability of the likeliest token at the place of each given token, without a gradient. A given
    token is the likeliest one if both log-probabilities are equal.
    """

    logprobs: Tensor  # [N] float32
    entropies: Tensor  # [N] float32
    likeliest: Tensor  # [N] float32


def token_scores(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    tile: tuple[int, int] | None = None,
    parallel: TensorParallel | None = None,
) -> TokenScores:
    """Return the scores of N `targets` [N].

    `hidden` [N, E]: the states before the tokens, of size E. `head` [V, E]: the head's weight, for V entries of the
    vocabulary. `temperature`: divides the logits. `tile`: (R, C), rows and vocabulary entries that are computed at
    once; None: chosen by size. `parallel`: the ranks among which the rows of the head are divided; None: this rank has
    all rows. With `parallel` the call is a collective with four numbers for each token, and the gradient of `hidden` is
    this rank's part. The result is float32, from products in the head's dtype.
    """
    tile = tile or score_tile(len(hidden), *head.shape)
    # The index of a target among this rank's rows; outside of them on other ranks
    places = targets
    if parallel is not None:
        places = targets - parallel.first_row(head)
    scores = _TokenScores.apply(hidden, head, places, temperature, tile, parallel)
    return TokenScores(*scores)


class _TokenScores(torch.autograd.Function):
    """Log-probabilities and entropies, with a backward pass that computes tiles of logits again.

    With logits z: log p = z - logsumexp(z) and H = -sum p log p. The gradients are

    d log p_t / d z = [t] - p,

    dH / d z = -p * (z - sum p z).
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        # [N] each: logsumexp(z), sum p z, z of the target, and the highest z
        normalisers = hidden.new_zeros(len(hidden), dtype=torch.float32)
        means = torch.zeros_like(normalisers)
        chosen = torch.zeros_like(normalisers)
        best = torch.zeros_like(normalisers)
        for rows in _parts(len(hidden), tile[0]):
            highest = torch.full_like(chosen[rows], -torch.inf)
            total = torch.zeros_like(chosen[rows])
            # Sums over the vocabulary, tile by tile, scaled by the highest logit so far
            for entries in _parts(len(head), tile[1]):
                place = targets[rows] - entries.start
                terms = (highest, total, means[rows], chosen[rows])
                highest = _add_tile(
                    hidden[rows],
                    head[entries],
                    place,
                    temperature,
                    *terms,
                )
            # Join the sums of all ranks: scale them to the highest logit of all
            if parallel is not None:
                now = parallel.reduce_(highest.clone(), dist.ReduceOp.MAX)
                shrink = (highest - now).exp()
                highest = now
                sums = torch.stack((total * shrink, means[rows] * shrink, chosen[rows]))
                total, means[rows], chosen[rows] = parallel.reduce_(sums)
            # From scaled sums to logsumexp(z) and the mean of z
            normalisers[rows] = highest + total.log()
            means[rows] /= total
            best[rows] = highest
        ctx.save_for_backward(hidden, head, targets, normalisers, means)
        ctx.temperature = temperature
        ctx.tile = tile
        ctx.set_materialize_grads(False)
        likeliest = best - normalisers
        ctx.mark_non_differentiable(likeliest)
        return chosen - normalisers, normalisers - means, likeliest

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        by_logprob: Tensor | None,
        by_entropy: Tensor | None,
        _: None,
    ) -> tuple[Tensor | None, ...]:
        hidden, head, targets, normalisers, means = ctx.saved_tensors
        # A gradient that is not needed is not computed
        by_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        by_head = (
            torch.zeros_like(head, dtype=torch.float32)
            if ctx.needs_input_grad[1]
            else None
        )
        for rows in _parts(len(hidden), ctx.tile[0]):
            logprob = None if by_logprob is None else by_logprob[rows].unsqueeze(1)
            entropy = None if by_entropy is None else by_entropy[rows].unsqueeze(1)
            # For a float32 model this is a view of `by_hidden` itself
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
                # Free the tile before the next one is made
                del by_scores
            if by_hidden is not None and sums is not None:
                by_hidden[rows] = sums
        in_dtype = None if by_head is None else by_head.to(head.dtype)
        return by_hidden, in_dtype, None, None, None, None


def _parts(size: int, each: int) -> Iterator[slice]:
    """Return consecutive slices of `each` elements that together cover `size` elements."""
    return (slice(first, first + each) for first in range(0, size, each))


# These are functions so that a tile's tensors are freed before those of the next tile are made.


def _add_tile(
    hidden: Tensor,
    head: Tensor,
    places: Tensor,  # [R], indices of the targets among these C entries; others are outside 0 .. C - 1
    temperature: float,
    highest: Tensor,  # [R], highest logit so far
    total: Tensor,  # [R], sum of exp(z - highest) so far
    mean: Tensor,  # [R], sum of z * exp(z - highest) so far
    chosen: Tensor,  # [R], logit of the target, 0 so far
) -> Tensor:
    """Add the logits of a tile to the running sums, in place, and return the highest logit so far of each row, [R].

    A tile is R tokens by C entries of the vocabulary. `hidden` [R, E]: states of the tokens, of size E. `head` [C, E]:
    rows of the head. `places` [R]: indices of the target tokens among the C entries. `temperature`: divides the logits.
    `highest` [R]: highest logits before this tile. With logits z: `total` is the sum of exp(z - highest), `mean` the
    sum of z * exp(z - highest), `chosen` the logit of the target token.
    """
    scores = _scores(hidden, head, temperature)
    here = (places >= 0) & (places < len(head))
    # Logits of targets in this tile; others add zero
    targets = places.clamp(0, len(head) - 1).unsqueeze(1)
    chosen += scores.gather(1, targets).squeeze(1) * here
    # Rescale the sums to the new highest logit before adding
    now = torch.maximum(highest, scores.amax(dim=1))
    shrink = (highest - now).exp()
    likely = (scores - now.unsqueeze(1)).exp_()
    total.mul_(shrink).add_(likely.sum(dim=1))
    mean.mul_(shrink).add_(likely.mul_(scores).sum(dim=1))
    return now


def _tile_gradient(
    hidden: Tensor,
    head: Tensor,
    # logsumexp(z), sum p z, indices of the targets: [R, 1] each
    terms: tuple[Tensor, Tensor, Tensor],
    by_logprob: Tensor | None,  # [R, 1], as by_entropy
    by_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return the gradient [R, C] with respect to the products of states and head, for R tokens and C entries of the
    vocabulary.

    The result is in the head's dtype. `hidden`: states [R, E], of size E. `head`: rows of the head [C, E]. `terms`:
    logsumexp of the logits, mean logit, and index of the target token, [R, 1] each. `by_logprob`, `by_entropy`: the
    gradients with respect to log-probabilities and entropies; None: zero. `temperature`: divides the logits.
    """
    scores = _scores(hidden, head, temperature)
    normaliser, mean, places = terms
    likely = (scores - normaliser).exp_()
    # By the entropy: -p * (z - sum p z); the signs of both parts are inverted until the end
    by_scores = likely
    if by_entropy is not None:
        by_scores = scores.sub_(mean).mul_(by_entropy).mul_(likely)
    # By the log-probability: [target] - p
    if by_logprob is not None:
        if by_entropy is None:
            by_scores.mul_(by_logprob)
        else:
            by_scores.addcmul_(likely, by_logprob)
        here = (places >= 0) & (places < len(head))
        by_scores.scatter_add_(1, places.clamp(0, len(head) - 1), -by_logprob * here)
    return by_scores.mul_(-1.0 / temperature).to(head.dtype)


def _scores(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Return the logits [R, C] float32 of R tokens for C entries of the vocabulary, as a new tensor.

    `hidden`: states [R, E], of size E. `head`: rows of the head [C, E]. `temperature`: divides the logits.
    """
    scores = (hidden @ head.t()).float()
    if temperature == 1.0:
        return scores
    return scores.div_(temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total` (float32), in place. The product is computed in the dtype of `left` and `right`."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right
