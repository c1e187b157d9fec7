"""Adam's moments in 8 bits against float32: seconds of a step, bytes, and what a small transformer learns by each.

Where bitsandbytes is installed, its kernel steps the same numbers beside ours.

    python benchmarks/adam_8bit.py
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlplace.config.blocks.training import OptimizerConfig
from rlplace.workers.training.optimizer import Adam

NUMBERS = 1 << 23
ROUNDS = 5
STEPS = 400
WIDTH = 64
LENGTH = 32
WORDS = 64
Kind = Literal["adamw", "adamw_8bit"]
KINDS: tuple[Kind, ...] = ("adamw", "adamw_8bit")


def step_ours(adam: Adam, gradient: Tensor) -> None:
    adam.step([gradient], 1e-3)


def steppers() -> dict[str, Callable[[Tensor], None]]:
    found: dict[str, Callable[[Tensor], None]] = {}
    for kind in KINDS:
        adam = Adam([torch.zeros(NUMBERS)], OptimizerConfig(kind=kind))
        print(
            f"{kind}: {sum(tensor.nbytes for tensor in adam.tensors()) / NUMBERS:.3f} bytes of state a parameter"
        )
        found[kind] = functools.partial(step_ours, adam)
    if importlib.util.find_spec("bitsandbytes"):
        from bitsandbytes import functional

        weights = torch.zeros(NUMBERS)
        codes = torch.zeros(2, NUMBERS, dtype=torch.uint8)
        steps = [0]
        scales = torch.zeros(2, NUMBERS // 256)
        tables = [functional.create_dynamic_map(s) for s in (True, False)]

        def step(gradient: Tensor) -> None:
            steps[0] += 1
            rates = (0.9, 0.999, 0.0, 0.0, 1e-8, steps[0], 1e-3)
            functional.optimizer_update_8bit_blockwise(
                "adam", gradient, weights, *codes, *rates, *tables, *scales
            )

        found["bitsandbytes"] = step
    return found


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = (
            nn.Embedding(WORDS, WIDTH),
            nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH)),
        )
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        logits: Tensor = self.head(
            self.layers(self.words(ids) + self.places, mask=mask, is_causal=True)
        )
        return logits


def texts(following: Tensor, generator: torch.Generator) -> Tensor:
    """[32, LENGTH + 1] words, each drawn by the two before it."""
    ids = torch.randint(WORDS, (32, LENGTH + 1), generator=generator)
    for at in range(2, LENGTH + 1):
        ids[:, at] = torch.multinomial(
            following[ids[:, at - 2], ids[:, at - 1]], 1, generator=generator
        )[:, 0]
    return ids


def loss_after(kind: Kind, seed: int, lr: float = 3e-3) -> float:
    """Return the mean loss of the last 50 steps."""
    torch.manual_seed(seed)
    model = Transformer()
    generator = torch.Generator().manual_seed(seed)
    losses = list[float]()
    parameters = list(model.parameters())
    adam = Adam(
        [parameter.data for parameter in parameters],
        OptimizerConfig(kind=kind, weight_decay=0.01),
    )
    table = torch.Generator().manual_seed(1)
    following = torch.softmax(
        2.5 * torch.randn(WORDS, WORDS, WORDS, generator=table), -1
    ) / torch.arange(1, WORDS + 1)
    for step in range(STEPS):
        ids = texts(following, generator)
        loss = nn.functional.cross_entropy(
            model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        )
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step(
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            lr * min(1.0, (step + 1) / 20),
        )
        losses.append(loss.item())
    return statistics.mean(losses[-50:])


def main() -> None:
    seconds: dict[str, list[float]] = {}
    found = steppers()
    for _ in range(ROUNDS):  # interleaved
        for name, step in found.items():
            gradient = torch.randn(NUMBERS)
            began = time.perf_counter()
            step(gradient)
            seconds.setdefault(name, []).append(time.perf_counter() - began)
    for name, each in seconds.items():
        print(
            f"{name}: {statistics.median(each) / NUMBERS * 1e9:.2f} s for 10^9 parameters"
        )
    for seed in range(2):
        print(
            f"seed {seed}, loss:",
            ", ".join(f"{kind} {loss_after(kind, seed):.3f}" for kind in KINDS),
        )


if __name__ == "__main__":
    main()
