"""The shared memory that a run takes on each node: its channels, buffers for weights, and NCCL.

A channel's file has a fixed part, a record for each key, and room for its capacity in small items; a larger item lies
beside it in a segment while it is under way. The weights of a node have a double buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlplace.placement.channels import (
    LEAST_PARTICIPANTS,
    ChannelLocation,
    participants_of,
)
from rlplace.placement.flow import DeviceDelivery, deliver_through_host
from rlplace.placement.language.spec import role_of
from rlplace.placement.memory.formulas import nccl_shared
from rlplace.placement.memory.ledger import SharedMemory

if TYPE_CHECKING:
    from rlplace.placement.plan import Plan

# Sizes of a channel's file in shared memory. Each is at least the true size; a test compares them.
_FIXED_BYTES = 64 << 10
_PARTICIPANT_BYTES = 448  # name of a participant and its place among the waiters
_KEY_BYTES = 512
_RECORD_BYTES = 128  # of an entry, beside the room for its item
_SPARE_ENTRIES = 16
_LEAST_ROOM = 512
_MOST_ROOM = 16 << 10
# room of all entries together; the room of one entry is between the two bounds above
_ALL_ROOM = 16 << 20

_SMALLEST_SEGMENT = 64 << 10
_TABLE_BYTES = 64 << 10  # table of the segments of one process
ITEM_BYTES = 2 << 10  # bytes of an item beside its arrays: names, shapes, alignment
WEIGHT_BUFFERS = 2  # double buffer: one is read while the other is written
_HEADER_BYTES = 64 << 10  # header of a double buffer, beside the weights


def count_shared(
    plan: Plan, item_bytes: Mapping[str, int], weights_bytes: int
) -> SharedMemory:
    """Return the most shared memory that a run takes: purpose (channels, weights, NCCL) -> node -> bytes.

    `item_bytes`: channel -> bytes of its largest item; 0 or missing if not known. `weights_bytes`: bytes of one whole
    copy of the weights; 0 if not known.
    """
    by_node: Counter[int] = Counter()
    for channel in plan.channels:
        participants = participants_of(channel, plan.placement)
        for location in channel.locations():
            if not location.process:
                by_node[location.node] += channel_bytes(
                    location, item_bytes.get(channel.name, 0), participants
                )
    for source in {
        c.source for c in plan.channels if item_bytes.get(c.name, 0) > _LEAST_ROOM
    }:
        for node in plan.placement.locations(source).node:
            by_node[node] += _TABLE_BYTES
    buffers = double_buffer_bytes(weights_bytes) if weights_bytes else 0
    readers: Counter[int] = Counter()
    for delivery in deliver_through_host(plan.deliveries):
        node = plan.placement.locations(delivery.target).node[delivery.lead]
        readers[node] += buffers
    return {"channels": by_node, "weights": readers, "NCCL": _count_nccl(plan)}


def double_buffer_bytes(weights_bytes: int) -> int:
    """Return the bytes that a double buffer for weights takes in the shared memory of its node.

    `weights_bytes`: bytes of one copy of the weights.
    """
    return WEIGHT_BUFFERS * weights_bytes + _HEADER_BYTES


def _count_nccl(plan: Plan) -> Counter[int]:
    """Return node -> bytes that NCCL takes in the node's shared memory if its GPUs cannot access each other directly.

    Counted are the NCCL groups of models and engines on several GPUs, and of weight syncs.
    """
    by_node: Counter[int] = Counter()
    at = {
        component: plan.placement.locations(component)
        for component in plan.placement.components
    }
    # Nodes of the GPUs in NCCL groups: one entry per GPU and group.
    members = [
        node
        for component, places in at.items()
        if role_of(component) not in ("env", "agent")
        and (max(places.count) if component == "rollout" else sum(places.count)) > 1
        for node, count in zip(places.node, places.count, strict=True)
        for _ in range(count)
    ]
    for delivery in plan.deliveries:
        if isinstance(delivery, DeviceDelivery) and delivery.grouped:
            members += at[delivery.source].node
            readers = at[delivery.target].node
            members += [readers[taker.rank] for taker in delivery.apart]
    for node in members:
        if plan.topology.nodes[node].kind == "cuda":
            by_node[node] += nccl_shared()
    return by_node


def channel_bytes(
    location: ChannelLocation,
    item_bytes: int = 0,
    participants: int = LEAST_PARTICIPANTS,
) -> int:
    """Return an upper bound of the bytes that one location of a channel takes in shared memory.

    `item_bytes`: bytes of the channel's largest item. `participants`: how many ranks and tools may use the channel.
    """
    room = (
        min(max(_ALL_ROOM // location.capacity_items, _LEAST_ROOM), _MOST_ROOM)
        // 64
        * 64
    )
    entries = (location.capacity_items + _SPARE_ENTRIES) * (room + _RECORD_BYTES)
    segments = (
        location.capacity_items * item_segment_bytes(item_bytes)
        if item_bytes > room
        else 0
    )
    names = participants * _PARTICIPANT_BYTES
    return _FIXED_BYTES + names + len(location.keys) * _KEY_BYTES + entries + segments


def item_segment_bytes(item_bytes: int) -> int:
    """Return the bytes of the shared-memory segment that holds an item of `item_bytes` bytes.

    Only few different segment sizes are used, so that a segment can be reused for many items. At most an eighth of a
    large segment is unused.
    """
    step = max(_SMALLEST_SEGMENT, 1 << max(0, (item_bytes - 1).bit_length() - 4))
    return -(-item_bytes // step) * step
