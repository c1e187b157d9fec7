"""What to change when it does not fit: each proposal is true, and says what it costs."""

from __future__ import annotations

import dataclasses

import pytest

from rlplace.config.read import read_config
from rlplace.contract.planning import make_plan, memory_case
from rlplace.placement import Topology
from rlplace.placement.memory.bound import too_small
from rlplace.placement.memory.ledger import MemoryCase, reserved
from rlplace.placement.memory.solve import find_remedies, find_shortages
from rlplace.placement.schedule import text_needs
from rlplace.units import show_bytes
from tests.unit.placement.memory_cases import (
    COMPONENTS,
    GIB,
    PENDULUM,
    colocated_8b,
    llama_3,
    ppo,
    ppo_case,
    rlhf,
    rlhf_demands,
    spread_70b,
    trained,
    with_host_memory,
)


def fixes(case: MemoryCase) -> list[str]:
    return [remedy.fix for remedy in find_remedies(case)]


def test_each_proposal_is_enough_by_itself() -> None:
    case = colocated_8b(offload=False)
    remedies = find_remedies(case)
    assert remedies[0].fix == "rollout.enable_offload: true"
    assert remedies[0].saves_bytes > 20 * GIB
    for remedy in remedies:
        assert remedy.enough
        assert not remedy.also
        assert remedy.case.ledger().fits
        assert remedy.cost


def test_a_batch_too_large_is_made_smaller_but_not_smaller_than_needed() -> None:
    found = {
        remedy.fix.partition(":")[0]: remedy
        for remedy in find_remedies(colocated_8b().changed(["actor"], micro_batch=64))
    }
    smaller = found["actor.micro_batch"]
    block = trained(smaller.case)
    assert 4 < block.micro_batch < 64
    assert (
        not smaller.case.changed(["actor"], micro_batch=block.micro_batch + 1)
        .ledger()
        .fits
    )


def test_a_budget_too_large_is_lowered_to_the_most_that_fits() -> None:
    case = colocated_8b().changed(["actor"], packed=True, token_budget=1 << 17)
    (smaller,) = (
        r for r in find_remedies(case) if r.fix.startswith("actor.token_budget: ")
    )
    block = trained(smaller.case)
    assert smaller.fix == f"actor.token_budget: {block.token_budget}"
    assert 2048 < block.token_budget < 1 << 17
    assert (
        not smaller.case.changed(["actor"], token_budget=block.token_budget + 1)
        .ledger()
        .fits
    )


def test_a_share_too_large_is_lowered() -> None:
    case = colocated_8b()
    case = case.changed(["rollout"], gpu_memory_utilization=1.0)
    assert fixes(case)[0].startswith("rollout.gpu_memory_utilization: 0.9")


def test_a_cache_too_large_is_made_as_large_as_there_is_room() -> None:
    case = colocated_8b().changed(["rollout"], kv_cache_memory=100 * GIB)
    remedy = find_remedies(case)[0]
    assert remedy.fix.startswith("rollout.kv_cache_memory: 6")
    (account,) = remedy.case.ledger().accelerators
    assert account.margin_bytes == 0
    beyond = colocated_8b(offload=False, micro_batch=64).changed(
        ["rollout"], kv_cache_memory=GIB
    )
    assert not any("kv_cache_memory" in fix for fix in fixes(beyond))


def test_what_is_kept_can_be_recomputed_or_kept_on_the_host() -> None:
    case = colocated_8b(checkpointing=False, micro_batch=5, sequence_length=1950)
    alone = dataclasses.replace(case, demands={"actor": case.demands["actor"]})
    assert fixes(alone)[:3] == [
        "actor.micro_batch: 4",
        "actor.checkpointing: true",
        "actor.optimizer.on_host: true",
    ]
    host = fixes(spread_70b())
    assert host == ["actor.optimizer.on_host: true", "critic.optimizer.on_host: true"]


def test_changes_that_are_enough_only_together_say_so() -> None:
    remedies = find_remedies(spread_70b())
    assert [r.also for r in remedies] == [True, True]
    assert [r.enough for r in remedies] == [False, True]
    (actor, critic) = find_shortages(spread_70b())
    assert actor.fix is not None
    assert "and: critic.optimizer.on_host: true" in actor.fix
    assert critic.fix is None  # said with the accelerators that lack most


def test_together_each_is_lowered_no_further_than_its_own_moments_need() -> None:
    """Two passes too large, in two stages: neither alone is enough, and neither has to become the least."""
    case = (
        colocated_8b()
        .changed(["actor"], micro_batch=64)
        .changed(["reference"], micro_batch=512)
    )
    remedies = find_remedies(case)
    assert [r.also for r in remedies] == [True, True]
    assert remedies[-1].enough
    sizes = {r.fix.partition(".")[0]: int(r.fix.rpartition(" ")[2]) for r in remedies}
    assert set(sizes) == {"actor", "reference"}
    for component, size in sizes.items():
        assert size > 1
        assert (
            not remedies[-1]
            .case.changed([component], micro_batch=size + 1)
            .ledger()
            .fits
        )


def test_a_whole_copy_of_a_frozen_model_can_be_sharded() -> None:
    case = colocated_8b()
    large = dataclasses.replace(
        case, demands={"reference": rlhf_demands("70b")["reference"]}
    )
    whole = large.changed(["reference"], sharded=False)
    assert fixes(whole) == ["reference.sharded: true", "reference.on_host: true"]


@pytest.mark.parametrize(
    ("actor", "fix", "kind"),
    [
        ("0-1", "all", "cuda"),
        (
            {"placement": "0-3", "tensor_parallel_size": 2},
            "{placement: all, tensor_parallel_size: 2}",
            "cuda",
        ),
        ("0-7", None, "cuda"),
        ({"placement": "0-1", "ranks_per_accelerator": 2}, None, "emulated"),
    ],
)
def test_an_actor_may_have_all_accelerators_unless_its_ranks_share_them(
    actor: object, fix: str | None, kind: str
) -> None:
    model = {
        "micro_batch": 1,
        "enable_offload": True,
        "optimizer": {"kind": "adamw_master"},
        "model": llama_3("8b"),
    }
    blocks = {
        "cluster": {"component_placement": {"actor": actor, "rollout": "0-7"}},
        "actor": model,
    }
    config = read_config(
        blocks
        | {"rollout": {"enable_offload": True}, "algorithm": {"sequence_length": 2048}}
    )
    plan = make_plan(config, Topology.uniform(1, 8, kind, 24 * GIB))
    wider = [
        r
        for r in find_remedies(memory_case(plan, config))
        if "component_placement.actor" in r.fix
    ]
    assert [r.fix for r in wider] == (
        [f"cluster.component_placement.actor: {fix}"] if fix else []
    )
    for remedy in wider:
        assert remedy.cost.endswith(" more accelerators, which others may use as well")
        assert len(remedy.case.placement.spec("actor").accelerators) == 8


def test_long_samples_may_be_shared_by_accelerators() -> None:
    """A pass has at least the longest sample; recomputed, its layers still hold too much."""
    line, leaving, length = (
        {"actor": "0-7", "rollout": "0-7", "env": "0"},
        {"enable_offload": True},
        1 << 17,
    )
    model = {
        "model": llama_3("8b"),
        "optimizer": {"kind": "adamw_master"},
        "weights": "bf16",
        "compute": "bf16",
    }
    blocks = {
        "cluster": {"component_placement": line},
        "algorithm": {
            "name": "grpo",
            "prompts": 8,
            "max_prompt_length": 1024,
            "max_new_tokens": length - 1024,
        },
        "actor": leaving | model | {"checkpointing": True, "token_budget": length},
        "rollout": leaving
        | {"engine": "transformers", "dtype": "bf16", "kv_cache_memory": "20GiB"},
        "env": leaving | {"task": "arithmetic"},
    }
    config = read_config(blocks)
    plan = make_plan(config, Topology.uniform(1, 8, "cuda", 75 * GIB))
    shared = [
        r
        for r in find_remedies(memory_case(plan, config))
        if "context_parallel_size" in r.fix
    ]
    assert [r.fix for r in shared] == [
        f"cluster.component_placement.actor: {{placement: 0-7, context_parallel_size: {n}}}"
        for n in (2, 4, 8)
    ]
    assert all(remedy.enough and not remedy.also for remedy in shared)


def test_a_host_too_small_drops_sleep_copies() -> None:
    case = colocated_8b()
    levels = [case.changed(["rollout"], sleep_level=level) for level in (1, 2)]
    most = [levels[i].ledger().hosts[0].worst.total_bytes for i in range(2)]
    short = with_host_memory(levels[0], (most[0] + most[1]) // 2)
    assert fixes(short)[0] == "rollout.sleep_level: 2"
    (problem,) = find_shortages(short)
    assert problem.code == "host-does-not-fit"
    assert "pinned pool" in str(problem.why)


def test_where_nothing_helps_it_is_said() -> None:
    case = ppo_case(memory=1 << 20)
    assert find_remedies(case) == ()
    problems = find_shortages(case)
    assert [p.code for p in problems] == ["does-not-fit", "does-not-fit"]
    assert problems[0].fix == "accelerators of 256 MiB or more, or less on each"
    assert "env: simulator 256 MiB" in str(problems[0].why)


def test_where_all_changes_are_not_enough_it_is_said_too() -> None:
    case = colocated_8b(micro_batch=1, sequence_length=1 << 24)
    fix = find_shortages(case)[0].fix
    assert fix is not None
    assert (
        "and still it does not fit: actor alone, spread over all 8 with the least of everything, holds "
        in fix
    )
    assert "where 80 GiB are to be had: more or larger accelerators are needed" in fix


def test_that_larger_accelerators_are_needed_is_only_said_where_it_is_proven() -> None:
    """Each component alone would have room in 16 GiB, and no set of changes is found for all of them."""
    case = rlhf(
        dict.fromkeys(COMPONENTS, "0-7"),
        Topology.uniform(1, 8, "cuda", 16 * GIB),
        rlhf_demands("8b"),
    )
    assert too_small(case) is None
    fix = str(find_shortages(case)[0].fix)
    assert (
        "and still it does not fit: no set of changes that does was found; tried were offloading"
        in fix
    )
    assert "are needed" not in fix


@pytest.mark.parametrize("gib", [8, 9, 10, 12, 16, 20, 24, 40, 80])
def test_what_fits_after_some_changes_is_never_said_to_be_too_small(gib: int) -> None:
    case = rlhf(
        dict.fromkeys(COMPONENTS, "0-7"),
        Topology.uniform(1, 8, "cuda", gib * GIB),
        rlhf_demands("8b"),
    )
    for component in COMPONENTS:
        alone = dataclasses.replace(case, demands={component: case.demands[component]})
        remedies = find_remedies(alone)
        found = alone.ledger().fits or any(
            r.enough and "component_placement" not in r.fix for r in remedies
        )
        assert not found or too_small(alone) is None


def test_what_fits_as_it_is_is_never_said_to_be_too_small() -> None:
    """A part of few tokens saves less than the communicator takes by which ranks exchange them."""
    reference = rlhf_demands("8b", micro_batch=1, sequence_length=64)["reference"]

    def on(memory_bytes: int) -> MemoryCase:
        block, topology = (
            {"placement": "0-7", "tensor_parallel_size": 8},
            Topology.uniform(1, 8, "cuda", memory_bytes),
        )
        case = dataclasses.replace(
            rlhf({"reference": block}, topology, {"reference": reference}), reserve=0
        )
        return case.changed(["reference"], on_host=True)

    exact = on(on(80 * GIB).ledger().accelerators[0].worst.total_bytes)
    assert exact.ledger().fits
    assert too_small(exact) is None


def test_the_reserve_is_kept_free_and_named() -> None:
    case = colocated_8b(micro_batch=1)
    tight = dataclasses.replace(
        case, reserve=80 * GIB - case.ledger().accelerators[0].worst.total_bytes
    )
    assert (tight.ledger().fits, tight.ledger().accelerators[0].margin_bytes) == (
        True,
        0,
    )
    over = dataclasses.replace(tight, reserve=int(tight.reserve) + GIB)
    (account,) = over.ledger().accelerators
    assert (account.margin_bytes, account.fits) == (-GIB, False)
    (problem,) = find_shortages(over)
    assert "1 GiB too much" in str(problem.got)
    assert (
        f"each has 80 GiB, of which memory.reserve keeps {show_bytes(account.reserve_bytes)} free"
        in str(problem.why)
    )
    for remedy in find_remedies(over):
        assert (
            not remedy.enough
            or remedy.case.ledger().accelerators[0].worst.total_bytes
            <= account.room_bytes
        )


def test_a_reserve_is_a_share_or_bytes_and_by_itself_of_gpus_alone() -> None:
    assert [reserved("auto", kind, 80 * GIB) for kind in ("cuda", "emulated")] == [
        round(3.2 * GIB),
        0,
    ]
    assert [
        reserved(0.1, "emulated", 80 * GIB),
        reserved(2 * GIB, "cuda", 80 * GIB),
    ] == [8 * GIB, 2 * GIB]
    assert [reserved("auto", "cuda", 0), reserved(2 * GIB, "cuda", GIB)] == [0, GIB]


def test_a_cache_without_room_is_a_problem_of_its_own() -> None:
    (problem,) = find_shortages(
        colocated_8b().changed(["rollout"], gpu_memory_utilization=0.2)
    )
    assert problem.code == "kv-cache-too-small"
    assert problem.key == "rollout.gpu_memory_utilization"
    assert str(problem.fix).startswith("rollout.gpu_memory_utilization: 0.9")
    (problem,) = find_shortages(
        colocated_8b().changed(["rollout"], kv_cache_memory=1 << 20)
    )
    assert problem.key == "rollout.kv_cache_memory"
    assert "shorter algorithm.sequence_length" in str(problem.fix)


def test_a_cache_without_room_beside_a_batch_too_large_are_two_problems() -> None:
    case = colocated_8b(micro_batch=64).changed(["rollout"], gpu_memory_utilization=0.2)
    batch, cache = find_shortages(case)
    assert (batch.code, cache.code) == ("does-not-fit", "kv-cache-too-small")
    assert str(cache.fix).startswith(
        "a shorter algorithm.sequence_length"
    )  # no share fits while the batch does not
    assert "still it does not fit" not in str(batch.fix)


def test_a_host_too_small_is_said_also_where_accelerators_are_not_known() -> None:
    plan, config = ppo(memory=0)
    case = with_host_memory(memory_case(plan, config, PENDULUM), 100)
    assert [p.code for p in find_shortages(case)] == ["host-does-not-fit"]
    unknown = dataclasses.replace(
        case, demands={**case.demands, "actor": rlhf_demands("8b")["actor"]}, job=None
    )
    assert (
        find_shortages(unknown)[0].fix == "hosts of 89.7 GiB or more, or less on each"
    ), "a million ranks are no fix"


def test_what_only_loading_needs_is_said_to_be_at_the_start() -> None:
    demands = {
        "reference": rlhf_demands("8b", micro_batch=1, sequence_length=1)["reference"]
    }
    case = rlhf({"reference": "0"}, Topology.uniform(1, 1, "cuda", 16 * GIB), demands)
    case = dataclasses.replace(
        case, needs=text_needs(("reference",)), offload={}
    ).changed(["reference"], sharded=False)
    (problem,) = find_shortages(case)
    assert "at the start" in str(problem.got)
    assert "reference: loading 1002 MiB" in str(problem.why)
