"""Keys and values of many sequences of different lengths, in one pool of rows of equal size.

::

    row 0   k k k k k k k . . .      a sequence's tokens stand in its row from the left; the next one goes behind them
    row 1   k k k . . . . . . .
    row 2   . . . . . . . . . .      the rows in use are the first ones, so that a batch of them is a view
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """The shape of one row for one model."""

    layers: int
    heads: int
    tokens: int
    head_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PretrainedConfig, *, tokens: int, dtype: torch.dtype) -> RowShape:
        heads = model.num_attention_heads
        return cls(
            layers=model.num_hidden_layers,
            heads=getattr(model, "num_key_value_heads", None) or heads,
            tokens=tokens,
            head_size=getattr(model, "head_dim", None) or model.hidden_size // heads,
            dtype=dtype,
        )

    @property
    def size_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.tokens * self.head_size * self.dtype.itemsize


class BatchCache(Cache):
    """The pool as a model's cache: a forward pass adds one token to each of the first rows. Owns the memory.

    The model must be given the mask and the positions: only `update` is asked of this cache.
    """

    def __init__(self, rows: int, shape: RowShape, device: torch.device) -> None:
        super().__init__(layers=[])
        size = (rows, shape.heads, shape.tokens, shape.head_size)
        # Zeros, not whatever was in memory: what is masked is still multiplied, and NaN times 0 is NaN.
        pools = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(2 * shape.layers)]
        self._keys, self._values = pools[: shape.layers], pools[shape.layers :]
        self._device = device
        self._rows = self._columns = torch.empty(0, dtype=torch.long, device=device)
        self._longest = 0

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def extend(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Prepare a pass that adds one token to each of the first B rows, which have these lengths.

        Returns its positions [B, 1] and its mask [B, 1, 1, L], true where a row has a token.
        """
        self._columns = torch.tensor(lengths, device=self._device)
        self._rows = torch.arange(len(lengths), device=self._device)
        self._longest = max(lengths) + 1
        seen = torch.arange(self._longest, device=self._device) <= self._columns[:, None]
        return self._columns[:, None], seen[:, None, None, :]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        count, longest = len(self._rows), self._longest
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._rows, :, self._columns] = key_states[:, :, 0]
        values[self._rows, :, self._columns] = value_states[:, :, 0]
        return keys[:count, :, :longest], values[:count, :, :longest]

    def fill(self, first: int, count: int, prefix: DynamicCache) -> None:
        """Copy what a pass over one sequence left in `prefix` into `count` rows from `first` on."""
        for keys, values, layer in zip(self._keys, self._values, prefix.layers, strict=True):
            assert isinstance(layer, DynamicLayer), "the only kind there is under full attention"
            for pool, made in ((keys, layer.keys), (values, layer.values)):
                assert made is not None, "a pass went through it"
                pool[first : first + count, :, : made.shape[2]] = made

    def copy(self, source: int, target: int, length: int) -> None:
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :length] = tensor[source, :, :length]
