"""The ledgers of the two configs of real sizes, against sums by hand from the keys of config.json alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from rlplace.placement.memory.demands import HostPart, Part
from tests.foreseen import job_of
from tests.unit.placement.memory_cases import held

GIB = 1 << 30
TOKENS, STEP_TOKENS, SEQUENCES, SHARE = 16384, 8192, 256, 0.8  # as in both configs


class Numbers(NamedTuple):
    hidden: int
    vocabulary: int
    layers: int
    heads: int
    key_heads: int
    wide: int
    normed: bool  # query and key heads
    ranks: int  # of the actor
    cut: int  # accelerators of an engine


QWEN3_8B = Numbers(4096, 151936, 36, 32, 8, 12288, True, 8, 1)
LLAMA_3_70B = Numbers(8192, 128256, 80, 64, 8, 28672, False, 48, 4)


@pytest.mark.parametrize(
    ("name", "n"), [("grpo_qwen3_8b", QWEN3_8B), ("grpo_llama_70b", LLAMA_3_70B)]
)
def test_every_large_line_is_what_a_sum_by_hand_gives(name: str, n: Numbers) -> None:
    ledger = job_of(name).case.ledger()
    query, keys = n.heads * 128, n.key_heads * 128
    layer = n.hidden * (2 * query + 2 * keys + 3 * n.wide + 2) + 256 * n.normed
    outside = 2 * n.vocabulary * n.hidden
    parameters = n.layers * layer + outside + n.hidden
    # Bytes of a token: norms, those of heads; queries, keys, values and what was attended; four of feed-forward.
    norms = 2 * (n.hidden * (4 + 2 + 2) + 4)
    of_heads = ((query + keys) * (4 + 2) + (n.heads + n.key_heads) * 4) * n.normed
    kept = norms + of_heads + 2 * (2 * query + 2 * keys) + 4 * n.heads + 2 * 4 * n.wide
    # A step of an engine: one layer with 4 hidden states, a head's angles and 3 of feed-forward, or the scores of all
    # sequences, for which no vocabulary is cut; cuBLAS's workspace.
    passing = 2 * (4 * n.hidden + 2 * 128 + 3 * n.wide / n.cut) + 4 * 8
    drawn = SEQUENCES * n.vocabulary * (2 + 4 + 4 + 4 + 4)
    drawn += 2 * STEP_TOKENS * n.hidden * 2
    workspace = max(STEP_TOKENS * passing, drawn) + (64 << 20)
    engine = 2 * parameters / n.cut
    # Graphs, kernels, buffers of all-reduces. The context is beside the share.
    fixed = (1.0 + 0.25 + (1.875 if n.cut > 1 else 0.0)) * GIB
    (account, *_), (host, *_) = ledger.accelerators, ledger.hosts
    share = SHARE * account.capacity_bytes
    head, windows = 2 * n.vocabulary * n.hidden, 2 * 2 * n.vocabulary * n.hidden
    expected = {
        ("learn", "actor", Part.PARAMETERS): 2 * parameters / n.ranks,
        ("learn", "actor", Part.OPTIMIZER): 3 * 4 * parameters / n.ranks,
        ("learn", "actor", Part.GRADIENTS): 4 * parameters / n.ranks
        + head
        + 4 * layer,  # one layer is being reduced
        ("learn", "actor", Part.GATHERED): 2 * outside + 3 * 2 * layer,
        ("learn", "actor", Part.ACTIVATIONS): TOKENS
        * ((n.layers - 1) * 2 * n.hidden + kept + 2 * 2 * n.wide),
        ("rollout", "rollout", Part.PARAMETERS): engine,
        ("rollout", "rollout", Part.WORKSPACE): workspace,
        ("rollout", "rollout", Part.KV_CACHE): share - engine - workspace - fixed,
        ("sync", "rollout", Part.SYNC): windows + head / n.cut,
        ("rollout", "actor", HostPart.OFFLOADED): 8 * 14 * parameters / n.ranks,
    }
    for (stage, component, part), size in expected.items():
        loads = (host if isinstance(part, HostPart) else account).loads
        (load,) = (
            at for at in loads if at.moment.stage == stage and not at.moment.entering
        )
        assert held(load, component, part) == pytest.approx(size, rel=0.01), (
            stage,
            component,
            part,
        )
