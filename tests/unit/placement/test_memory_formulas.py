"""Every row of the table of formulas against a computation by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.config.blocks.training import OptimizerConfig, TrainedConfig
from rlplace.placement.memory import formulas
from rlplace.placement.memory.demands import (
    EngineDemand,
    HostPart,
    Part,
    Placed,
    TrainingDemand,
)
from rlplace.placement.memory.formulas import DTYPE_BYTES
from rlplace.placement.memory.layers import Block, KvLayers, Saved, Weight
from rlplace.placement.memory.model import Attention, ModelShape, read_model
from rlplace.placement.schedule import Residency

# 2 layers of 10 + 2 numbers each, 30 in the root; 2 key heads of 4.
TINY = ModelShape(
    hidden=5,
    vocabulary=6,
    kv=(KvLayers(layers=2, heads=2, numbers=2 * 4),),
    attention=Attention(hidden=5, heads=3, kv_heads=2, head_dim=4),
    root=(Weight(name="embed", shape=(6, 5), ways=6),),
    blocks=(
        Block(
            layers=2,
            weights=(
                Weight(name="linear", shape=(5, 2), ways=2, projection=True),
                Weight(name="norm", shape=(2,)),
            ),
            saved=Saved(compute=3, compute_cut=4, float32=1, float32_cut=2),
            passing=Saved(compute=2, compute_cut=3),
        ),
    ),
)
_OPT = {
    "vocab_size": 50272,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}
OPT_13B = read_model({"model_type": "llama", "intermediate_size": 1, **_OPT})
# Feed-forward layers of 6 and of 1, queries of 1 and of 12.
GATED, WIDE = (
    dataclasses.replace(
        TINY,
        attention=Attention(hidden=5, heads=heads, kv_heads=keys, head_dim=width),
        blocks=(
            Block(
                layers=2,
                weights=(),
                saved=Saved(compute_cut=4 * wide + 2 * (heads + keys) * width),
            ),
        ),
    )
    for wide, heads, keys, width in ((6, 1, 1, 1), (1, 3, 2, 4))
)
# Layers of experts, and layers that hold 32 numbers at once.
EXPERTS, WIDER = (
    dataclasses.replace(TINY, blocks=(block,))
    for block in (
        Block(
            layers=2,
            weights=(
                Weight(name="gate_up", shape=(4, 12, 5), ways=6, met=0.5),
                Weight(name="down", shape=(4, 5, 6), ways=6, met=0.5),
            ),
            saved=Saved(),
        ),
        Block(
            layers=2,
            weights=(),
            saved=Saved(),
            passing=Saved(compute=2, compute_cut=30),
        ),
    )
)
WINDOWED = dataclasses.replace(
    TINY,
    kv=(
        KvLayers(layers=1, heads=2, numbers=8, window=3),
        KvLayers(layers=1, heads=2, numbers=8),
        KvLayers(layers=1, heads=4, numbers=0, state=6),
    ),
)

BY_HAND: dict[
    Callable[..., int], list[tuple[Callable[[Callable[..., int]], int], int]]
] = {
    formulas.parameters: [
        (lambda f: f(TINY, 4), (30 + 2 * 12) * 4),
        # Over 4 ranks: 2 of 6 rows, 2 of 5 rows, 1 of 2.
        (lambda f: f(TINY, 2, shards=4), (2 * 5 + 2 * (2 * 2 + 1)) * 2),
        (lambda f: f(TINY, 1, parallel=2), 15 + 2 * (5 + 2)),
    ],
    formulas.activations: [
        (lambda f: f(TINY, 7, 2), 7 * 2 * ((3 + 4) * 2 + (1 + 2) * 4)),
        # What is gathered is twice the width of 5 at most: here all that is not cut.
        (
            lambda f: f(TINY, 7, 2, parallel=2),
            7 * 2 * (3 * 2 + (4 * 2 + (1 + 2) * 4) // 2),
        ),
    ],
    formulas.checkpoints: [
        (lambda f: f(TINY, 7, 2), 7 * 2 * 5 * 2),
        (lambda f: f(TINY, 7, 2, parallel=2), 4 * 2 * 5 * 2),
    ],
    formulas.one_layer: [(lambda f: f(TINY, 7, 2), 7 * 26)],
    formulas.flowing: [
        (lambda f: f(GATED, 7, 2), 7 * 2 * 6 * 2),  # two of four
        (lambda f: f(GATED, 7, 2, parallel=2), 7 * 6 * 2),
        (
            lambda f: f(WIDE, 7, 2),
            7 * (2 * (12 + 8) - 4) * 2,
        ),  # when the 4 of its feed-forward layer are freed
    ],
    # Of 2 key heads over 8 ranks, each has one, and not a quarter.
    formulas.copied_keys: [
        (lambda f: f(TINY, 7, 2, ranks=2), 0),
        (lambda f: f(TINY, 7, 2, ranks=8), 7 * 2 * (4 - 1) * 2),
    ],
    formulas.attended: [
        (lambda f: f(TINY, 7, 2), 7 * 12 * 2),
        (lambda f: f(TINY, 7, 2, parallel=3), 7 * 4 * 2),
    ],
    formulas.score_tile: [
        (lambda f: f(7, 6, 5), (7, 6)),
        (lambda f: f(100, 1 << 20, 64), (100, (1 << 22) // 100)),
        (lambda f: f(8192, 1 << 17, 1024), (2048, 2048)),
        (lambda f: f(8192, 1 << 17, 8192), (512, 8192)),
    ],
    formulas.tile_scores: [
        (lambda f: f(TINY, 7), 7 * TINY.vocabulary * 8),
        (
            lambda f: f(dataclasses.replace(TINY, vocabulary=6), 7, parallel=4),
            7 * 2 * 8,
        ),
        (
            lambda f: f(dataclasses.replace(TINY, vocabulary=1 << 20), 1 << 15),
            (1 << 22) * 8,
        ),
        (lambda f: f(dataclasses.replace(TINY, vocabulary=0), 7), 0),
    ],
    # Kwon et al. 2023, section 3.1: a token of OPT-13B takes 2 x 5120 x 40 x 2 = 800 KiB.
    formulas.kv_sequence: [
        (lambda f: f(OPT_13B, 1, 8192, 2), 800 * 1024),
        (lambda f: f(TINY, 10, 8192, 2, parallel=2), 10 * 2 * 2 * 1 * 4 * 2),
        (lambda f: f(TINY, 10, 8192, 2, parallel=8), 10 * 2 * 2 * 1 * 4 * 2),
        # 3 + 2 tokens of the window's layer, 10 of the other; a state of 6 numbers in each of 4 heads besides.
        (
            lambda f: f(WINDOWED, 10, 3, 2),
            2 * (2 * (3 - 1 + 3) * 8 + 2 * 10 * 8 + 4 * 6),
        ),
        (lambda f: f(WINDOWED, 4, 3, 2), 2 * (2 * 4 * 8 + 2 * 4 * 8 + 4 * 6)),
    ],
    formulas.kv_share: [
        (lambda f: f(1000, 0.6, 250), 350),
        (lambda f: f(1000, 0.2, 250), 0),
    ],
    formulas.sampling: [(lambda f: f(TINY, 7, 3, 2, 14), 3 * 6 * 14 + 2 * 7 * 5 * 2)],
    # 2 of 4 experts of width 6, with 5 hidden: 6 + 12 numbers; over 3 ranks of width 2: 5 + 5.
    formulas.expert_workspace: [
        (lambda f: f(TINY, 7, 2), 0),
        (lambda f: f(EXPERTS, 7, 2), 7 * 2 * (6 + 12) * 2),
        (lambda f: f(EXPERTS, 7, 2, parallel=3), 7 * 2 * (5 + 5) * 2),
    ],
    # What a layer holds at once, or beside experts 4 hidden states and 2 queries and 2 keys.
    formulas.engine_layer: [
        (lambda f: f(TINY, 7, 2, 1), 7 * (2 + 3) * 2),
        (lambda f: f(TINY, 7, 2, 3), 7 * (2 * 2 + 3 * 2 // 3)),
        (lambda f: f(EXPERTS, 7, 2, 1), 7 * (4 * 5 + 2 * 12 + 2 * 8) * 2),
    ],
    formulas.engine_workspace: [
        # A step of many tokens: the layer; of many sequences: the scores, which no tensor parallelism divides.
        (
            lambda f: f(WIDER, 7, 1, 2, score=14) - formulas.STEP_BYTES,
            7 * (2 + 30) * 2,
        ),
        (
            lambda f: f(TINY, 7, 3, 2) - formulas.STEP_BYTES,
            3 * 6 * 18 + 2 * 7 * 5 * 2,
        ),
        (
            lambda f: f(TINY, 7, 30, 2, parallel=2) - formulas.STEP_BYTES,
            30 * 6 * 18 + 2 * 7 * 5 * 2,
        ),
        (
            lambda f: f(EXPERTS, 7, 30, 2) - formulas.STEP_BYTES,
            30 * 6 * 18 + 2 * 7 * 5 * 2 + 7 * 2 * 18 * 2,
        ),
    ],
    formulas.whole_weight: [
        (lambda f: f(10, 0, 4, shared=True), 2 * 10 * 4),
        (lambda f: f(10, 0, 4, shared=False), 0),
        (lambda f: f(10, 7, 2, shared=True), 7 * (2 * 4 + 2 * 2)),
    ],
    formulas.stream_buckets: [
        (lambda f: f(1 << 30, sent=True, encrypted=True), 2 * (16 << 20)),
        (lambda f: f(1 << 30, sent=False, encrypted=True), 3 * (16 << 20)),
        (lambda f: f(5, sent=False), 2 * 5),
    ],
    formulas.reloading: [
        (lambda f: f(TINY, 4), 30 * 4),
        (lambda f: f(TINY, 4, parallel=4), 8 * 4),
    ],
    formulas.communicator: [(lambda f: f(1), 256 << 20), (lambda f: f(2), 512 << 20)],
    formulas.sync_buckets: [(lambda f: f(1 << 30), 128 << 20), (lambda f: f(30), 60)],
    formulas.sync_windows: [
        (lambda f: f(OPT_13B, 2), 2 * (2 * 50272 * 5120)),
        (lambda f: f(OPT_13B, 2, 1), 2 * 50272 * 5120),
        (lambda f: f(TINY, 4), formulas.parameters(TINY, 4)),
    ],
    formulas.pinned: [
        (lambda f: f(1025), 2048),
        (lambda f: f(1024), 1024),
        (lambda f: f(0), 0),
    ],
}


@pytest.mark.parametrize("formula", BY_HAND, ids=lambda formula: formula.__name__)
def test_a_formula_by_hand(formula: Callable[..., int]) -> None:
    for compute, expected in BY_HAND[formula]:
        assert compute(formula) == expected


def test_low_rank_factors_are_sharded_by_their_own_rows() -> None:
    """Of [3, 2] and [5, 3] over 2 ranks: 2 of 3 rows and 3 of 5."""
    assert TINY.lora_parts(3) == [(3 * 2, 2), (5 * 3, 2)]
    assert TINY.lora_parts(3, shards=2) == [(2 * 2, 2), (3 * 3, 2)]


def test_bytes_a_parameter_however_they_are_split() -> None:
    """Rajbhandari et al. 2020: 16 with Adam, whether the shards or master weights beside them are float32."""
    assert DTYPE_BYTES["fp32"] * 2 + optimizer_state("adamw") == 16
    assert (
        DTYPE_BYTES["bf16"] * 2 + optimizer_state("adamw_master", weights="bf16") == 16
    )


def optimizer_state(kind: str, **block: Any) -> float:
    """Bytes of it a parameter, less what is rounded up to blocks."""
    trained = TrainedConfig(optimizer=OptimizerConfig(kind=kind), **block)
    demand = TrainingDemand(model=OPT_13B, block=trained, sequence_length=1)
    one = Placed(ranks=1, accelerators_per_rank=1, memory_bytes=1 << 40, kind="cuda")
    return demand.footprint(one).held[Residency.FULL][
        Part.OPTIMIZER
    ] / formulas.parameters(OPT_13B, 1)


@pytest.mark.parametrize("copied", [True, False])
def test_a_checkpoint_unpacks_moments_of_8_bits_whether_or_not_it_copies_the_rest(
    copied: bool,
) -> None:
    def saved(kind: str) -> int:
        block = TrainedConfig(optimizer=OptimizerConfig(kind=kind))
        demand = TrainingDemand(
            model=OPT_13B, block=block, sequence_length=1, copied=copied
        )
        one = Placed(
            ranks=1, accelerators_per_rank=1, memory_bytes=1 << 40, kind="cuda"
        )
        return demand.footprint(one).host[Residency.FULL][HostPart.CHECKPOINT]

    unpacked = (
        0 if copied else 8 * formulas.parameters(OPT_13B, 1)
    )  # of float32 no tensor is made anew
    assert saved("adamw_8bit") - saved("adamw") == unpacked


def test_a_cut_distribution_takes_room_whether_answers_or_held_out_ones_are_drawn_by_it() -> (
    None
):
    def workspace(cut: bool, **block: Any) -> int:
        demand = EngineDemand(
            model=OPT_13B,
            block=TextRolloutConfig(engine="transformers", **block),
            sequence_length=2,
            cut=cut,
        )
        one = Placed(
            ranks=1, accelerators_per_rank=1, memory_bytes=1 << 40, kind="emulated"
        )
        return demand.footprint(one).working["rollout"][Part.WORKSPACE]

    assert (
        workspace(False)
        < workspace(True)
        == workspace(False, top_p=0.5)
        == workspace(True, top_p=0.5)
    )


def test_moments_of_8_bits_have_a_scale_for_each_block_of_256() -> None:
    assert [formulas.moments(size, 4, True) for size in (0, 1, 256, 257)] == [
        [0, 0],
        [256, 4],
        [256, 4],
        [512, 8],
    ]
    assert optimizer_state("adamw_8bit") == pytest.approx(2 * (1 + 4 / 256), rel=1e-4)
