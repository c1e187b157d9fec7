"""Which components have room beside others by what was measured, and the error where one has none."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlplace.errors import AcceleratorOutOfMemory, Problem, WorkerError
from rlplace.execution.memory_monitor import MemoryMonitor
from rlplace.placement.schedule import Residency
from rlplace.workers.worker import MoveReport
from tests.unit.placement.memory_cases import GIB, colocated_8b

RANKS = 8
PAGE = (Path(__file__).parents[2] / "docs" / "utilisation.md").read_text(
    encoding="utf-8"
)


def report(residency: Residency, gib: float) -> MoveReport:
    return MoveReport(
        residency=residency, accelerator_bytes=int(gib * GIB), host_bytes=0
    )


def moved(
    memory: MemoryMonitor,
    component: str,
    residency: Residency,
    gib: float,
    *,
    on: int | None = None,
) -> None:
    """All ranks hold as much, or only one of them."""
    memory.moved(
        component,
        [
            report(residency, gib if on in (None, rank) else 0.0)
            for rank in range(RANKS)
        ],
    )


def test_a_residue_beyond_the_plan_is_refused_before_any_component_moves_in() -> None:
    case = colocated_8b()
    memory, entry = MemoryMonitor(case), case.schedule().entries["rollout"]
    memory.admit(entry.acquires, "rollout")  # which fits as foreseen
    moved(memory, "reward", Residency.OFF, 36.0, on=3)
    with pytest.raises(AcceleratorOutOfMemory) as refused:
        memory.admit(entry.acquires, "rollout")
    assert refused.value.accelerator == 3
    assert str(refused.value) in PAGE  # with all numbers and the fix
    share = float(
        (refused.value.problem.fix or "")
        .split("gpu_memory_utilization: ")[1]
        .split()[0]
    )
    assert share < 0.6
    assert (
        share * 80 + 36 <= 80
    )  # what is proposed leaves room for the residue, which the plan alone does not know


def test_the_most_that_was_ever_measured_counts_instead_of_the_plan() -> None:
    case = colocated_8b()
    memory, entry = MemoryMonitor(case), case.schedule().entries["rollout"]
    moved(memory, "rollout", Residency.FULL, 20.0)
    moved(memory, "rollout", Residency.WEIGHTS, 15.0)
    moved(memory, "reward", Residency.OFF, 36.0)
    memory.admit(entry.acquires, "rollout")  # 56 of 80, where the plan foresees 44 + 36
    for gib in (46.0, 20.0):
        moved(memory, "rollout", Residency.FULL, gib)
    moved(memory, "rollout", Residency.WEIGHTS, 15.0)
    assert memory.held["rollout"] == {
        Residency.FULL: 46 * GIB,
        Residency.WEIGHTS: 15 * GIB,
    }
    with pytest.raises(AcceleratorOutOfMemory, match=r"rollout full 46 GiB"):
        memory.admit(entry.acquires, "rollout")


def test_what_is_measured_beyond_proof_and_reserve_is_told_once_or_ends_the_run() -> (
    None
):
    """Of an 8B model: a reserve of 4 GiB bears what all residents of an accelerator hold more than they should.

    What a sleeping engine keeps is counted for its process, and measured with what it holds.
    """
    case, told = dataclasses.replace(colocated_8b(), reserve=4 * GIB), list[Problem]()
    memory, foreseen = (
        MemoryMonitor(case, tell=told.append),
        MemoryMonitor(case)._ledger,
    )
    for component in ("reference", "reward"):
        moved(
            memory,
            component,
            Residency.OFF,
            foreseen.bytes(component, Residency.OFF) / GIB + 1.5,
        )
    moved(memory, "rollout", Residency.OFF, 1.0)
    assert told == []
    moved(memory, "rollout", Residency.OFF, 0.0)
    moved(memory, "actor", Residency.OFF, 1.5, on=6)
    moved(memory, "actor", Residency.OFF, 1.5, on=6)
    (problem,) = told
    assert (problem.code, problem.key) == ("memory-beyond-plan", "actor")
    assert problem.what.startswith(
        "accelerator 6 holds 4.5 GiB (4831838208) more than the memory proof counts"
    )
    assert str(problem.got).startswith("4.5 GiB (4831838208), predicted 0")
    assert str(problem.why).startswith(
        "memory.reserve leaves 4 GiB (4294967296) for that; resident are"
    )
    assert "reward rank 6: off 1.5 GiB" in str(problem.why)
    assert str(problem.fix).startswith(f"memory.reserve: {4.5 * GIB:.0f} ")
    fixed = MemoryMonitor(
        dataclasses.replace(case, reserve=int(4.5 * GIB)), verify="stop"
    )
    for each, verify in ((fixed, False), (MemoryMonitor(case, verify="stop"), True)):
        moved(each, "actor", Residency.OFF, 4.0)
        with (
            pytest.raises(AcceleratorOutOfMemory, match="memory-beyond-plan")
            if verify
            else nullcontext()
        ):
            moved(each, "actor", Residency.OFF, 4.5)


def test_a_resident_with_more_beside_others_with_less_is_told_and_ends_no_run() -> None:
    case, told = dataclasses.replace(colocated_8b(), reserve=4 * GIB), list[Problem]()
    memory = MemoryMonitor(case, verify="stop", tell=told.append)
    awake = memory._ledger.bytes("rollout", Residency.FULL) / GIB
    moved(memory, "rollout", Residency.FULL, awake - 7)
    moved(memory, "actor", Residency.OFF, 8.0)
    moved(memory, "actor", Residency.OFF, 8.0)
    (problem,) = told
    assert problem.what.startswith(
        "actor rank 0 holds, on accelerator 0, 8 GiB (8589934592) more than the memory"
    )
    assert str(problem.why).startswith("the others hold less: all fits; resident are")
    moved(memory, "rollout", Residency.FULL, awake - 5)
    with pytest.raises(
        AcceleratorOutOfMemory
    ) as stopped:  # by what is measured as predicted, beside what was told
        moved(memory, "rollout", Residency.FULL, awake)
    assert stopped.value.problem.key == "actor"
    assert stopped.value.problem.what.startswith(
        "accelerator 0 holds 8 GiB (8589934592) more than the memory proof"
    )


def failure(
    cause: BaseException, *, stage: str = "learn 2", method: str = "learn"
) -> WorkerError:
    return WorkerError(
        component="actor",
        rank=5,
        node=0,
        accelerators=(5,),
        method=method,
        what=str(cause),
        stage=stage,
        cause=cause,
    )


def full(accelerator: int | None, lacking_bytes: int) -> AcceleratorOutOfMemory:
    problem = Problem(
        code="accelerator-out-of-memory",
        key="actor rank 5",
        what="is full",
        why="it has 80 GiB",
    )
    return AcceleratorOutOfMemory(problem, accelerator, lacking_bytes)


def test_a_lack_of_memory_is_explained_with_residents_and_the_nearest_setting() -> None:
    memory = MemoryMonitor(colocated_8b())
    moved(memory, "actor", Residency.FULL, 11.0)
    moved(memory, "reward", Residency.OFF, 0.5)
    told = memory.explain(failure(full(5, 2 * GIB)))
    assert isinstance(told.cause, AcceleratorOutOfMemory)
    assert (told.component, told.rank, told.stage, told.cause.accelerator) == (
        "actor",
        5,
        "learn 2",
        5,
    )
    why = told.cause.problem.why or ""
    assert why.splitlines() == [
        "it has 80 GiB",
        "measured after its last move: actor rank 5: full 11 GiB (11811160064)",
        "measured after its last move: reward rank 5: off 512 MiB (536870912), predicted 0 bytes",
    ]
    assert "actor.micro_batch: " in (told.cause.problem.fix or "")
    assert str(told.cause) in str(told)


@pytest.mark.parametrize("cause", [full(None, 5), RuntimeError("no")])
def test_other_failures_are_left_as_they_are(cause: BaseException) -> None:
    error = failure(cause)
    assert MemoryMonitor(colocated_8b()).explain(error) is error
