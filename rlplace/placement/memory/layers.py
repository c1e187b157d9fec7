"""Parts of a language model: its weights, its layers and what these save and keep."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter tensor, or its equals in all layers of a block."""

    name: str  # "*" stands for the layer
    shape: tuple[int, ...]
    ways: int = 1  # tensor parallelism cuts it into at most this many parts; 1: every rank has all of it
    projection: bool = False  # a linear layer that LoRA adapts
    met: float = 1.0  # how much of it a token meets: of the experts of a layer, those that it has
    bits: float = 0  # of a number where the files have it quantised, scales included; 0: they have it as it is

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def by_columns(self) -> bool:
        """Whether tensor parallelism cuts its columns, of which the products are summed, and not its rows."""
        return self.name.endswith(("o_proj.weight", "down_proj.weight"))

    def part(self, tensor_parallel: int, shards: int = 1) -> int:
        """Elements that the fullest rank holds, cut first over `shards` along dimension 0, then for tensor parallelism.

        As FSDP2 does it: dimension 0 in equal chunks, the last padded to the size of the others.
        """
        rows = self.shape[0] if self.shape else 1
        return -(
            -(-(-rows // shards) * (self.elements // max(1, rows)))
            // min(tensor_parallel, self.ways)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Numbers per token that one layer keeps for the backward pass, attention computed without its s x s matrix."""

    compute: int = 0  # in the dtype of the computation
    compute_cut: int = 0  # the same, but divided by tensor parallelism
    float32: int = 0
    float32_cut: int = 0

    def bytes_per_token(
        self, compute_bytes: int, tensor_parallel: int, gathered: int | None = None
    ) -> int:
        """`gathered`: numbers that a rank has of all tokens, the rest of its own ones (sequence parallelism)."""
        kept = self.compute if gathered is None else min(self.compute, gathered)
        whole = kept * compute_bytes + self.float32 * 4 * (gathered is None)
        every = (self.compute + self.compute_cut) * compute_bytes + (
            self.float32 + self.float32_cut
        ) * 4
        return whole + -(-(every - whole) // tensor_parallel)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Layers that are all alike; each is one unit that FSDP gathers."""

    layers: int
    weights: tuple[Weight, ...]  # of one layer
    saved: Saved
    # What a pass without gradients holds at once; None: what is saved bounds it
    passing: Saved | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Layers that see images before the decoder does, all alike; numbers are of a patch."""

    block: Block
    hidden: int
    pixels: int  # numbers that it is given as
    patches: int  # of a token
    mergers: int  # that make tokens of patches: of its end, and of layers whose features the decoder adds

    def given(self, tokens: int) -> int:
        """Bytes of the images of so many tokens, in float32."""
        return tokens * self.patches * self.pixels * 4

    def layer(self, tokens: int, compute: int) -> int:
        """Bytes that a layer saves, the largest part of what it holds without gradients too."""
        return tokens * self.patches * self.block.saved.bytes_per_token(compute, 1)

    def kept(self, tokens: int, compute: int, checkpointing: bool) -> int:
        """Bytes from the forward to the backward pass: inputs of layers, or all; of what merges patches, its states."""
        inputs = tokens * self.patches * self.hidden * compute
        layers = self.block.layers * (
            inputs if checkpointing else self.layer(tokens, compute)
        )
        return layers + 4 * self.mergers * inputs

    def flowing(self, tokens: int, compute: int) -> int:
        """Bytes of gradients on their way through a layer, as `formulas.flowing`."""
        return tokens * self.patches * self.block.saved.compute_cut // 2 * compute


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvLayers:
    """Layers that keep alike keys and values of a sequence."""

    layers: int
    heads: int  # tensor parallelism divides them, down to one
    numbers: int  # of one token and head: a key and a value; of one latent for both, with one head
    window: int = 0  # only so many tokens are seen, and kept; 0: all
    state: int = 0  # numbers of a whole sequence and head, however long it is

    def of(self, tokens: int, step: int, parallel: int) -> int:
        """Numbers that a rank keeps of a sequence, of which `step` tokens are computed at once."""
        kept = min(tokens, self.window - 1 + step) if self.window else tokens
        return (
            self.layers
            * max(1, self.heads // parallel)
            * (self.numbers * kept + self.state)
        )
