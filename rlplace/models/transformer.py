"""A small transformer that decides a chunk of actions at once, as vision-language-action policies do::

    entries, patches of images  ──▶ tokens ┐
    one query for each action   ──────────▶├─▶ blocks ─▶ action 0, action 1 ... n - 1
    one query for the value     ──────────▶┘          ─▶ value

Every token attends to every other. Queries as in ACT (Zhao et al. 2023, arXiv:2304.13705); blocks normalise first.

Letters: N observations, L tokens, W their width, n actions of a chunk, K outputs of all of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlplace.config.blocks.policies import TransformerConfig
from rlplace.envs.contract import Spaces, image_size
from rlplace.models.mlp import initialise, noise_shape
from rlplace.models.networks import (
    Observed,
    as_channels_first,
    entries_of,
    scaled_pixels,
)

# Standard deviation of the initial places and queries
_FIRST_DEVIATION = 0.02


class ChunkTransformer(nn.Module):
    """A transformer that reads observations and queries as tokens.

    The outputs of the queries become the value, and the actions of a chunk (several consecutive actions that are
    decided at once).
    """

    def __init__(self, spaces: Spaces, config: TransformerConfig) -> None:
        super().__init__()
        self._entries = spaces.entries
        self._images = spaces.images
        self._chunk = spaces.chunk
        width = config.width
        patch = config.patch
        # An image becomes tokens by patches, any other entry becomes one token
        tokens = 0
        layers: list[nn.Module] = []
        for entry in spaces.entries:
            if entry in spaces.images:
                channels, *sides = image_size(entry.shape)
                layers.append(nn.Conv2d(channels, width, patch, patch))
                tokens += math.prod(side // patch for side in sides)
            else:
                layers.append(nn.Linear(entry.size, width))
                tokens += 1
        self.tokens = nn.ModuleList(layers)
        # A learned place for each token, and a query for each action and the value
        self.places = nn.Parameter(_FIRST_DEVIATION * torch.randn(tokens, width))
        queries = torch.randn(spaces.chunk + 1, width)
        self.queries = nn.Parameter(_FIRST_DEVIATION * queries)
        blocks = [_Block(width, config.heads) for _ in range(config.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        # Outputs of one action of the chunk
        self.policy = nn.Linear(
            width,
            math.prod(noise_shape(spaces.actions)) // spaces.chunk,
        )
        self.value = nn.Linear(width, 1)

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise the heads; all other weights are initialised by torch."""
        initialise([self.policy], 0.01, generator)
        initialise([self.value], 1.0, generator)

    def forward(self, observations: Observed) -> tuple[Tensor, Tensor]:
        """Return outputs [N, K] and values [N] for N observations; the K outputs are for all actions of a chunk."""
        by_name = entries_of(observations)
        dtype = self.places.dtype
        tokens = list[Tensor]()
        for entry, layer in zip(self._entries, self.tokens, strict=True):
            given = by_name[entry.name]
            if entry in self._images:
                pixels = as_channels_first(scaled_pixels(given, dtype))
                # [N, W, rows, columns] to [N, tokens, W]
                patches = layer(pixels)
                tokens.append(patches.flatten(2).transpose(1, 2))
            else:
                numbers = given.flatten(1).to(dtype)
                tokens.append(layer(numbers)[:, None])
        # Tokens and queries go through the blocks together
        seen = torch.cat(tokens, dim=1) + self.places
        asked = self.queries.expand(len(seen), -1, -1)
        joined = torch.cat([seen, asked], dim=1)
        through = self.blocks(joined)
        # The last tokens are the queries: n actions, then the value
        first_query = -self._chunk - 1
        answers = self.norm(through[:, first_query:])
        outputs = self.policy(answers[:, :-1]).flatten(1)
        values = self.value(answers[:, -1])[:, 0]
        return outputs, values


class _Block(nn.Module):
    """Attention and a feed-forward layer over N sequences of L tokens of width W, [N, L, W].

    The results of attention and of the feed-forward layer are each added to their input.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.layer = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens after this block, [N sequences, L tokens, W numbers of a token]."""
        # Queries, keys and values: [3, N, heads, L, W / heads]
        normalised = self.norms[0](tokens)
        projected = self.attention(normalised)
        parts = projected.unflatten(-1, (3, self._heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        by_head = scaled_dot_product_attention(query, key, value)
        attended = by_head.transpose(1, 2).flatten(2)
        tokens = tokens + self.joined(attended)
        # Feed-forward layer
        normalised = self.norms[1](tokens)
        added: Tensor = self.layer(normalised)
        return tokens + added
