"""The largest size that fits: the next one does not."""

from __future__ import annotations

import dataclasses

import pytest

from rlplace.contract.planning import memory_case
from rlplace.errors import PlacementError
from rlplace.placement.memory.demands import EngineDemand
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.memory.model import read_model
from rlplace.placement.memory.solve import Knob, solve
from tests.unit.placement.memory_cases import (
    PENDULUM,
    colocated_8b,
    llama_3,
    ppo,
    spread_70b,
    trained,
)

MODELS = ("actor", "critic", "reference", "reward")


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    case = colocated_8b()
    solution = solve(case, Knob.MICRO_BATCH)
    assert solution is not None
    size = int(solution.value)
    assert size > 4
    assert solution.case.ledger().fits
    assert case.changed(MODELS, micro_batch=size).ledger().fits
    assert not case.changed(MODELS, micro_batch=size + 1).ledger().fits


def test_one_component_alone_can_be_asked_for() -> None:
    solution = solve(colocated_8b(), Knob.MICRO_BATCH, "actor")
    assert solution is not None
    assert trained(solution.case, "critic").micro_batch == 4
    assert trained(solution.case).micro_batch == solution.value


def test_the_longest_sequence_is_that_of_all_components() -> None:
    solution = solve(colocated_8b(micro_batch=1), Knob.SEQUENCE_LENGTH)
    assert solution is not None
    assert solution.value > 8192
    lengths = {
        d.sequence_length
        for d in solution.case.demands.values()
        if not isinstance(d, EngineDemand)
    }
    assert lengths == {solution.value}


def test_a_share_that_leaves_no_room_for_the_cache_is_no_solution() -> None:
    case = colocated_8b(offload=False, micro_batch=1, sequence_length=128)
    assert solve(case, Knob.KV_SHARE) is not None
    assert (
        solve(case.changed(["rollout"], sequence_length=1 << 20), Knob.KV_SHARE) is None
    )


def test_nothing_fits_is_none() -> None:
    assert solve(spread_70b(), Knob.MICRO_BATCH) is None


def test_what_always_fits_ends_at_the_most_that_is_tried() -> None:
    case = colocated_8b()
    tiny = dataclasses.replace(case, demands={"rollout": case.demands["rollout"]})
    solution = solve(tiny, Knob.KV_SHARE)
    assert solution is not None
    # Not all of it: the context of the process of vLLM's engine is beside its share.
    assert solution.value == 0.99
    whole = solve(tiny.changed(["rollout"], engine="transformers"), Knob.KV_SHARE)
    assert whole is not None
    assert whole.value == 1.0
    fixed = tiny.changed(["rollout"], kv_cache_memory=1 << 42)
    with pytest.raises(PlacementError) as caught:
        solve(fixed, Knob.KV_SHARE)
    assert caught.value.codes == ("nothing-to-solve",)


def test_a_micro_batch_of_any_size_fits_what_keeps_nothing() -> None:
    case = colocated_8b()
    roomy = dataclasses.replace(case, demands={"reference": case.demands["reference"]})
    model = dataclasses.replace(read_model(llama_3("8b")), vocabulary=0)
    solution = solve(
        roomy.changed(["reference"], sequence_length=1, model=model), Knob.MICRO_BATCH
    )
    assert solution is not None
    assert solution.value == 1 << 16


def test_what_cannot_be_solved_for_says_who_has_it() -> None:
    with pytest.raises(
        PlacementError, match=r"it is a size of actor, critic, reference, reward"
    ) as caught:
        solve(colocated_8b(), Knob.MICRO_BATCH, "rollout")
    assert caught.value.problems[0].key == "rollout.micro_batch"
    plan, config = ppo()
    with pytest.raises(PlacementError, match="no component of this job has it"):
        solve(memory_case(plan, config, None), Knob.MICRO_BATCH)


def packed(case: MemoryCase, token_budget: int) -> MemoryCase:
    """The actor alone, its passes packed."""
    both = {c: case.demands[c] for c in ("actor", "rollout")}
    return dataclasses.replace(case, demands=both).changed(
        ["actor"], packed=True, token_budget=token_budget
    )


def test_packed_passes_have_a_size_in_tokens() -> None:
    case = packed(colocated_8b(), 8192)
    same = colocated_8b(micro_batch=4, sequence_length=2048)
    actors = [c.ledger().account(0).loads[-1].of("actor") for c in (case, same)]
    assert actors[0] == actors[1]
    solution = solve(case, Knob.TOKEN_BUDGET)
    assert solution is not None
    assert solution.value > 8192
    assert solution.case.ledger().fits
    assert not packed(case, int(solution.value) + 1).ledger().fits


def test_a_sequence_longer_than_the_budget_is_a_pass_of_its_own() -> None:
    case = colocated_8b(sequence_length=2048)
    loads = [
        packed(case, tokens).ledger().account(0).loads[-1].of("actor")
        for tokens in (1, 2048, 4096)
    ]
    assert loads[0] == loads[1] < loads[2]


@pytest.mark.parametrize(
    ("knob", "other"),
    [(Knob.MICRO_BATCH, "token_budget"), (Knob.TOKEN_BUDGET, "micro_batch")],
)
def test_a_pass_has_one_size_and_the_other_is_pointed_to(
    knob: Knob, other: str
) -> None:
    case = packed(colocated_8b(), 8192) if knob is Knob.MICRO_BATCH else colocated_8b()
    with pytest.raises(PlacementError) as caught:
        solve(case, knob)
    (problem,) = caught.value.problems
    assert problem.code == "nothing-to-solve"
    assert f"has its size by {other}" in str(problem.why)
    assert problem.fix == f"solve {other} actor"


def test_without_known_memory_there_is_no_largest() -> None:
    plan, config = ppo(memory=0)
    case = dataclasses.replace(
        memory_case(plan, config, PENDULUM), demands=colocated_8b().demands
    )
    with pytest.raises(PlacementError) as caught:
        solve(case, Knob.MICRO_BATCH, "actor")
    assert caught.value.codes == ("unknown-memory",)
