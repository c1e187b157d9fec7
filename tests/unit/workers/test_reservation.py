"""What a job asks of real machines, which workers share a process, and every error about it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest

from rlplace.errors import ClusterError
from rlplace.placement.language.groups import RuntimeEnv
from rlplace.placement.language.slots import FlexiblePlacementStrategy, Slot
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.host import GroupSpec
from rlplace.workers.launch.machines import Gpu
from rlplace.workers.launch.reservation import (
    BUNDLE_CPUS,
    Machine,
    NodeUse,
    WorkerReport,
    check_place,
    check_sharing,
    check_size,
    node_uses,
    processes,
    rendezvous_host,
)
from rlplace.workers.worker import Worker
from tests.open_calls import slot_of

GPUS = Topology.uniform(2, 4, "cuda")


def machine(number: int, gpus: float = 4) -> Machine:
    return Machine(
        id=f"id-{number}", address=f"10.0.0.{number}", total={"CPU": 8.0, "GPU": gpus}
    )


def slots(*accelerators: list[int], topology: Topology = GPUS) -> tuple[Slot, ...]:
    placed = FlexiblePlacementStrategy(accelerators).get_placement(topology)
    return tuple(dataclasses.replace(slot, component="actor") for slot in placed)


def test_one_demand_per_used_node_for_what_is_used_there() -> None:
    needed = node_uses(slots([0], [2, 3], [2], [5]), GPUS)
    assert {node: d.accelerators for node, d in needed.items()} == {
        0: (0, 2, 3),
        1: (1,),
    }
    assert [d.resource for d in needed.values()] == [("GPU", 3.0), ("GPU", 1.0)]
    emulated = Topology.uniform(1, 8)
    assert node_uses(slots([0], [7], topology=emulated), emulated)[0].resource == (
        "CPU",
        BUNDLE_CPUS,
    )
    assert [d.accelerators for d in node_uses(None, GPUS).values()] == [
        (0, 1, 2, 3)
    ] * 2


def test_a_cluster_that_can_never_hold_it() -> None:
    needed = node_uses(slots([0], [4], [5]), GPUS)
    check_size(needed, [machine(1), machine(2)], "here")
    with pytest.raises(ClusterError) as fewer:
        check_size(needed, [machine(1)], "10.0.0.1:6379")
    problem = fewer.value.problem
    assert (problem.code, problem.key, problem.got) == (
        "cluster-too-small",
        "cluster.num_nodes",
        "2",
    )
    assert problem.why == "10.0.0.1:6379 has node 0: 10.0.0.1"
    assert (
        problem.fix
        == "cluster.num_nodes=1     (of declared machines cluster.nodes.0.count=1; or add 1 node)"
    )
    with pytest.raises(ClusterError) as weaker:
        check_size(needed, [machine(1), machine(2, gpus=1)], "here")
    problem = weaker.value.problem
    assert (problem.key, problem.got) == (
        "cluster.accelerators_per_node",
        "needs 2 GPU, has 1",
    )
    assert problem.fix is not None
    assert problem.fix.startswith("cluster.nodes.0.accelerators=1 ")


def test_the_planned_numbers_are_the_given_gpus_in_order() -> None:
    (slot,) = slots([2, 3])
    use = NodeUse(node=0, accelerators=(0, 2, 3), kind="cuda")
    assert dataclasses.replace(use, ids={0: "4", 2: "5", 3: "GPU-a"}).visible_ids(
        slot
    ) == ("5", "GPU-a")
    assert use.visible_ids(slot) == (), "emulated accelerators are nothing to see"
    (shared,) = FlexiblePlacementStrategy([[1]]).get_placement(
        GPUS, isolate_accelerator=False
    )
    assert dataclasses.replace(use, ids={n: str(n) for n in range(4)}).visible_ids(
        shared
    ) == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"machine": "id-2"}, "runs on another node than planned"),
        ({"visible": ()}, "sees other accelerators than planned"),
    ],
)
def test_a_worker_in_the_wrong_place_is_found(
    changed: dict[str, Any], what: str
) -> None:
    (slot,) = slots([1])
    use = NodeUse(node=0, accelerators=(1,), kind="cuda", ids={1: "1"})
    right = WorkerReport(machine="id-1", host="a", pid=1, visible=("1",))
    check_place(slot, machine(1), use, right)
    with pytest.raises(ClusterError) as wrong:
        check_place(slot, machine(1), use, dataclasses.replace(right, **changed))
    assert (wrong.value.code, wrong.value.problem.what) == ("worker-misplaced", what)


def test_a_rendezvous_is_reachable_from_every_reserved_node() -> None:
    """Also where the groups of one launch are on one node: readers of a later launch may be on another."""
    assert rendezvous_host(node_uses(slots([0], [1]), GPUS)) == "127.0.0.1"
    assert rendezvous_host(node_uses(slots([0], [4]), GPUS)) == ""


# ── processes that several workers share ─────────────────────────────────────────────────────────────────────────────


class Alone(Worker):
    needs_own_process: ClassVar[bool] = True


def shared_slot(component: str, rank: int, process: str = "", **changes: Any) -> Slot:
    return dataclasses.replace(slot_of(component, rank), process=process, **changes)


def group(*slots: Slot, worker: type[Worker] = Worker) -> GroupSpec:
    return GroupSpec(
        name=slots[0].component, worker=worker, config=None, slots=slots, channels={}
    )


ENV = group(
    shared_slot("env", 0, "env+rollout 0"), shared_slot("env", 1, "env+rollout 1")
)
ROLLOUT = group(
    shared_slot("rollout", 0, "env+rollout 0"),
    shared_slot("rollout", 1, "env+rollout 1"),
)
ACTOR = group(shared_slot("actor", 0), shared_slot("actor", 1), worker=Alone)


def test_slots_of_one_name_make_one_process() -> None:
    assert processes([*ENV.slots, *ACTOR.slots, *ROLLOUT.slots]) == [
        (ENV.slots[0], ROLLOUT.slots[0]),
        (ENV.slots[1], ROLLOUT.slots[1]),
        (ACTOR.slots[0],),
        (ACTOR.slots[1],),
    ]
    check_sharing([ENV, ACTOR, ROLLOUT], ["env+rollout 2"])


@pytest.mark.parametrize(
    ("specs", "running", "key", "why"),
    [
        ([ENV, ROLLOUT], ["env+rollout 1"], "env rank 1", "start together"),
        (
            [ENV, dataclasses.replace(ROLLOUT, worker=Alone)],
            [],
            "rollout rank 0",
            "Alone joins one",
        ),
        (
            [ENV, group(shared_slot("rollout", 0, "env+rollout 0", node=1))],
            [],
            "rollout rank 0",
            "is on node 1",
        ),
        (
            [
                ENV,
                group(
                    shared_slot("rollout", 0, "env+rollout 0", local_accelerators=(5,))
                ),
            ],
            [],
            "rollout rank 0",
            "env rank 0 is on node 0 and sees accelerators 0 there, rollout rank 0 is on node 0 and sees 5",
        ),
        (
            [
                ENV,
                group(
                    shared_slot(
                        "rollout",
                        0,
                        "env+rollout 0",
                        runtime_env=RuntimeEnv(interpreter="/opt/python"),
                    )
                ),
            ],
            [],
            "rollout rank 0",
            "Python",
        ),
    ],
    ids=["running", "meets", "node", "accelerators", "runtime_env"],
)
def test_workers_that_cannot_share_a_process(
    specs: list[GroupSpec], running: list[str], key: str, why: str
) -> None:
    with pytest.raises(ClusterError) as refused:
        check_sharing(specs, running)
    problem = refused.value.problem
    assert (problem.code, problem.key) == ("process-cannot-be-shared", key)
    assert why in (problem.why or "")


def test_the_gpus_of_a_slot_are_named_first_and_all_or_none_are_known() -> None:
    gpus = tuple(Gpu(uuid=f"GPU-{name}") for name in "abcd")
    slot = dataclasses.replace(
        slot_of("rollout"), accelerators=(9, 11), local_accelerators=(1, 3)
    )
    use = NodeUse(
        node=0, accelerators=(1, 3), kind="cuda", ids={1: "1", 3: "3"}, gpus=gpus
    )
    assert use.uuids(slot) == ("GPU-b", "GPU-d", "GPU-a", "GPU-c")
    assert dataclasses.replace(use, ids={1: "1", 3: "MIG-x"}).uuids(slot) == ()
    assert dataclasses.replace(use, ids={}).uuids(slot) == ()
