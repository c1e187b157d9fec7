"""Measure what scoring tokens costs beside the layers of a model, at the vocabulary of Qwen3.

Usage: python benchmarks/token_scores.py [--hidden 1024] [--tokens 256] [--repeats 3]

Both are a forward and a backward pass on one core in float32, in turns, of which the fastest counts. One layer of
Qwen3's proportions is timed and counted as often as the model has layers, with its activations recomputed. `whole rows`
are tiles of all entries of the vocabulary, with as many tokens as fit in a tile: few, so that the head and its gradient
are read again for each of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RotaryEmbedding,
)

from rlplace.models.packed import token_scores
from rlplace.placement.memory.formulas import score_tile

VOCABULARY = 151_936
LAYERS = 36


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    hidden = torch.randn(given.tokens, given.hidden, requires_grad=True)
    head = torch.randn(VOCABULARY, given.hidden, requires_grad=True)
    targets = torch.randint(VOCABULARY, (given.tokens,))
    tile = score_tile(given.tokens, VOCABULARY, given.hidden)
    whole = max(1, tile[0] * tile[1] // VOCABULARY), VOCABULARY

    def scored(of: tuple[int, int]) -> None:
        torch.autograd.grad(
            token_scores(hidden, head, targets, 1.0, of).logprobs.sum(), [hidden, head]
        )

    timed: dict[str, Callable[[], None]] = {
        "layer": layer_of(given.hidden, given.tokens),
        "tiles": lambda: scored(tile),
        "whole rows": lambda: scored(whole),
    }
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(given.repeats):
        for name, run in timed.items():
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
    layers = LAYERS * best["layer"]
    print(
        f"{given.tokens} tokens, states of {given.hidden}, {VOCABULARY} entries: {LAYERS} layers {layers:.2f} s"
    )
    for name, size in (("tiles", tile), ("whole rows", whole)):
        print(
            f"{name} of {size[0]} x {size[1]}: {best[name]:.2f} s, {best[name] / layers:.2f} of the layers"
        )
    print(f"tiles take {best['tiles'] / best['whole rows']:.2f} of whole rows")


def layer_of(width: int, tokens: int) -> Callable[[], None]:
    config = Qwen3Config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=max(1, width // 128),
        num_key_value_heads=max(1, width // 512),
        head_dim=128,
    )
    config._attn_implementation = "sdpa"
    layer = Qwen3DecoderLayer(config, 0)
    states = torch.randn(1, tokens, width, requires_grad=True)
    position = Qwen3RotaryEmbedding(config)(states, torch.arange(tokens)[None])

    def run() -> None:
        out = checkpoint(
            layer, states, position_embeddings=position, use_reentrant=False
        )
        torch.autograd.grad(
            (out[0] if isinstance(out, tuple) else out).sum(),
            [states, *layer.parameters()],
        )

    return run


if __name__ == "__main__":
    main()
