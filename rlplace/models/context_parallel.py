"""Context parallelism: several ranks compute the same samples, each a part of their tokens.

Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv:2309.14509), section 3. All but attention goes token by token; around it,
tokens are exchanged for heads, so that sequences are whole where attention sees them::

    q k v [1, heads, T / ranks, D] ──▶ [1, heads / ranks, T, D] ──▶ attention ──▶ [1, T / ranks, heads, D]

A rank scores those tokens whose states it has; then all have the scores of all and compute the same loss, of which each
differentiates its own tokens' part: gradients of weights are sums over ranks, as over copies.

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
    """The ranks that compute the same samples."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.group.size()

    def part(self, tokens: Tensor) -> Tensor:
        """Return this rank's [T / r] of [T]."""
        return tokens.view(self.size, -1)[self.group.rank()]

    def own(self, places: Tensor, each: int) -> tuple[Tensor, Tensor]:
        """Return those of `places` [N] that are among this rank's `each` tokens, counted from its first; and which."""
        first = self.group.rank() * each
        picks = ((places >= first) & (places < first + each)).nonzero().squeeze(1)
        return places[picks] - first, picks

    def join(self, part: Tensor, picks: Tensor, total: int) -> Tensor:
        """Return [total] of all ranks, of which `picks` are this rank's. A collective."""
        return cast(Tensor, _Join.apply(part, picks, total, self.group))

    def by_heads(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return [1, H / r, T, D] and twice [1, max(1, K / r), T, D] of [1, heads, T / r, D]. A collective.

        Of fewer key heads than ranks, several ranks get the same.
        """
        copies = max(1, self.size // key.shape[1])
        heads = (
            query,
            *(
                t.repeat_interleave(copies, dim=1) if copies > 1 else t
                for t in (key, value)
            ),
        )
        each = [t.shape[1] // self.size for t in heads]
        tokens, width = query.shape[2:]
        parts = torch.cat(
            [
                t.view(self.size, n, tokens, width)
                for t, n in zip(heads, each, strict=True)
            ],
            dim=1,
        )
        mine = (
            _Exchange.apply(parts, self.group)
            .transpose(0, 1)
            .reshape(1, sum(each), -1, width)
        )
        return cast(tuple[Tensor, Tensor, Tensor], mine.split(each, dim=1))

    def by_tokens(self, attended: Tensor) -> Tensor:
        """Return [1, T / r, H, D] of [1, T, H / r, D]. A collective."""
        heads, width = attended.shape[2:]
        parts = _Exchange.apply(attended.view(self.size, -1, heads, width), self.group)
        return (
            cast(Tensor, parts).transpose(0, 1).reshape(1, -1, self.size * heads, width)
        )


class _Exchange(torch.autograd.Function):
    """Send piece i of [r, ...] to rank i; piece i of the result came from rank i."""

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
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, picks: Tensor, total: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.picks = picks
        found = part.new_zeros(total)
        found[picks] = part
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient[ctx.picks], None, None, None
