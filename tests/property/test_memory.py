"""What must hold for every ledger: more never needs less, folding loses nothing, releases come first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.config.blocks.language_model import FrozenConfig, TextRolloutConfig
from rlplace.config.blocks.training import OptimizerConfig, TrainedConfig
from rlplace.errors import PlacementError
from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.memory.demands import (
    Demand,
    EngineDemand,
    Part,
    Placed,
    ScoringDemand,
    SimulatorDemand,
    TrainingDemand,
)
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.memory.model import read_model
from rlplace.placement.memory.records import (
    read_measurements,
    record_measurements,
    render_ledger,
)
from rlplace.placement.memory.solve import Knob, find_remedies, has_knob, solve
from rlplace.placement.schedule import Residency
from tests.unit.placement.memory_cases import COMPONENTS, RLHF

MIB = 1 << 20
# Components of the job, in the order their demands are drawn.
TRAINED, FROZEN = ("actor", "critic"), ("reference", "reward")


@st.composite
def models(draw: st.DrawFn):
    heads = draw(st.sampled_from([2, 4]))
    return read_model(
        {
            "model_type": draw(st.sampled_from(["llama", "qwen2", "qwen3", "gemma2"])),
            "vocab_size": draw(st.integers(1, 500)),
            "hidden_size": heads * draw(st.integers(1, 16)),
            "intermediate_size": draw(st.integers(1, 100)),
            "num_hidden_layers": draw(st.integers(1, 4)),
            "num_attention_heads": heads,
            "num_key_value_heads": draw(st.sampled_from([1, 2])),
        }
    )


SIZES = {"model": models(), "sequence_length": st.integers(1, 512)}
BATCHES = {"micro_batch": st.integers(1, 64), "token_budget": st.integers(1, 4096)}
TRAINING = st.builds(
    TrainedConfig,
    **BATCHES,
    weights=st.sampled_from(["fp32", "bf16"]),
    compute=st.sampled_from(["fp32", "bf16"]),
    optimizer=st.builds(
        OptimizerConfig,
        kind=st.sampled_from(["adamw", "adamw_master", "adamw_8bit"]),
        on_host=st.booleans(),
    ),
    zero_stage=st.sampled_from([0, 1, 2, 3]),
    checkpointing=st.booleans(),
    lora_rank=st.sampled_from([None, 1, 8]),
)
FROZEN_BLOCKS = st.builds(
    FrozenConfig, **BATCHES, sharded=st.booleans(), on_host=st.booleans()
)
ENGINES = st.builds(
    TextRolloutConfig,
    gpu_memory_utilization=st.integers(1, 100).map(lambda percent: percent / 100),
    kv_cache_memory=st.none() | st.integers(0, 8 * MIB),
    step_tokens=st.integers(1, 1024),
    sleep_level=st.sampled_from([1, 2]),
)
trained = st.builds(TrainingDemand, **SIZES, block=TRAINING, packed=st.booleans())
frozen = st.builds(ScoringDemand, **SIZES, block=FROZEN_BLOCKS, packed=st.booleans())
engines = st.builds(EngineDemand, **SIZES, block=ENGINES)


@st.composite
def placements(draw: st.DrawFn) -> HybridComponentPlacement:
    topology = Topology.uneven(
        draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        draw(st.sampled_from(["cuda", "emulated"])),
        draw(st.sampled_from([0, 4 * MIB, 4096 * MIB])),
    )
    block: dict[str, str] = {}
    for component in COMPONENTS:
        node = draw(st.sampled_from(topology.nodes))
        start = draw(st.integers(node.first, node.numbers.stop - 1))
        count = draw(st.integers(1, node.numbers.stop - start))
        ranks = draw(
            st.sampled_from(
                [n for n in range(1, 9) if n % count == 0 or count % n == 0]
            )
        )
        block[component] = f"{start}-{start + count - 1}:0-{ranks - 1}"
    return HybridComponentPlacement({"component_placement": block}, topology)


@st.composite
def cases(draw: st.DrawFn) -> MemoryCase:
    demands: dict[str, Demand] = {}
    demands |= {c: draw(trained) for c in TRAINED}
    demands |= {c: draw(frozen) for c in FROZEN}
    demands["rollout"] = draw(
        st.one_of(
            engines, st.builds(SimulatorDemand, accelerator_bytes=st.integers(0, MIB))
        )
    )
    return MemoryCase(
        placement=draw(placements()),
        needs=RLHF,
        offload={c: draw(st.booleans()) for c in COMPONENTS},
        demands=demands,
        measured={
            c: {Residency.FULL: draw(st.integers(0, MIB))}
            for c in COMPONENTS
            if draw(st.integers(0, 9)) == 0
        },
    )


@given(
    cases(),
    st.sampled_from(["micro_batch", "sequence_length", "token_budget"]),
    st.integers(1, 100),
)
def test_a_larger_batch_never_needs_less(
    case: MemoryCase, field: str, more: int
) -> None:
    larger = case
    for component, demand in case.demands.items():
        of = demand if field == "sequence_length" else getattr(demand, "block", None)
        if (now := getattr(of, field, None)) is not None:
            larger = larger.changed([component], **{field: now + more})
    before, after = case.ledger(), larger.ledger()
    for small, large in zip(before.accelerators, after.accelerators, strict=True):
        for a, b in zip(small.loads, large.loads, strict=True):
            assert a.total_bytes <= b.total_bytes


@given(cases(), st.integers(1, 99))
def test_a_larger_share_never_needs_less(case: MemoryCase, percent: int) -> None:
    engine = case.demands["rollout"]
    if not isinstance(engine, EngineDemand):
        return
    smaller, larger = (
        case.changed(["rollout"], gpu_memory_utilization=p / 100, kv_cache_memory=None)
        for p in (percent, percent + 1)
    )
    for a, b in zip(
        smaller.ledger().accelerators, larger.ledger().accelerators, strict=True
    ):
        assert a.worst.total_bytes <= b.worst.total_bytes


@given(cases())
def test_more_ranks_never_hold_more_each(case: MemoryCase) -> None:
    for component in TRAINED:
        few, many = (
            case.demands[component].footprint(
                Placed(
                    ranks=n, accelerators_per_rank=1, memory_bytes=0, kind="emulated"
                )
            )
            for n in (2, 4)
        )
        for residency in Residency:
            assert sum(many.held[residency].values()) <= sum(
                few.held[residency].values()
            )


@given(cases())
def test_folded_accelerators_hold_what_each_of_them_holds(case: MemoryCase) -> None:
    ledger, placement, schedule = case.ledger(), case.placement, case.schedule()
    used = {
        a
        for c in placement.components
        for slot in placement.slots(c)
        for a in slot.accelerators
    }
    assert used == {a for account in ledger.accelerators for a in account.numbers}
    for accelerator in used:
        node = placement.topology.node_of(accelerator)
        for stage in schedule.stages:
            expected = 0
            for component in placement.components:
                for slot in placement.slots(component):
                    if accelerator in slot.accelerators:
                        placed = Placed(
                            ranks=placement.world_size(component),
                            accelerators_per_rank=len(slot.accelerators),
                            tensor_parallel=len(slot.accelerators),
                            memory_bytes=node.memory_bytes,
                            kind=node.kind,
                        )
                        footprint = case.demands[component].footprint(placed)
                        footprint = footprint.corrected(
                            case.measured.get(component, {}), {}
                        )
                        expected += sum(
                            footprint.held[
                                schedule.residency[stage][component]
                            ].values()
                        )
            (enter,) = [
                load
                for load in ledger.account(accelerator).loads
                if load.moment.stage == stage
                and load.moment.entering
                and not load.moment.start
            ]
            assert enter.total_bytes == expected


@given(cases())
def test_a_stage_holds_at_least_what_its_entry_ends_with_and_every_ledger_renders(
    case: MemoryCase,
) -> None:
    ledger = case.ledger()
    text = render_ledger(ledger)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    for account in ledger.accelerators:
        loads = {str(load.moment): load for load in account.loads}
        for stage in case.schedule().stages:
            assert loads[stage].total_bytes >= loads[f"enter {stage}"].total_bytes
            assert all(hold.size_bytes > 0 for hold in loads[stage].holds)


@given(cases(), st.sampled_from(Knob), st.none() | st.sampled_from(COMPONENTS))
def test_what_is_solved_for_fits(
    case: MemoryCase, knob: Knob, component: str | None
) -> None:
    having = [
        c
        for c, demand in case.demands.items()
        if has_knob(demand, knob) and component in (None, c)
    ]
    if not having:
        with pytest.raises(PlacementError) as caught:
            solve(case, knob, component)
        assert caught.value.codes == ("nothing-to-solve",)
    elif case.ledger().accelerators[0].capacity_bytes:
        solution = solve(case, knob, component)
        assert solution is None or solution.case.ledger().fits


@settings(max_examples=settings().max_examples // 3)  # each tries many remedies
@given(cases())
def test_remedies_do_what_they_say(case: MemoryCase) -> None:
    for remedy in find_remedies(case):
        assert remedy.saves_bytes > 0
        ledger = remedy.case.ledger()
        assert remedy.enough == all(
            account.fits for account in (*ledger.accelerators, *ledger.hosts)
        )


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.dictionaries(st.sampled_from(Residency), st.integers(0)),
    )
)
def test_measurements_that_are_written_are_read_again(
    found: dict[str, dict[Residency, int]],
) -> None:
    assert (
        read_measurements(record_measurements(found, dict.fromkeys(found, 2))) == found
    )


@given(cases())
def test_an_engine_stays_within_its_share_where_that_has_room(case: MemoryCase) -> None:
    engine = case.demands["rollout"]
    if not isinstance(engine, EngineDemand) or engine.block.kv_cache_memory is not None:
        return
    memory = 1 << 34
    footprint = engine.footprint(
        Placed(ranks=1, accelerators_per_rank=1, memory_bytes=memory, kind="cuda")
    )
    used = sum(footprint.held[Residency.FULL].values()) + sum(
        footprint.working["rollout"].values()
    )
    # vLLM counts what it takes from the moment when its process has a context and communicators.
    if engine.block.engine == "vllm":
        held = footprint.held[Residency.FULL]
        used -= held.get(Part.CONTEXT, 0) + held.get(Part.COMMUNICATOR, 0)
    if footprint.held[Residency.FULL][Part.KV_CACHE]:
        assert used == int(memory * engine.block.gpu_memory_utilization)
