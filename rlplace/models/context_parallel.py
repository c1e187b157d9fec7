"""Context parallelism: several ranks compute the same samples, each for a part of the tokens.

Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv:2309.14509), section 3. All layers but attention work token by token.
Around attention, ranks exchange tokens for heads, so that attention sees whole sequences::

    q k v [1, heads, T / ranks, D] ──▶ [1, heads / ranks, T, D] ──▶ attention ──▶ [1, T / ranks, heads, D]

Each rank scores the tokens whose states it has. Then the scores are gathered, and all ranks compute the same loss; a
rank differentiates the part of its own tokens. So gradients of weights are summed over ranks, as over replicas.

Letters: r ranks, T tokens of all sequences and their padding, H query heads, K key heads, D size of a head.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class ContextParallel:
    """The ranks that compute the same samples, each for a part of the tokens. `group`: their process group."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def part(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of `tokens` [T, ...]: with T tokens and r ranks, T / r of them."""
        return tokens.view(self.size, -1, *tokens.shape[1:])[self.group.rank()]

    def own_count(self, tokens: int, each: int) -> int:
        """Return how many of the first `tokens` tokens this rank has. `each`: the number of tokens of a rank."""
        left = tokens - self.group.rank() * each
        return max(0, min(left, each))

    def own(self, places: Tensor, each: int) -> tuple[Tensor, Tensor]:
        """Return which of the N tokens at `places` this rank has (n of them), as two tensors of indices [n].

        The first has their indices among this rank's tokens, the second their indices in `places`. `places` [N]:
        indices among the tokens of all ranks. `each`: the number of tokens of a rank.
        """
        first = self.group.rank() * each
        last = first + each
        here = (places >= first) & (places < last)
        picks = here.nonzero().squeeze(1)
        own_places = places[picks] - first
        return own_places, picks

    def join(
        self,
        part: Tensor,
        picks: Tensor,
        total: int,
    ) -> Tensor:
        """Return values [total], joined from the values of all ranks. A collective.

        `part` [n]: this rank's values. `picks` [n]: indices of this rank's values in the result.
        """
        return cast(Tensor, _Join.apply(part, picks, total, self.group))

    def by_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of all tokens, for this rank's heads: the exchange before attention.

        A collective. `query` [1, H, T / r, D], `key` and `value` [1, K, T / r, D]: all heads, for this rank's tokens.
        Returns the query [1, H / r, T, D], and key and value [1, max(1, K / r), T, D]. With fewer key heads than ranks,
        several ranks get the same key head. Letters: r ranks, T tokens, H query heads, K key heads, D size of a head.
        """
        # Repeat key heads where there are fewer of them than ranks
        copies = max(1, self.size // key.shape[1])
        if copies > 1:
            key = key.repeat_interleave(copies, dim=1)
            value = value.repeat_interleave(copies, dim=1)
        heads = (query, key, value)
        each = [t.shape[1] // self.size for t in heads]
        tokens, width = query.shape[2:]
        # [r, heads of one rank, T / r, D]: piece i is for rank i; q, k and v in one exchange
        pieces = []
        for tensor, count in zip(heads, each, strict=True):
            pieces.append(tensor.view(self.size, count, tokens, width))
        received = _Exchange.apply(torch.cat(pieces, dim=1), self.group)
        # Pieces hold consecutive tokens: [heads, r, T / r, D] is [heads, T, D]
        mine = received.transpose(0, 1).reshape(1, sum(each), -1, width)
        return cast(tuple[Tensor, Tensor, Tensor], mine.split(each, dim=1))

    def by_tokens(self, attended: Tensor) -> Tensor:
        """Return attended values of all heads, for this rank's tokens: the exchange after attention. A collective.

        `attended` [1, T, H / r, D]: this rank's heads, for all tokens. The result is [1, T / r, H, D]. Letters: r
        ranks, T tokens, H query heads, D size of a head.
        """
        heads, width = attended.shape[2:]
        # Piece i has the tokens of rank i; received pieces have this rank's tokens by heads
        pieces = attended.view(self.size, -1, heads, width)
        received = cast(Tensor, _Exchange.apply(pieces, self.group))
        by_token = received.transpose(0, 1)
        return by_token.reshape(1, -1, self.size * heads, width)


class _Exchange(torch.autograd.Function):
    """All-to-all exchange of `parts` [r, ...] between r ranks.

    Piece i of `parts` goes to rank i; piece i of the result comes from rank i.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _Exchange.apply(gradient, ctx.group)), None


class _Join(torch.autograd.Function):
    """Joins the values of all ranks to a tensor [total]; `picks` of a rank: the indices of its values in this tensor.

    In the backward pass, a rank takes the gradient at its `picks`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        picks: Tensor,
        total: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.picks = picks
        found = part.new_zeros(total)
        found[picks] = part
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient[ctx.picks], None, None, None
