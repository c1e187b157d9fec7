"""The shared memory a run takes on each node: never less than what channels and weight buffers really have there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlplace.comm import codec
from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.arena import segment_bytes
from rlplace.comm.table import Table
from rlplace.jobs.simulator.memory import simulator_items
from rlplace.placement import Topology
from rlplace.placement.channels import ChannelLocation
from rlplace.placement.memory.demands import HostPart
from rlplace.placement.memory.records import render_ledger
from rlplace.placement.memory.shared_memory import (
    WEIGHT_BUFFERS,
    channel_bytes,
    count_shared,
    item_segment_bytes,
)
from rlplace.placement.memory.solve import find_shortages
from rlplace.placement.schedule import Residency
from rlplace.trajectory import ActionChunk, Observation, Trajectory
from tests.unit.placement.memory_cases import (
    PENDULUM,
    Continuous,
    Discrete,
    Spaces,
    ppo,
    ppo_case,
    with_host_memory,
)

SHARED = {"placement": "0-7", "process": "shared"}
IMAGES = Spaces(observation_shape=(84, 84, 3), actions=Discrete(n=6))


def location(capacity: int, keys: int) -> ChannelLocation:
    names = tuple(map(str, range(keys)))
    return ChannelLocation(
        node=0, process="", keys=names, capacity_items=capacity, under_way=1
    )


@pytest.mark.parametrize("capacity", [1, 8, 1000, 5000, 200_000])
@pytest.mark.parametrize("keys", [1, 100, 5000])
@pytest.mark.parametrize("participants", [1024, 10_000])
def test_a_channel_file_is_no_larger_than_planned(
    capacity: int, keys: int, participants: int
) -> None:
    part = location(capacity, keys)
    table = Table(
        ChannelSpec(
            name="x", capacity_items=capacity, keys=part.keys, participants=participants
        )
    )
    assert table.size_bytes <= channel_bytes(part, participants=participants)
    assert (
        512 <= table.inline_bytes <= 16 << 10
    )  # an item that is larger is counted as a segment


@pytest.mark.parametrize("size", [1, 65536, 65537, 1 << 20, (1 << 20) + 1, 100_000_001])
def test_segments_are_no_larger_than_planned(size: int) -> None:
    assert segment_bytes(size) <= item_segment_bytes(size)
    assert channel_bytes(location(4, 1), 1 << 20) - channel_bytes(
        location(4, 1)
    ) == 4 * item_segment_bytes(1 << 20)


@pytest.mark.parametrize(
    "spaces",
    [
        PENDULUM,
        IMAGES,
        dataclasses.replace(PENDULUM, observation_shape=(68,), memory=64),
    ],
)
def test_items_are_no_larger_than_planned(spaces: Spaces) -> None:
    steps, plan = 16, ppo()[0]
    known = simulator_items(plan, spaces, steps)
    rows, moved = (
        max(s.stop - s.start for s in route.shares)
        for route in (plan.row_routes.observations, plan.row_routes.trajectories)
    )
    shape, actions = spaces.observation_shape, spaces.actions
    acts = (
        np.zeros((rows, *actions.shape), np.float32)
        if isinstance(actions, Continuous)
        else np.zeros(rows, int)
    )
    row = np.zeros(rows, np.float32)
    observation = Observation(
        env_rank=1,
        stage_group=0,
        step=9,
        first_row=0,
        observations=np.zeros((rows, *shape), np.float32),
    )
    chunk = ActionChunk(
        stage_group=1,
        step=2,
        first_row=3,
        actions=acts,
        logprobs=row,
        values=row,
        version=1 << 40,
        memory=np.zeros((rows, spaces.memory), np.float32) if spaces.memory else None,
    )
    truncated = np.zeros((steps, moved), bool)
    truncated[-1] = True
    number = np.zeros((steps, moved), np.float32)
    trajectory = Trajectory(
        first_row=0,
        env_rank=0,
        version_min=0,
        version_max=0,
        observations=np.zeros((steps, moved, *shape), np.float32),
        actions=np.zeros((steps, moved, *acts.shape[1:]), acts.dtype),
        logprobs=number,
        values=number,
        rewards=number,
        terminated=np.zeros((steps, moved), bool),
        truncated=truncated,
        last_observations=np.zeros((moved, *shape), np.float32),
        final_observations=np.zeros((moved, *shape), np.float32),
    )
    for name, item in (
        ("observations", observation),
        ("actions", chunk),
        ("trajectories", trajectory),
    ):
        size = sum(memoryview(piece).nbytes for piece in codec.Packer(-1).pack(item))
        assert size <= known[name] <= size + 4096, name


def test_each_node_has_what_lives_there() -> None:
    found = ppo_case(topology=Topology.uniform(2, 4)).ledger()
    (first,), (second,) = (
        [a for a in found.hosts if node in a.numbers] for node in (0, 1)
    )
    purposes = [
        {h.component for h in a.worst.holds if h.part is HostPart.SHARED}
        for a in (first, second)
    ]
    assert purposes == [
        {"channels"},
        {"channels", "weights"},
    ]  # actions for env; observations and weights for rollout
    assert found.shared_bytes(0) == sum(
        h.size_bytes for h in first.worst.holds if h.part is HostPart.SHARED
    )
    assert found.shared_bytes(9) == 0
    assert all(
        load.of("channels") == first.loads[0].of("channels") for load in first.loads
    )


def test_weights_have_a_double_buffer() -> None:
    case = ppo_case()
    copy = case.ledger().bytes("rollout", Residency.WEIGHTS)
    assert (
        WEIGHT_BUFFERS * copy
        < case.shared["weights"][0]
        < WEIGHT_BUFFERS * copy + (1 << 20)
    )


def test_what_stays_in_a_process_takes_no_shared_memory() -> None:
    def taken(actor: object, others: object, **cluster: object) -> int:
        return (
            ppo_case({"actor": actor, "env": others, "rollout": others}, **cluster)
            .ledger()
            .shared_bytes(0)
        )

    assert 0 < taken("0-7", SHARED) < taken("0-7", "0-7")
    assert taken("0", "0", launcher="inline") == 0


def test_shared_memory_is_held_against_the_host() -> None:
    case = with_host_memory(ppo_case(), 1 << 20)
    (problem,) = find_shortages(case)
    assert problem.code == "host-does-not-fit"
    assert "channels: in shared memory" in (problem.why or "")
    assert "shared memory per node: " in render_ledger(case.ledger())


@pytest.mark.parametrize(
    ("actor", "rollout", "members"),
    [
        ("0-3", "0-7", 4 + 8),
        ("0-3", "0-3", 4 + 4),
        ("0", "0", 0),
        ("0-3", "4-7:0", 4 + 4),
    ],
)
def test_nccl_has_segments_for_each_gpu_in_a_group(
    actor: str, rollout: str, members: int
) -> None:
    """In those of the actor, of an engine over several GPUs, and of a sync: actors and who has no actor on its GPU."""
    placed = {"actor": actor, "env": "0-7", "rollout": rollout}
    plan, _ = ppo(placed, kind="cuda", memory=80 << 30)
    assert count_shared(plan, {}, 0)["NCCL"].get(0, 0) == members * 4 * 9_637_888
    emulated, _ = ppo(placed)
    assert count_shared(emulated, {}, 0)["NCCL"] == {}
