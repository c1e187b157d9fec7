"""Which slots make one process, and which workers cannot be in it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest

from rlplace.placement.language.groups import RuntimeEnv
from rlplace.placement.language.slots import Slot
from rlplace.workers.launch.launcher import GroupOrder
from rlplace.workers.launch.sharing import cannot_share, processes
from rlplace.workers.worker import Worker


class Alone(Worker):
    needs_own_process: ClassVar[bool] = True


def slot(component: str, rank: int, process: str = "", **changes: object) -> Slot:
    place = Slot(
        component=component,
        rank=rank,
        node=0,
        local_rank=rank,
        local_world_size=2,
        accelerators=(rank,),
        local_accelerators=(rank,),
        process=process,
    )
    return dataclasses.replace(place, **changes)  # type: ignore[arg-type]


def order(*slots: Slot, worker: type[Worker] = Worker) -> GroupOrder:
    return GroupOrder(name=slots[0].component, worker=worker, config=None, slots=slots, channels={}, seed=0)


ENV = order(slot("env", 0, "env+rollout 0"), slot("env", 1, "env+rollout 1"))
ROLLOUT = order(slot("rollout", 0, "env+rollout 0"), slot("rollout", 1, "env+rollout 1"))
ACTOR = order(slot("actor", 0), slot("actor", 1), worker=Alone)


def test_slots_of_one_name_make_one_process() -> None:
    slots = [*ENV.slots, *ACTOR.slots, *ROLLOUT.slots]
    assert processes(slots) == [
        (ENV.slots[0], ROLLOUT.slots[0]),
        (ENV.slots[1], ROLLOUT.slots[1]),
        (ACTOR.slots[0],),
        (ACTOR.slots[1],),
    ]
    assert cannot_share([ENV, ACTOR, ROLLOUT], ["env+rollout 2"]) is None


@pytest.mark.parametrize(
    ("orders", "running", "key", "why"),
    [
        ([ENV, ROLLOUT], ["env+rollout 1"], "env rank 1", "start together"),
        ([ENV, dataclasses.replace(ROLLOUT, worker=Alone)], [], "rollout rank 0", "Alone joins one"),
        ([ENV, order(slot("rollout", 0, "env+rollout 0", node=1))], [], "rollout rank 0", "is on node 1"),
        (
            [ENV, order(slot("rollout", 0, "env+rollout 0", local_accelerators=(5,)))],
            [],
            "rollout rank 0",
            "env rank 0 is on node 0 and sees accelerators 0 there, rollout rank 0 is on node 0 and sees 5",
        ),
        (
            [ENV, order(slot("rollout", 0, "env+rollout 0", runtime_env=RuntimeEnv(interpreter="/opt/python")))],
            [],
            "rollout rank 0",
            "Python",
        ),
    ],
    ids=["running", "meets", "node", "accelerators", "runtime_env"],
)
def test_who_cannot_share(orders: list[GroupOrder], running: list[str], key: str, why: str) -> None:
    problem = cannot_share(orders, running)
    assert problem is not None
    assert (problem.code, problem.key) == ("process-cannot-be-shared", key)
    assert why in (problem.why or "")
    assert problem.fix
