"""Every row of the table of formulas against a computation by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlplace.placement.memory.formulas import DTYPE_BYTES, FORMULAS, OPTIMIZER_STATE, optimizer_state
from rlplace.placement.memory.ledger_text import render_formulas
from rlplace.placement.memory.model import Block, ModelShape, Saved, Weight, read_model

# 2 layers of 10 + 2 numbers each, 30 in the root; 2 key heads of 4.
TINY = ModelShape(
    family="tiny",
    hidden=5,
    vocabulary=6,
    kv_heads=2,
    head_dim=4,
    root=(Weight(name="embed", shape=(6, 5), ways=6),),
    blocks=(
        Block(
            layers=2,
            weights=(Weight(name="linear", shape=(5, 2), ways=2, projection=True), Weight(name="norm", shape=(2,))),
            saved=Saved(compute=3, compute_cut=4, float32=1, float32_cut=2),
        ),
    ),
)
OPT_13B = {"vocab_size": 50272, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40}

BY_HAND: dict[str, list[tuple[Callable[[Callable[..., int]], int], int]]] = {
    "parameters": [
        (lambda f: f(TINY, 4), (30 + 2 * 12) * 4),
        # Over 4 ranks: 2 of 6 rows, 2 of 5 rows, 1 of 2.
        (lambda f: f(TINY, 2, shards=4), (2 * 5 + 2 * (2 * 2 + 1)) * 2),
        (lambda f: f(TINY, 1, tensor_parallel=2), 15 + 2 * (5 + 2)),
    ],
    "gradients": [(lambda f: f(100, 4), 400)],
    # Rajbhandari et al. 2020: K = 12 bytes for mixed-precision Adam, 4 of them the master weights.
    "optimizer state": [
        (lambda f: f(100, "adamw"), 800),
        (lambda f: f(100, "adamw_master"), 1200),
        (lambda f: f(100, "adamw_8bit"), 200),
        (lambda f: f(100, "sgd"), 0),
    ],
    "LoRA": [
        (lambda f: f(TINY, 3, 4), 2 * 3 * (5 + 2) * 4),
        # Rows over 2 ranks: 2 of 3 of [3, 2], 3 of 5 of [5, 3].
        (lambda f: f(TINY, 3, 1, shards=2), 2 * (2 * 2 + 3 * 3)),
    ],
    "gathered weights": [
        (lambda f: f(TINY, 2), (30 + 2 * 12) * 2),
        (lambda f: f(TINY, 2, tensor_parallel=2), 30 + 2 * 12),
    ],
    "gradient buckets": [(lambda f: f(TINY, 2), 12 * (2 + 4) + 30 * 2)],
    "activations": [
        (lambda f: f(TINY, 7, 2), 7 * 2 * ((3 + 4) * 2 + (1 + 2) * 4)),
        (lambda f: f(TINY, 7, 2, tensor_parallel=2), 7 * 2 * (3 * 2 + 4 + (4 * 2 + 2 * 4) // 2)),
    ],
    "checkpoints": [(lambda f: f(TINY, 7, 2), 7 * 2 * 5 * 2)],
    "one layer": [(lambda f: f(TINY, 7, 2), 7 * 26)],
    "logits": [(lambda f: f(6, 7, 2), 7 * 6 * 10), (lambda f: f(6, 7, 2, tensor_parallel=4), 7 * 2 * 10)],
    "logits, backward": [(lambda f: f(6, 7, 2), 7 * 6 * 14)],
    # Kwon et al. 2023, section 3.1: a token of OPT-13B takes 2 x 5120 x 40 x 2 = 800 KiB.
    "KV cache of a token": [
        (
            lambda f: f(
                read_model({"model_type": "llama", "intermediate_size": 1, **OPT_13B}),
                2,
            ),
            800 * 1024,
        ),
        (lambda f: f(TINY, 2, tensor_parallel=2), 2 * 2 * 1 * 4 * 2),
        (lambda f: f(TINY, 2, tensor_parallel=8), 2 * 2 * 1 * 4 * 2),
    ],
    "KV cache of a share": [(lambda f: f(1000, 0.6, 250), 350), (lambda f: f(1000, 0.2, 250), 0)],
    "engine workspace": [(lambda f: f(TINY, 7, 3, 2), 7 * 26 + 3 * 6 * 10)],
    "communicator buffers": [(lambda f: f(1), 256 << 20), (lambda f: f(2), 512 << 20)],
    "sync buffers": [(lambda f: f(1000, 100), 200), (lambda f: f(30, 100), 60)],
    "sleep copies": [(lambda f: f(1000, 1), 1000), (lambda f: f(1000, 2), 0)],
    "pinned pool": [(lambda f: f(1025), 2048), (lambda f: f(1024), 1024), (lambda f: f(0), 0)],
}


@pytest.mark.parametrize("name", [formula.name for formula in FORMULAS])
def test_a_row_by_hand(name: str) -> None:
    (formula,) = [f for f in FORMULAS if f.name == name]
    for compute, expected in BY_HAND[name]:
        assert compute(formula.compute) == expected


def test_every_row_says_where_it_comes_from_and_how_near_it_is() -> None:
    text = render_formulas()
    for formula in FORMULAS:
        assert formula.source
        assert formula.accuracy
        assert formula.name in text
    assert max(map(len, text.splitlines())) <= 100
    assert text.isascii()


def test_sixteen_bytes_a_parameter_however_they_are_split() -> None:
    """Mixed precision with Adam: float32 shards and gradients, or 16-bit ones with master weights."""
    shards = DTYPE_BYTES["fp32"] * 2 + optimizer_state(1, "adamw")
    masters = DTYPE_BYTES["bf16"] * 2 + optimizer_state(1, "adamw_master")
    assert shards == masters == 16
    assert set(OPTIMIZER_STATE) == {"adamw", "adamw_master", "adamw_8bit", "sgd"}
