"""The ledger: known jobs, lookups, folding, transitions, hosts and measured numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest

from rlplace.config.blocks.language_model import FrozenConfig, TextRolloutConfig
from rlplace.contract.planning import memory_case
from rlplace.errors import ConfigError
from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.machines.topology import Node, Run
from rlplace.placement.memory.demands import (
    Demand,
    EngineDemand,
    HostPart,
    Part,
    Placed,
    ScoringDemand,
    SimulatorDemand,
    TrainingDemand,
)
from rlplace.placement.memory.formulas import CONTEXT_BYTES, GRAPHS_BYTES
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.memory.model import read_model
from rlplace.placement.memory.policy_demands import PolicyRolloutDemand
from rlplace.placement.memory.records import (
    read_measurements,
    record_measurements,
    render_ledger,
)
from rlplace.placement.schedule import Needs, Residency, text_needs
from tests.unit.placement.memory_cases import (
    COMPONENTS,
    GIB,
    PENDULUM,
    RLHF,
    at,
    colocated_8b,
    held,
    llama_3,
    ppo,
    ppo_case,
    rlhf,
    rlhf_demands,
    spread_70b,
)

OFF, WEIGHTS, FULL = Residency


def alone(
    block: dict[str, object],
    topology: Topology,
    demands: dict[str, Demand],
    needs: Needs = RLHF,
) -> MemoryCase:
    placement = HybridComponentPlacement({"component_placement": block}, topology)
    return MemoryCase(placement=placement, needs=needs, offload={}, demands=demands)


def test_everything_asleep_when_not_needed_fits_on_eight() -> None:
    ledger = colocated_8b().ledger()
    assert ledger.fits
    (account,) = ledger.accelerators
    assert str(account.numbers) == "0-7"
    # 16 bytes for each of 8,030,261,248 or 7,504,928,768 parameters over 8 ranks, from which all else in learn grows.
    learn = at(account, "learn 2")
    state = {Part.PARAMETERS: 4, Part.OPTIMIZER: 8}
    for component, parameters, turn in (
        ("actor", 8_030_261_248, learn),
        ("critic", 7_504_928_768, at(account, "learn 1")),
    ):
        for part, each in state.items():
            assert held(turn, component, part) == pytest.approx(
                parameters * each / 8, rel=1e-4
            )
    assert held(learn, "critic", Part.PARAMETERS) == 0
    assert (
        held(learn, "rollout", Part.KV_CACHE)
        == held(learn, "rollout", Part.PARAMETERS)
        == 0
    )
    # The engine never takes more than its share, and the context of its process, from which vLLM begins to count.
    rollout = at(account, "rollout")
    taken = rollout.of("rollout") - held(rollout, "rollout", Part.CONTEXT)
    assert taken == pytest.approx(0.6 * 80 * GIB, rel=1e-6)
    assert held(rollout, "actor", Part.PARAMETERS) == 0


def test_70b_on_48_fits_only_with_the_optimizer_on_the_hosts() -> None:
    """16 bytes x 70.55e9 / 16 ranks are 70.6 GB before the first activation: more than is left of 80 GiB."""
    without, with_hosts = spread_70b().ledger(), spread_70b(on_host=True).ledger()
    assert not without.fits
    assert with_hosts.fits
    assert [str(a.numbers) for a in without.accelerators] == [
        "0-15",
        "16-31",
        "32-39",
        "40-47",
    ]
    assert [a.fits for a in without.accelerators] == [False, False, True, True]
    actor = at(without.account(0), "learn")
    state = sum(
        held(actor, "actor", part) for part in (Part.PARAMETERS, Part.OPTIMIZER)
    )
    assert state == pytest.approx(14 * 70_553_706_496 / 16, rel=1e-4)
    (node,) = [a for a in with_hosts.hosts if 0 in a.numbers]
    state = held(node.worst, "actor", HostPart.OPTIMIZER)
    assert state == pytest.approx(8 * 12 * 70_553_706_496 / 16, rel=1e-4)


def test_only_one_component_loads_at_a_time_at_the_start() -> None:
    (account,) = colocated_8b(offload=False).ledger().accelerators
    start = at(account, "start")
    assert [h.component for h in start.holds if h.part is Part.LOADING] == ["actor"]
    assert held(start, "actor", Part.LOADING) == 128256 * 4096 * 4


def test_hosts_hold_the_copies_of_what_sleeps() -> None:
    (host,) = colocated_8b().ledger().hosts
    rollout, learn = at(host, "rollout"), at(host, "learn 2")
    assert held(rollout, "actor", HostPart.OFFLOADED) == pytest.approx(
        12 * 8_030_261_248, rel=1e-4
    )
    assert held(learn, "actor", HostPart.OFFLOADED) == 0
    # What was pinned once stays in the pool.
    assert held(learn, "actor", HostPart.POOL) >= held(
        rollout, "actor", HostPart.OFFLOADED
    )
    assert held(learn, "reference", HostPart.OFFLOADED) == pytest.approx(
        2 * 8_030_261_248, rel=1e-4
    )


@pytest.mark.parametrize(("level", "copies"), [(1, 8), (2, 0)])
def test_sleep_level_one_copies_the_weights_of_every_engine(
    level: int, copies: int
) -> None:
    ledger = colocated_8b().changed(["rollout"], sleep_level=level).ledger()
    assert (
        held(at(ledger.hosts[0], "learn 2"), "rollout", HostPart.SLEEP)
        == copies * 2 * 8_030_261_248
    )


def test_the_host_of_a_cut_engine_holds_two_buckets_of_its_weights() -> None:
    """Of 64 MiB, or of the largest weight, in float32."""
    placed = {**dict.fromkeys(COMPONENTS, "0-7"), "rollout": "0-3:0,4-7:1"}
    case = rlhf(placed, Topology.uniform(1, 8, "cuda", 80 * GIB), rlhf_demands("8b"))
    host = case.ledger().hosts[0]
    buckets = 2 * 2 * 128256 * 4096 * 4
    assert [
        held(at(host, stage), "rollout", HostPart.BUCKETS)
        for stage in ("sync", "learn 2")
    ] == [buckets, 0]
    (whole,) = colocated_8b().ledger().hosts
    assert held(at(whole, "sync"), "rollout", HostPart.BUCKETS) == 0


def test_todays_job() -> None:
    ledger = ppo_case().ledger()
    # Two trunks 4-64-64-1 and one log deviation, whole on each of 8 ranks.
    buffers = (1 + 2 * 4) * 8
    whole = 2 * (64 * 4 + 64 + 64 * 64 + 64 + 64 + 1) + 1
    moments, small = 2 * whole * 4 + 4, whole * 4 + buffers
    assert [ledger.bytes("actor", r) for r in Residency] == [0, small, small + moments]
    assert [ledger.host_bytes("actor", r) for r in Residency] == [
        small + moments,
        moments,
        0,
    ]
    assert [ledger.bytes("rollout", r) for r in Residency] == [
        0,
        small,
        small + (64 << 20),
    ]
    assert [ledger.bytes("env", r) for r in Residency] == [0, 0, 256 << 20]
    assert str(ledger.account(0).worst.moment) == "rollout"
    assert ledger.account(0).margin_bytes == 16 * GIB - (256 << 20)
    # The gradient, of which each rank sends a copy to each, and gets theirs.
    assert (
        held(at(ledger.account(0), "learn"), "actor", Part.GRADIENTS)
        == (1 + 2 * 8) * whole * 4
    )
    assert ledger.fits


def test_the_simulators_and_the_policy_of_an_evaluation_are_counted() -> None:
    plan, config = ppo()
    runner = dataclasses.replace(config.runner, eval_every=5)
    evaluated = dataclasses.replace(config, runner=runner)
    without = memory_case(plan, config, PENDULUM)
    sampler = without.demands["rollout"]
    assert isinstance(sampler, PolicyRolloutDemand)
    ledger = memory_case(plan, evaluated, PENDULUM).ledger()
    for account, played in ((ledger.account(7), 256 << 20), (ledger.account(0), 0)):
        load = at(account, "rollout")
        assert held(load, "rollout", Part.SIMULATOR) == played
    (host,) = ledger.hosts
    copies = 2 * sampler.policy.weights_bytes
    assert held(at(host, "rollout"), "rollout", HostPart.EVALUATION) == copies
    assert held(at(host, "learn"), "rollout", HostPart.EVALUATION) == 0
    # An evaluation on more environments than an env rank has takes more
    few = dataclasses.replace(
        evaluated, env=dataclasses.replace(evaluated.env, total_num_envs=16)
    )
    assert few.evaluation_memory(env_ranks=4) == 4 * (256 << 20)
    # A run that does not evaluate is counted as before
    plain = without.ledger()
    assert held(at(plain.account(7), "rollout"), "rollout", Part.SIMULATOR) == 0


def test_a_gpu_has_a_context_that_no_worker_reports() -> None:
    ledger = ppo_case(kind="cuda").ledger()
    account = ledger.account(0)
    assert held(at(account, "rollout"), "actor", Part.CONTEXT) == 512 << 20
    assert (
        held(at(account, "rollout"), "actor", Part.COMMUNICATOR) == 512 << 20
    )  # its own, and that of the sync
    assert ledger.bytes("actor", OFF) == 0
    assert (
        held(at(account, "rollout"), "env", Part.CONTEXT) == 0
    )  # simulators here do not touch the GPU


def test_a_sync_past_the_host_holds_buckets_where_they_are_filled_and_a_copy_where_it_arrives() -> (
    None
):
    for kind, past_host in (("cuda", 1), ("emulated", 0)):
        plan, config = ppo({"actor": "0-5", "env": "0-3", "rollout": "4-7"}, kind=kind)
        case = memory_case(plan, config, PENDULUM)
        sampler = case.demands["rollout"]
        assert isinstance(sampler, PolicyRolloutDemand)
        copy, account = sampler.policy.weights_bytes, case.ledger().account(7)
        assert held(at(account, "sync"), "rollout", Part.SYNC) == past_host * (
            copy + 2 * copy
        )
        assert held(at(account, "sync"), "rollout", Part.COMMUNICATOR) == past_host * (
            256 << 20
        )
        assert (
            held(at(case.ledger().account(4), "sync"), "actor", Part.SYNC)
            == past_host * 2 * copy
        )


def test_measured_numbers_win() -> None:
    plan, config = ppo()
    record = json.loads(
        json.dumps(record_measurements({"actor": {FULL: 3 * GIB, OFF: 7}}, {}))
    )
    ledger = memory_case(plan, config, PENDULUM, read_measurements(record)).ledger()
    formula = memory_case(plan, config, PENDULUM).ledger()
    assert [ledger.bytes("actor", r) for r in Residency] == [
        7,
        formula.bytes("actor", WEIGHTS),
        3 * GIB,
    ]
    assert held(at(ledger.account(0), "learn"), "actor", Part.MEASURED) == 3 * GIB
    assert (
        held(at(ledger.account(0), "learn"), "actor", Part.GRADIENTS) > 0
    )  # beside what is held
    assert ledger.measured == ("actor",)
    assert "measured: actor" in render_ledger(ledger)


AT = "memory.json.components"


@pytest.mark.parametrize(
    ("components", "problems"),
    [
        (None, [("unknown-residency", f"{AT}.")]),
        (
            {"actor": {"ful": 1, "off": -1}, "env": 5},
            [
                ("unknown-residency", f"{AT}.actor"),
                ("bad-size", f"{AT}.actor.off"),
                ("unknown-residency", f"{AT}.env"),
            ],
        ),
        (
            {"actor": {"off": True, "full": 1.5}},
            [("bad-size", f"{AT}.actor.off"), ("bad-size", f"{AT}.actor.full")],
        ),
    ],
)
def test_a_record_that_cannot_be_read_says_all_that_is_wrong(
    components: object, problems: list[tuple[str, str]]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_measurements(
            {"rlplace_memory": 1, "components": components}, key="memory.json"
        )
    assert [(p.code, p.key) for p in caught.value.problems] == problems
    assert all(p.why and p.fix for p in caught.value.problems)


@pytest.mark.parametrize("record", [None, {"rlplace_memory": 2}])
def test_what_is_no_record_is_not_read(record: object) -> None:
    with pytest.raises(ConfigError, match="not-measurements"):
        read_measurements(record)


def test_what_is_not_known_is_counted_as_nothing_and_said() -> None:
    ledger = alone({"rollout": "0"}, Topology.uniform(1, 2, "cuda"), {}).ledger()
    assert ledger.notes == ("nothing is known of rollout: counted as 0 bytes",)
    assert ledger.account(0).margin_bytes is None
    assert ledger.fits
    assert "memory not known" in render_ledger(ledger)
    with pytest.raises(KeyError, match="no component uses accelerator 1"):
        ledger.account(1)


SMALL, LARGE = (
    Topology.uniform(1, 8, "cuda", memory * GIB).nodes[0] for memory in (40, 80)
)
RUNS = (
    Run(count=6, product="L", memory_bytes=80 * GIB),
    Run(count=2, product="S", memory_bytes=40 * GIB),
)


@pytest.mark.parametrize(
    ("nodes", "place", "found"),
    [
        (
            (SMALL, dataclasses.replace(LARGE, rank=1, first=8)),
            "0-15",
            [("0-7", 40), ("8-15", 80)],
        ),
        ((dataclasses.replace(SMALL, runs=RUNS),), "0-7", [("0-5", 80), ("6-7", 40)]),
    ],
    ids=["two nodes", "one node"],
)
def test_accelerators_of_other_memory_are_accounted_apart(
    nodes: tuple[Node, ...], place: str, found: list[tuple[str, int]]
) -> None:
    ledger = alone(
        {"rollout": place}, Topology(nodes), {"rollout": rlhf_demands("8b")["rollout"]}
    ).ledger()
    assert [
        (str(a.numbers), a.capacity_bytes // GIB) for a in ledger.accelerators
    ] == found
    assert [str(a.numbers) for a in ledger.hosts] == [str(node.rank) for node in nodes]
    assert [
        (at(a, "rollout").total_bytes - CONTEXT_BYTES) / a.capacity_bytes
        for a in ledger.accelerators
    ] == pytest.approx([0.6, 0.6], rel=1e-6)
    assert ledger.tightest is min(
        ledger.accelerators, key=lambda account: account.capacity_bytes
    )


def test_nodes_without_ranks_are_left_out() -> None:
    case = alone(
        {"env": "1-3"},
        Topology.uneven([1, 2, 0, 1, 0], "cuda", GIB),
        {"env": SimulatorDemand(accelerator_bytes=5, host_bytes=3)},
    )
    ledger = case.ledger()
    assert [(str(a.numbers), a.worst.total_bytes) for a in ledger.hosts] == [
        ("1", 2 * 3),
        ("3", 3),
    ]
    assert [str(a.numbers) for a in ledger.accelerators] == ["1-3"]


def test_a_cluster_without_accelerators_has_hosts() -> None:
    case = alone(
        {"agent": {"node_group": "node", "placement": "0-1"}},
        Topology.uneven([0, 0]),
        {"agent": SimulatorDemand(host_bytes=5)},
        text_needs(("agent",)),
    )
    ledger = case.ledger()
    assert ledger.accelerators == ()
    assert ledger.tightest is None
    assert [(str(a.numbers), a.worst.total_bytes) for a in ledger.hosts] == [("0-1", 5)]


def test_declared_tensor_parallelism_cuts_an_engine_of_several_ranks() -> None:
    block = {"rollout": {"placement": "0-7", "tensor_parallel_size": 4}}
    case = alone(
        block,
        Topology.uniform(1, 8, "cuda", 80 * GIB),
        {"rollout": rlhf_demands("8b")["rollout"]},
    )
    rollout = at(case.ledger().accelerators[0], "rollout")
    assert held(rollout, "rollout", Part.PARAMETERS) == pytest.approx(
        2 * 8_030_261_248 / 4, rel=1e-4
    )


def demand(**changes: object) -> TrainingDemand:
    trained = rlhf_demands("8b")["actor"]
    assert isinstance(trained, TrainingDemand)
    return dataclasses.replace(
        trained, block=dataclasses.replace(trained.block, **changes)
    )


def working(
    trained: TrainingDemand | ScoringDemand, ranks: int, stage: str
) -> dict[Part, int]:
    placed = Placed(
        ranks=ranks, accelerators_per_rank=1, memory_bytes=80 * GIB, kind="cuda"
    )
    return dict(trained.footprint(placed).working[stage])


def test_zero_stages_share_more_and_more() -> None:
    placed = Placed(
        ranks=8, accelerators_per_rank=1, memory_bytes=80 * GIB, kind="cuda"
    )
    parameters = 8_030_261_248
    found = [demand(zero_stage=stage).footprint(placed) for stage in range(4)]
    full, learn = [f.held[FULL] for f in found], [f.working["learn"] for f in found]
    assert [f[Part.PARAMETERS] / parameters for f in full] == pytest.approx(
        [4, 4, 0.5, 0.5], rel=1e-4
    )  # a run never has them whole
    assert [f[Part.OPTIMIZER] / parameters for f in full] == pytest.approx(
        [8, 1, 1, 1], rel=1e-4
    )
    # Beside the float32 shards: the head's gradient in bfloat16, and a layer that is being reduced in float32.
    passing = 2 * 128_256 * 4096 + 4 * 218_112_000
    assert [(f[Part.GRADIENTS] - passing) / parameters for f in learn] == pytest.approx(
        [4, 4, 0.5, 0.5], rel=1e-4
    )


def test_a_layer_is_gathered_for_its_turn_or_from_forward_to_backward() -> None:
    layer, outside = 218_112_000, 2 * 128_256 * 4096 + 4096
    assert working(demand(zero_stage=2), 8, "infer")[Part.GATHERED] == 2 * 8_030_261_248
    assert working(demand(), 8, "infer")[Part.GATHERED] == 2 * (
        2 * outside + 2 * layer
    )  # and the buffer it came in
    assert working(demand(), 1, "infer")[Part.GATHERED] == 2 * (
        outside + layer
    )  # nothing is on its way


def test_lora_trains_little_and_keeps_the_base_as_it_is_computed() -> None:
    placed = Placed(
        ranks=1, accelerators_per_rank=1, memory_bytes=80 * GIB, kind="cuda"
    )
    footprint = demand(lora_rank=16).footprint(placed)
    h, keys, width = 4096, 1024, 14336
    factors = 32 * 16 * (2 * (h + h) + 2 * (h + keys) + 3 * (h + width))
    assert footprint.held[FULL][Part.PARAMETERS] == 2 * 8_030_261_248 + 4 * factors
    assert footprint.held[FULL][Part.OPTIMIZER] == 8 * factors
    assert footprint.working["learn"][Part.GRADIENTS] == 4 * factors


def test_without_checkpoints_every_layer_is_kept() -> None:
    kept, recomputed = (
        working(demand(checkpointing=c), 8, "learn")[Part.ACTIVATIONS]
        for c in (False, True)
    )
    # The head: its norm keeps float32, and there are four states; 512 bytes of numbers for each token.
    head = 4096 * 4 + 4 * 4096 * 2 + 512
    assert kept == 8192 * (32 * 200_840 + head)
    # The second layer is recomputed: of it all is there, and of half of what its projections saved the gradients.
    flow = 2 * 14336 + 4096 + 1024
    assert recomputed == 8192 * (30 * 4096 * 2 + 200_840 + flow * 2 + 512)


def test_float32_on_a_gpu_repeats_keys_and_values_for_every_query_head() -> None:
    """32 query heads, 8 of keys, each of 128 numbers."""
    for checkpointing, layers in ((False, 32), (True, 1)):
        trained = demand(checkpointing=checkpointing, compute="fp32")
        here, emulated = (
            trained.footprint(
                Placed(
                    ranks=8, accelerators_per_rank=1, memory_bytes=80 * GIB, kind=kind
                )
            ).working["learn"][Part.ACTIVATIONS]
            for kind in ("cuda", "emulated")
        )
        assert here - emulated == 8192 * layers * 2 * (32 - 8) * 128 * 4


def test_ranks_that_exchange_tokens_for_heads_keep_what_attention_made_and_what_they_got() -> (
    None
):
    placed = Placed(
        ranks=8,
        accelerators_per_rank=1,
        context_parallel=2,
        memory_bytes=80 * GIB,
        kind="cuda",
    )
    kept, recomputed = (
        demand(checkpointing=c).footprint(placed).working["learn"][Part.ACTIVATIONS]
        for c in (False, True)
    )
    layer, head, flow = (
        200_840 + 4096 * 2,
        4096 * 4 + 4 * 4096 * 2 + 512,
        2 * 14336 + 4096 + 1024,
    )
    assert kept == 4096 * (32 * layer + head)
    assert recomputed == 4096 * (30 * 4096 * 2 + layer + flow * 2 + 512)


def test_a_critic_recomputes_a_layer_where_an_actor_has_logits() -> None:
    critic = rlhf_demands("8b")["critic"]
    assert isinstance(critic, TrainingDemand)
    learn = working(critic, 8, "learn")
    assert learn[Part.LOGITS] == 0
    flow = 2 * 14336 + 4096 + 1024  # gradients of half of what its projections saved
    # Of 32 layers one is over and being reduced, one recomputed.
    assert learn[Part.ACTIVATIONS] == 8192 * (30 * 4096 * 2 + 200_840 + flow * 2 + 512)


def test_tensor_parallel_ranks_hold_parts_and_keep_two_groups() -> None:
    placed = Placed(
        ranks=8,
        accelerators_per_rank=1,
        tensor_parallel=4,
        memory_bytes=80 * GIB,
        kind="cuda",
    )
    footprint = demand().footprint(placed)
    assert footprint.held[OFF][Part.COMMUNICATOR] == 2 * (256 << 20)
    assert footprint.held[WEIGHTS][Part.PARAMETERS] == pytest.approx(
        4 * 8_030_261_248 / 8, rel=0.001
    )


def test_a_frozen_model_is_whole_on_each_rank_unless_sharded() -> None:
    reference = rlhf_demands("8b")["reference"]
    assert isinstance(reference, ScoringDemand)
    whole = dataclasses.replace(
        reference, block=FrozenConfig(micro_batch=4, sharded=False)
    )
    placed = Placed(
        ranks=8, accelerators_per_rank=1, memory_bytes=80 * GIB, kind="cuda"
    )
    assert whole.footprint(placed).held[FULL][Part.PARAMETERS] == 2 * 8_030_261_248
    assert working(whole, 8, "infer")[Part.GATHERED] == 0
    assert working(reference, 8, "infer")[Part.GATHERED] > 0


def test_a_cache_of_given_size_and_one_without_room() -> None:
    case = colocated_8b()
    token = 2 * 32 * 8 * 128 * 2
    given = case.changed(["rollout"], kv_cache_memory=2048 * token).ledger()
    assert (
        held(at(given.accelerators[0], "rollout"), "rollout", Part.KV_CACHE)
        == 2048 * token
    )
    assert not given.lacking
    tight = case.changed(["rollout"], gpu_memory_utilization=0.2).ledger()
    assert not tight.fits
    assert tight.lacking == (
        ("rollout", "the KV cache holds 0 tokens, the longest sequence has 2048"),
    )
    assert "the KV cache holds 0 tokens" in render_ledger(tight)


def test_an_engine_of_ones_own_says_what_a_step_takes() -> None:
    def workspace(**block: object) -> int:
        ledger = (
            colocated_8b().changed(["rollout"], kv_cache_memory=GIB, **block).ledger()
        )
        return ledger.footprints["rollout"][0].working["rollout"][Part.WORKSPACE]

    assert workspace(engine="engines:Mine", workspace_memory=3 << 20) == 3 << 20
    assert workspace(engine="engines:Mine") == workspace(engine="vllm") > 3 << 20


def test_a_share_of_unknown_memory_is_not_refused() -> None:
    ledger = alone(
        {"rollout": "0"},
        Topology.uniform(1, 1),
        {"rollout": rlhf_demands("8b")["rollout"]},
    ).ledger()
    assert not ledger.lacking
    # Emulated accelerators have neither contexts nor captured graphs.
    assert {h.part for h in at(ledger.account(0), "rollout").holds} == {
        Part.PARAMETERS,
        Part.WORKSPACE,
    }
    assert "how much there is, is not known" in render_ledger(ledger)


def test_many_kinds_of_accelerator_are_cut_short() -> None:
    topology = Topology.uneven([1] * 12, "cuda", 80 * GIB)
    nodes = tuple(
        dataclasses.replace(n, memory_bytes=n.memory_bytes + n.rank)
        for n in topology.nodes
    )
    case = alone(
        {"env": "all"},
        Topology(nodes),
        {"env": SimulatorDemand(accelerator_bytes=5, host_bytes=3)},
    )
    text = render_ledger(case.ledger())
    assert "and 4 more kinds of accelerator" in text
    assert "and 4 more kinds of node" in text
    assert "5 bytes" in text


@pytest.mark.parametrize(
    ("cut", "eager", "published_mib"),
    # NVIDIA-NeMo/RL issue 223: asleep with 1 and 2 accelerators, by the driver
    [(1, True, 774), (2, True, 2440)],
)
def test_what_an_engine_keeps_while_it_sleeps_is_near_what_was_published(
    cut: int, eager: bool, published_mib: int
) -> None:
    kept = sum(asleep(cut, enforce_eager=eager).values())
    assert 0.97 <= kept / (published_mib << 20) <= 1.11


def test_captured_graphs_stay_while_an_engine_sleeps_that_is_not_eager() -> None:
    eager = asleep(1, enforce_eager=True)[Part.ASLEEP]
    assert asleep(1, enforce_eager=False)[Part.ASLEEP] - eager == GRAPHS_BYTES
    assert asleep(1, engine="transformers")[Part.ASLEEP] == eager


def asleep(cut: int, **block: Any) -> Mapping[Part, int]:
    placed = Placed(
        ranks=8,
        accelerators_per_rank=cut,
        tensor_parallel=cut,
        memory_bytes=80 * GIB,
        kind="cuda",
    )
    demand = EngineDemand(
        model=read_model(llama_3("8b")),
        block=TextRolloutConfig(**{"engine": "vllm", **block}),
        sequence_length=2048,
    )
    return demand.footprint(placed).held[OFF]


def test_what_torch_reserves_beside_the_tensors_of_a_pass_has_a_line_of_its_own() -> (
    None
):
    demand = rlhf_demands("8b")["actor"]
    placed = Placed(
        ranks=8, accelerators_per_rank=1, memory_bytes=80 * GIB, kind="cuda"
    )
    learn = demand.footprint(placed).working["learn"]
    passing = learn[Part.GATHERED] + learn[Part.ACTIVATIONS] + learn[Part.LOGITS]
    assert learn[Part.FRAGMENTS] == passing * 8 // 100
    assert learn[Part.WORKSPACE] == 2 * (32 << 20)
    # What emulates an accelerator has neither.
    emulated = dataclasses.replace(placed, kind="emulated")
    assert not {Part.FRAGMENTS, Part.WORKSPACE} & set(
        demand.footprint(emulated).working["learn"]
    )


def test_penalties_take_memory_that_no_dummy_step_of_vllm_measures() -> None:
    """Counts of 64 bits for each score: beside the share, since the cache is as large as without them."""

    def engine(**block: Any) -> tuple[int, int]:
        demand = EngineDemand(
            model=read_model(llama_3("8b")),
            block=TextRolloutConfig(engine="vllm", step_sequences=1024, **block),
            sequence_length=2048,
        )
        placed = Placed(
            ranks=1, accelerators_per_rank=1, memory_bytes=80 * GIB, kind="cuda"
        )
        footprint = demand.footprint(placed)
        cache = footprint.held[FULL][Part.KV_CACHE]
        return footprint.working["rollout"][Part.WORKSPACE], cache

    plain, cache = engine()
    assert engine(min_tokens=5) == (plain, cache)
    assert engine(repetition_penalty=1.1) == (plain + 1024 * 128256 * 10, cache)
