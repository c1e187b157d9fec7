"""What must hold of the turns of every placement of five roles."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.schedule import (
    Needs,
    Residency,
    Schedule,
    base_stage,
    schedule_of,
    text_needs,
)
from rlplace.workers.engines.vllm_memory import CudaMemory
from tests.fake_vllm import FakeVllm
from tests.rollout_stage import Ledger

ACCELERATORS = 6
ROLES = ("actor", "rollout", "env", "critic", "reference", "reward.a", "reward.b")


@st.composite
def intervals(draw: st.DrawFn) -> str:
    start = draw(st.integers(0, ACCELERATORS - 1))
    return f"{start}-{draw(st.integers(start, ACCELERATORS - 1))}"


@st.composite
def cases(draw: st.DrawFn) -> tuple[HybridComponentPlacement, dict[str, bool]]:
    optional = [c for c in ROLES[3:] if draw(st.booleans())]
    block = {c: draw(intervals()) for c in (*ROLES[:3], *optional)}
    block |= {
        c: "cpu" for c in optional if c.startswith("reward") and draw(st.booleans())
    }
    topology = Topology.uniform(1, ACCELERATORS)
    return HybridComponentPlacement({"component_placement": block}, topology), {
        c: draw(st.booleans()) for c in block
    }


def derived(placement: HybridComponentPlacement, offload: dict[str, bool]) -> Schedule:
    return schedule_of(placement, declared(placement), offload)


def declared(placement: HybridComponentPlacement) -> Needs:
    return text_needs(placement.components, refreshed=True)


@given(cases())
def test_active_components_are_resident_and_alone_where_they_take_turns(
    case: tuple[HybridComponentPlacement, dict[str, bool]],
) -> None:
    placement, offload = case
    plan = derived(placement, offload)
    for stage, working in plan.active.items():
        held = plan.residency[stage]
        assert all(held[c] >= plan.needs.of(stage, c) > Residency.OFF for c in working)
        if base_stage(stage) not in ("infer", "learn"):
            continue
        leaving = [
            c for c in placement.components if offload[c] and held[c] is Residency.FULL
        ]
        for a, b in itertools.combinations(leaving, 2):
            assert not (placement.shared(a, b) and {a, b} & {*working}), (
                f"{a} and {b} are both there in {stage}"
            )


@given(cases())
def test_all_work_is_done_once_and_in_order(
    case: tuple[HybridComponentPlacement, dict[str, bool]],
) -> None:
    placement, offload = case
    plan = derived(placement, offload)
    needs = declared(placement)
    wanted = Counter(
        (stage, c) for stage in needs.stages for c in needs.residency[stage]
    )
    done = Counter(
        (base_stage(stage), c) for stage, active in plan.active.items() for c in active
    )
    early = Counter(c for stage, c in (done - wanted) if stage == "rollout")
    assert done - wanted == Counter({("rollout", c): 1 for c in early})
    assert wanted - done == Counter({("infer", c): 1 for c in early})
    assert set(early) <= set(needs.early)
    bases = list(dict.fromkeys(base_stage(stage) for stage in plan.stages))
    assert bases == [stage for stage in needs.stages if stage in bases]
    for component in early:
        assert not any(
            placement.shared(component, other)
            for other in plan.active["rollout"]
            if other != component
        )


@given(cases(), st.sampled_from([1, 2]))
def test_every_plan_takes_a_gpu_engine_through_steps_that_vllm_allows(
    case: tuple[HybridComponentPlacement, dict[str, bool]], level: Literal[1, 2]
) -> None:
    """From one iteration to the next: weights that were dropped come back before the cache does, and both to answer."""
    plan, gpu = derived(*case), FakeVllm()
    memory = CudaMemory(gpu, Ledger(), level)
    memory.move(Residency.OFF, level=2)
    for number, stage in enumerate(plan.stages * 2):
        to = plan.residency[stage]["rollout"]
        if stage == "sync" and number:  # at the start all is empty
            assert to <= max(Residency.WEIGHTS, memory.residency)
        memory.move(to)
        if stage == "sync":
            gpu.update()
        if stage == "rollout":
            gpu.answer()
