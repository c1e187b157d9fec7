"""Parts of a language model: weights, layers, and what layers save for the backward pass and the KV cache."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter tensor of a model, or the tensors of one name in all layers of a block.

    `name`: "*" stands for the layer number. `ways`: into how many parts, at most, tensor parallelism splits the tensor.
    `projection`: whether it is a linear layer that LoRA adapts. `met`: the share of the tensor that one token uses;
    below 1 for experts. `bits`: bits per number of a quantised weight, scales included; 0: not quantised.
    """

    name: str  # "*" stands for the layer number
    shape: tuple[int, ...]
    ways: int = 1  # tensor parallelism cuts it into at most this many parts; 1: every rank has all of it
    projection: bool = False  # a linear layer that LoRA adapts
    met: float = 1.0  # share of it that one token uses; below 1 for experts
    bits: float = 0  # bits per number if the files have it quantised, scales included; 0: not quantised

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def by_columns(self) -> bool:
        """Whether tensor parallelism splits the columns of the weight. If not, it splits the rows.

        Ranks that hold columns compute partial products, which are summed.
        """
        return self.name.endswith(("o_proj.weight", "down_proj.weight"))

    def part(self, tensor_parallel: int, shards: int = 1) -> int:
        """Return the number of elements of the weight on the rank that holds the most.

        `tensor_parallel`: ranks that split the weight. `shards`: ranks that shard dimension 0. As in FSDP2, dimension 0
        is cut into equal chunks, and the last chunk is padded to the size of the other chunks.
        """
        rows = self.shape[0] if self.shape else 1
        return -(
            -(-(-rows // shards) * (self.elements // max(1, rows)))
            // min(tensor_parallel, self.ways)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The count of numbers per token that a layer saves for the backward pass, without attention's s x s matrix.

    `compute`: numbers in the dtype of the computation. `float32`: numbers in float32. `compute_cut`, `float32_cut`:
    further numbers of the two dtypes, which tensor parallelism divides among the ranks.
    """

    compute: int = 0  # in the dtype of the computation
    compute_cut: int = 0  # the same, but divided by tensor parallelism
    float32: int = 0
    float32_cut: int = 0

    def bytes_per_token(
        self, compute_bytes: int, tensor_parallel: int, gathered: int | None = None
    ) -> int:
        """Return the bytes per token that one layer saves on one rank.

        `compute_bytes`: bytes of a number in the compute dtype. `tensor_parallel`: ranks that split a layer.
        `gathered`: for sequence parallelism, how many numbers in the compute dtype a rank holds for the tokens of all
        ranks; all further numbers it holds only for its own tokens. None: no sequence parallelism.
        """
        kept = self.compute if gathered is None else min(self.compute, gathered)
        whole = kept * compute_bytes + self.float32 * 4 * (gathered is None)
        every = (self.compute + self.compute_cut) * compute_bytes + (
            self.float32 + self.float32_cut
        ) * 4
        return whole + -(-(every - whole) // tensor_parallel)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A group of identical layers. Each layer is one unit that FSDP gathers.

    `layers`: count of layers. `weights`: the weights of one layer. `saved`: what one layer saves for the backward pass.
    `passing`: what one layer holds at once in a pass without gradients; None: `saved` is used as an upper bound.
    """

    layers: int
    weights: tuple[Weight, ...]  # of one layer
    saved: Saved
    # Numbers held at once in a pass without gradients; None: `saved` is the bound.
    passing: Saved | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """The vision encoder before the decoder: identical layers. Sizes are per image patch.

    `hidden`: width of the hidden states. `pixels`: input numbers of a patch. `patches`: patches that are merged into
    one token. `mergers`: number of modules that merge patches into tokens.
    """

    block: Block
    hidden: int
    pixels: int  # input numbers of a patch
    patches: int  # patches that are merged into one token
    mergers: int  # modules that merge patches into tokens, including those for extra decoder features

    def given(self, tokens: int) -> int:
        """Return the bytes of the encoder's input, images in float32, that give `tokens` tokens."""
        return tokens * self.patches * self.pixels * 4

    def layer(self, tokens: int, compute: int) -> int:
        """Return the bytes that one layer saves for the backward pass of images that give `tokens` tokens.

        This number is also the peak of a pass without gradients. `compute`: bytes of a number in the compute dtype.
        """
        return tokens * self.patches * self.block.saved.bytes_per_token(compute, 1)

    def kept(self, tokens: int, compute: int, checkpointing: bool) -> int:
        """Return the bytes that are kept from the forward to the backward pass of images that give `tokens` tokens.

        `checkpointing`: True: the inputs of layers are kept; False: all activations. States of the modules that merge
        patches are included. `compute`: bytes of a number in the compute dtype.
        """
        inputs = tokens * self.patches * self.hidden * compute
        layers = self.block.layers * (
            inputs if checkpointing else self.layer(tokens, compute)
        )
        return layers + 4 * self.mergers * inputs

    def flowing(self, tokens: int, compute: int) -> int:
        """Return the bytes of gradients in flight through a layer, for images that give `tokens` tokens.

        `compute`: bytes of a number in the compute dtype.
        """
        return tokens * self.patches * self.block.saved.compute_cut // 2 * compute


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvLayers:
    """Layers whose KV caches have the same size.

    `layers`: count of layers. `heads`: count of key heads. `numbers`: how many numbers are kept per token and head, for
    key and value together. `window`: tokens that attention sees and keeps; 0: all. `state`: numbers per sequence and
    head that do not depend on the length of the sequence.
    """

    layers: int
    heads: int  # tensor parallelism divides them, down to one
    numbers: int  # per token and head: key and value together; for a latent (MLA) its width, with one head
    window: int = 0  # tokens that attention sees and keeps; 0: all
    state: int = 0  # numbers per sequence and head, independent of its length

    def of(self, tokens: int, step: int, parallel: int) -> int:
        """Return how many numbers these layers keep in the KV cache of one rank for a sequence of `tokens` tokens.

        `step`: how many tokens of the sequence are computed at once. `parallel`: ranks that split the heads.
        """
        kept = min(tokens, self.window - 1 + step) if self.window else tokens
        return (
            self.layers
            * max(1, self.heads // parallel)
            * (self.numbers * kept + self.state)
        )
