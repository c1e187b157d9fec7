"""`rollout.gpu_memory_utilization: auto`: what the others leave, less a reserve, in the plan as in the run."""

from __future__ import annotations

import dataclasses

import pytest

from rlplace.contract.planning import memory_case
from rlplace.errors import PlacementError
from rlplace.jobs.language_model.memory import with_share
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.memory.solve import (
    SPARE,
    Knob,
    fill_share,
    find_shortages,
    solve,
)
from rlplace.placement.schedule import Residency
from rlplace.placement.show.text import render_text
from tests.unit.placement.memory_cases import colocated_8b, engine
from tests.unit.placement.reports import llm
from tests.unit.placement.test_llm_channels import LEAVING, config, layout

AUTO = {"gpu_memory_utilization": "auto", "dtype": "fp32", "cache_dtype": "fp32"}


def share_of(case: MemoryCase) -> float:
    block = engine(case)
    assert isinstance(block.gpu_memory_utilization, float)
    assert block.kv_cache_memory is None
    return block.gpu_memory_utilization


def test_it_is_the_largest_share_that_fits_less_a_reserve() -> None:
    case = colocated_8b()
    solution = solve(case, Knob.KV_SHARE)
    assert solution is not None
    assert 0.9 < solution.value < 1
    filled = fill_share(case)
    assert share_of(filled) == pytest.approx(solution.value - SPARE)
    assert filled.ledger().fits
    (account,) = filled.ledger().accelerators
    assert SPARE <= (account.margin_bytes or 0) / account.capacity_bytes < SPARE + 0.02


def test_the_plan_says_what_it_is() -> None:
    report = llm(rollout={"gpu_memory_utilization": "auto", "enable_offload": True})
    assert (
        f"note: rollout.gpu_memory_utilization: auto is {share_of(report.case):g}; "
        in render_text(report)
    )
    assert render_text(report).count("auto") == 1
    assert "auto" not in render_text(
        llm(rollout={"gpu_memory_utilization": 0.5, "enable_offload": True})
    )


@pytest.mark.parametrize(("env", "share"), [("1", 0.95), ("0", 0.85)])
def test_what_stays_beside_the_engine_lowers_it(env: str, share: float) -> None:
    """A simulator of 100 MiB that never leaves; accelerators have 1 GiB."""
    placed = {"actor": "2", "env": env, "rollout": "0"}
    cluster = {"component_placement": placed, "allow_resident": ["env", "rollout"]}
    asked = config(
        placed, cluster=cluster, env={"accelerator_memory": "100MiB"}, rollout=AUTO
    )
    assert share_of(memory_case(layout(asked), asked)) == share


def test_a_run_gets_the_number_of_its_plan() -> None:
    asked = config(
        {"actor": "0-1", "env": "2", "rollout": "1"},
        rollout=AUTO | LEAVING["rollout"],
        actor=LEAVING["actor"],
    )
    case = memory_case(layout(asked), asked)
    filled = with_share(asked, case)
    assert filled.rollout.gpu_memory_utilization == share_of(case)
    assert (
        dataclasses.replace(filled.rollout, gpu_memory_utilization="auto")
        == asked.rollout
    )


def test_how_evaluation_draws_is_in_the_proof_and_not_in_training() -> None:
    placed = {"actor": "0-1", "env": "2", "rollout": "1"}
    plain = config(
        placed,
        rollout={"engine": "transformers"} | LEAVING["rollout"],
        actor=LEAVING["actor"],
    )
    asked = dataclasses.replace(
        plain, runner=dataclasses.replace(plain.runner, eval_top_p=0.9)
    )
    greedily, drawn = (memory_case(layout(each), each) for each in (plain, asked))
    assert with_share(asked, drawn).rollout.top_p == 1.0
    assert [
        getattr(case.demands["rollout"], "cut", None) for case in (greedily, drawn)
    ] == [False, True]


def test_a_cache_of_a_given_size_needs_no_share() -> None:
    asked = config(
        {"actor": "0", "env": "2", "rollout": "1"},
        rollout=AUTO | {"kv_cache_memory": "4MiB"},
    )
    case = memory_case(layout(asked), asked)
    assert engine(case).kv_cache_memory == 4 << 20
    assert (case.notes, with_share(asked, case)) == ((), asked)


def test_what_was_measured_does_not_change_it() -> None:
    case = colocated_8b()
    measured = dataclasses.replace(
        case, measured={"rollout": dict.fromkeys(Residency, 1 << 30)}
    )
    assert share_of(fill_share(measured)) == share_of(fill_share(case))


def test_where_nothing_is_left_it_is_said_what_lacks() -> None:
    crowded = fill_share(colocated_8b(offload=False, micro_batch=64))
    assert share_of(crowded) == 0.01
    assert [p.code for p in find_shortages(crowded)] == [
        "does-not-fit",
        "kv-cache-too-small",
    ]


def test_of_unknown_memory_there_is_no_share() -> None:
    nodes = [{"accelerators": 8, "host_memory": "2TiB"}]
    with pytest.raises(PlacementError) as caught:
        llm(rollout={"gpu_memory_utilization": "auto"}, cluster={"nodes": nodes})
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == (
        "unknown-memory",
        "rollout.gpu_memory_utilization",
    )
    assert str(problem.fix).startswith(
        "cluster.nodes: [{accelerators: 8, memory: 80GiB}]"
    )
