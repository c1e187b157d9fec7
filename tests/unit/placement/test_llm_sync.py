"""By which transport a language model's weights go to its engines, and what the memory proof counts for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.contract.planning import make_plan, memory_case
from rlplace.placement import Topology
from rlplace.placement.flow import BUCKET_BYTES, Delivery, DeviceDelivery
from rlplace.placement.memory.demands import HostPart, Part
from rlplace.placement.memory.ledger import MemoryLedger
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency
from rlplace.placement.transfers import count_traffic
from tests.unit.placement.reports import LLAMA_8B

HYBRID = {
    "actor": "0-1",
    "env": "0",
    "rollout": "1-3",
}  # one engine beside an actor rank, two alone
BUCKETS = 2 * (64 << 20)
EMBEDDING = (
    2 * LLAMA_8B["vocab_size"] * LLAMA_8B["hidden_size"]
)  # the largest that an engine makes anew, in bfloat16


def config(
    rollout: str = HYBRID["rollout"], engine: str = "vllm", **actor: Any
) -> Config:
    return read_config(
        {
            "cluster": {"component_placement": HYBRID | {"rollout": rollout}},
            "algorithm": {"name": "grpo", "prompts": 8, "samples_per_prompt": 4},
            "env": {"task": "arithmetic", "enable_offload": True},
            "rollout": {
                "engine": engine,
                "kv_cache_memory": "1GiB",
                "enable_offload": True,
            },
            "actor": {"model": LLAMA_8B, "enable_offload": True, **actor},
        }
    )


def planned(
    config: Config, kind: str = "cuda", nodes: int = 1
) -> tuple[Plan, MemoryLedger]:
    layout = make_plan(config, Topology.uniform(nodes, 4, kind, 80 << 30))
    return layout, memory_case(layout, config).ledger()


def in_sync(
    ledger: MemoryLedger, accelerator: int, component: str, part: Part = Part.SYNC
) -> int:
    """Bytes that are there during the sync."""
    account = next(a for a in ledger.accelerators if accelerator in a.numbers)
    (load,) = (
        at
        for at in account.loads
        if at.moment.stage == "sync" and not at.moment.entering
    )
    return sum(
        h.size_bytes for h in load.holds if h.component == component and h.part is part
    )


def test_gpus_get_windows_past_the_host_and_never_a_second_copy() -> None:
    layout, ledger = planned(config())
    assert layout.deliveries == (
        DeviceDelivery(
            readers=(0, 1, 2), owners=(1, None, None), actors=2, whole=False
        ),
    )
    # Two windows, each as large as the largest weight, and what vLLM makes anew
    in_windows = BUCKETS + 2 * EMBEDDING + EMBEDDING
    assert in_sync(ledger, 3, "rollout") == in_windows
    assert in_sync(ledger, 3, "rollout", Part.PARAMETERS) > 4 * in_windows
    assert in_sync(ledger, 0, "actor") == BUCKETS
    assert (
        ledger.hosts[0].loads[-1].holds[-1].size_bytes < 64 << 20
    )  # channels, and no buffer of weights


def test_windows_are_of_the_type_that_the_actor_computes_in() -> None:
    _, ledger = planned(config(compute="fp32"))
    # The engine itself has bfloat16
    assert in_sync(ledger, 3, "rollout") == BUCKETS + 2 * 2 * EMBEDDING + EMBEDDING


def test_the_transformers_engine_has_one_window_at_a_time() -> None:
    _, ledger = planned(config(engine="transformers"))
    assert in_sync(ledger, 3, "rollout") == BUCKETS + EMBEDDING


def test_windows_are_at_most_all_weights() -> None:
    """Those of a small model fit into one window."""
    small = LLAMA_8B | {"hidden_size": 512, "num_hidden_layers": 2}
    small |= {"intermediate_size": 1024, "vocab_size": 32_000}
    _, ledger = planned(config(engine="transformers", model=small))
    weights = in_sync(ledger, 3, "rollout", Part.PARAMETERS)
    assert 64 << 20 < weights < 256 << 20
    assert in_sync(ledger, 3, "rollout") == BUCKETS + weights


def test_an_engine_of_ones_own_gets_a_second_copy_which_is_counted() -> None:
    """It loads all weights in one call, so they are there until the last one is loaded."""
    layout, ledger = planned(config(engine="package.module:Engine"))
    assert layout.deliveries == (
        DeviceDelivery(readers=(0, 1, 2), owners=(1, None, None), actors=2),
    )
    weights = in_sync(ledger, 3, "rollout", Part.PARAMETERS)
    assert in_sync(ledger, 3, "rollout") == weights + EMBEDDING


@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        ("cuda", {"through_host": True}),
        ("cuda", {"mode": "lora"}),
        ("cuda", {"mode": "delta"}),
        ("emulated", {}),
    ],
    ids=str,
)
def test_the_other_transports_go_over_a_buffer_of_the_node(
    kind: str, sync: dict[str, object]
) -> None:
    layout, ledger = planned(config(sync=sync, lora_rank=8), kind)
    assert layout.deliveries == (Delivery(readers=(0, 1, 2), near=(0, 1)),)
    assert in_sync(ledger, 3, "rollout") == EMBEDDING


def test_an_engine_over_several_gpus_takes_windows_and_never_a_second_copy() -> None:
    layout, ledger = planned(config(rollout="0-3:0-1"))
    assert layout.deliveries == (
        DeviceDelivery(
            readers=(0, 1),
            owners=(0, 1, None, None),
            actors=2,
            parts=(2, 2),
            whole=False,
        ),
    )
    anew = EMBEDDING // 2  # of what the engine makes anew
    assert (
        in_sync(ledger, 1, "rollout")
        == in_sync(ledger, 3, "rollout")
        == BUCKETS + 2 * EMBEDDING + anew
    )
    assert not any(
        HostPart.BUCKETS in kept
        for f in ledger.footprints["rollout"]
        for kept in f.host.values()
    )


def test_engines_ahead_take_their_weights_from_the_host() -> None:
    written = config()
    ahead = dataclasses.replace(
        written,
        cluster=dataclasses.replace(
            written.cluster,
            component_placement={"actor": "0-1", "env": "2", "rollout": "2-3"},
        ),
        algorithm=dataclasses.replace(written.algorithm, max_staleness=1),
    )
    assert planned(ahead)[0].deliveries == (Delivery(readers=(0, 1), near=(0, 1)),)


def test_factors_have_a_buffer_of_their_own_and_need_no_merging() -> None:
    shared = {}
    for mode in ("all", "trainable", "lora"):
        _, ledger = planned(config(lora_rank=8, sync={"mode": mode}), "emulated")
        holds = ledger.hosts[0].loads[-1].holds
        shared[mode] = max(h.size_bytes for h in holds if h.component == "weights")
        merged = in_sync(ledger, 0, "actor") - BUCKETS
        assert (merged > 0) == (mode != "lora")
    assert (
        shared["all"]
        < shared["lora"]
        < 1.05 * shared["all"]
        < shared["trainable"]
        < 2 * shared["all"]
    )


def test_an_engine_with_factors_beside_its_weights_gets_and_holds_them_alone() -> None:
    sync = {"mode": "adapter"}
    plan, ledger = planned(config(lora_rank=8, sync=sync), "emulated")
    _, merged = planned(config(lora_rank=8, sync={"mode": "lora"}), "emulated")
    of_engine = ledger.footprints["rollout"][0].held[Residency.WEIGHTS]
    factors = of_engine[Part.ADAPTER]
    weights = of_engine[Part.PARAMETERS]
    assert 0 < 20 * factors < weights
    assert ledger.part_bytes("rollout", Part.ADAPTER) == factors
    assert merged.part_bytes("rollout", Part.ADAPTER) == 0
    (sent,) = count_traffic(plan, ledger).weights_bytes.values()
    (all_sent,) = count_traffic(plan, merged).weights_bytes.values()
    assert sent * weights == all_sent * factors
    # vLLM has buffers of rank 16 for factors of rank 9
    _, wider = planned(config(lora_rank=9, sync=sync), "emulated")
    assert wider.part_bytes("rollout", Part.ADAPTER) == 2 * factors


def test_a_probe_gathers_weights_during_the_sync() -> None:
    def gathered(**sync: object) -> int:
        return in_sync(planned(config(sync=sync))[1], 0, "actor", Part.GATHERED)

    assert gathered(verify="logprobs", verify_every=2) > 0
    assert gathered(verify="logprobs") == gathered(verify_every=2) == 0


def test_what_was_sent_to_another_node_is_kept_to_send_what_changed() -> None:
    def kept(rollout: str, mode: str) -> int:
        _, ledger = planned(
            config(rollout=rollout, sync={"mode": mode}), "emulated", nodes=2
        )
        holds = ledger.hosts[0].loads[-1].holds
        return sum(hold.size_bytes for hold in holds if hold.part is HostPart.SENT)

    layout, ledger = planned(
        config(rollout="1-5", sync={"mode": "delta"}), "emulated", nodes=2
    )
    assert [delivery.near for delivery in layout.deliveries] == [(0, 1), ()]
    weights = in_sync(ledger, 4, "rollout", Part.PARAMETERS)
    assert weights <= kept("1-5", "delta") <= 1.001 * weights, (
        "of both ranks together, once the model"
    )
    assert kept("1-3", "delta") == kept("1-5", "all") == 0


@pytest.mark.parametrize(("security", "taken"), [("encrypted", 3), ("password", 2)])
def test_buckets_on_their_way_to_another_node_are_on_both_hosts(
    security: str, taken: int
) -> None:
    """Two of each actor rank; of two engines of a node one takes them."""

    def held(rollout: str, part: HostPart) -> list[int]:
        job = config(rollout=rollout, sync={"mode": "trainable"}, lora_rank=8)
        job = dataclasses.replace(
            job,
            cluster=dataclasses.replace(
                job.cluster,
                comm=dataclasses.replace(job.cluster.comm, security=security),
            ),
        )
        _, ledger = planned(job, "emulated", nodes=2)
        loads = [
            next(
                at
                for at in a.loads
                if at.moment.stage == "sync" and not at.moment.entering
            )
            for a in ledger.hosts
        ]
        return [
            sum(hold.size_bytes for hold in load.holds if hold.part is part)
            for load in loads
        ]

    assert held("1-3", HostPart.STREAMED) == held("1-3", HostPart.TAKEN) == [0]
    assert held("4-5", HostPart.STREAMED) == [2 * 2 * BUCKET_BYTES, 0]
    assert held("4-5", HostPart.TAKEN) == [0, taken * BUCKET_BYTES]
