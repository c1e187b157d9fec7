"""Shared memory: the most that the channels and the weights of a run take of it on each node.

A channel's file has a fixed part, a record for each key, and room for its capacity in small items; a larger item lies
beside it in a segment while it is under way. The weights of a node have a double buffer.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rlplace.placement.channels import LEAST_PARTICIPANTS, ChannelLocation, participants_of
from rlplace.placement.flow import deliver_through_host
from rlplace.placement.language.spec import role_of
from rlplace.placement.memory.demands import Choices, PolicySpaces

if TYPE_CHECKING:
    from rlplace.config.schema import AlgorithmConfig
    from rlplace.placement.plan import Plan

# Of a channel's file; at least what the file takes, which a test compares.
_FIXED_BYTES = 64 << 10
_PARTICIPANT_BYTES = 448  # its name and its place among the waiters
_KEY_BYTES = 512
_RECORD_BYTES = 128  # of an entry, beside its room
_SPARE_ENTRIES = 16
_LEAST_ROOM, _MOST_ROOM, _ALL_ROOM = 512, 16 << 10, 16 << 20  # of an entry; of all together, between these two

_SMALLEST_SEGMENT = 64 << 10
_TABLE_BYTES = 64 << 10  # of the segments of one process
ITEM_BYTES = 2 << 10  # of an item beside its arrays: names, shapes, alignment
WEIGHT_BUFFERS = 2  # one is read while the other is written
_HEADER_BYTES = 64 << 10  # of a double buffer beside the weights
BUCKET_BYTES = 16 << 20  # of weights that travel to a copy on another node
_FLOAT32, _INT64 = 4, 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """Bytes by what they are for ("channels", "weights") and by node rank; nodes that are not named have none."""

    by_purpose: Mapping[str, Mapping[int, int]] = dataclasses.field(default_factory=dict)

    def largest(self, purpose: str, nodes: Iterable[int]) -> int:
        """What the fullest of `nodes` has for one purpose."""
        found = self.by_purpose[purpose]
        return max((found.get(node, 0) for node in nodes), default=0)


def count_shared(plan: Plan, item_bytes: Mapping[str, int], weights_bytes: int) -> SharedMemory:
    """`item_bytes`: of the largest item by channel; 0 or left out where it is not known, as `weights_bytes`."""
    by_node: Counter[int] = Counter()
    for channel in plan.channels:
        participants = participants_of(channel, plan.placement)
        for location in channel.locations():
            if not location.process:
                by_node[location.node] += channel_bytes(location, item_bytes.get(channel.name, 0), participants)
    for source in {c.source for c in plan.channels if item_bytes.get(c.name, 0) > _LEAST_ROOM}:
        for node in plan.placement.locations(source).node:
            by_node[node] += _TABLE_BYTES
    buffers = WEIGHT_BUFFERS * weights_bytes + _HEADER_BYTES if weights_bytes else 0
    nodes, through_host = plan.placement.locations("rollout").node, deliver_through_host(plan.deliveries)
    readers = {nodes[delivery.lead]: buffers for delivery in through_host}
    return SharedMemory(by_purpose={"channels": by_node, "weights": readers})


def channel_bytes(location: ChannelLocation, item_bytes: int = 0, participants: int = LEAST_PARTICIPANTS) -> int:
    """At most, of one location of a channel whose largest item has `item_bytes`."""
    room = min(max(_ALL_ROOM // location.capacity_items, _LEAST_ROOM), _MOST_ROOM) // 64 * 64
    entries = (location.capacity_items + _SPARE_ENTRIES) * (room + _RECORD_BYTES)
    segments = location.capacity_items * item_segment_bytes(item_bytes) if item_bytes > room else 0
    names = participants * _PARTICIPANT_BYTES
    return _FIXED_BYTES + names + len(location.keys) * _KEY_BYTES + entries + segments


def item_segment_bytes(item_bytes: int) -> int:
    """Segments have few sizes, so that one fits many items: at most an eighth is wasted on a large item."""
    step = max(_SMALLEST_SEGMENT, 1 << max(0, (item_bytes - 1).bit_length() - 4))
    return -(-item_bytes // step) * step


def simulator_items(plan: Plan, spaces: PolicySpaces, rollout_steps: int, weights_bytes: int) -> dict[str, int]:
    """Bytes of the largest items of a job with simulators, by channel, with every episode cut once in an iteration."""
    routes, actors = plan.row_routes, plan.placement.world_size("actor")
    through_host = deliver_through_host(plan.deliveries)
    observation = math.prod(spaces.observation_shape) * _FLOAT32
    action = _INT64 if isinstance(spaces.actions, Choices) else math.prod(spaces.actions.shape) * _FLOAT32
    decision = action + 2 * _FLOAT32  # with its log-probability and value
    step = observation + decision + _FLOAT32 + 2  # with its reward, and two marks of an end
    observed, gathered = routes.observations.most_rows, routes.trajectories.most_rows
    return {
        "observations": observed * observation + ITEM_BYTES,
        "actions": observed * decision + ITEM_BYTES,
        "trajectories": gathered * (rollout_steps * step + 2 * observation) + ITEM_BYTES,
        # What ranks of a copy's own node write there passes through no channel.
        "weights": min(BUCKET_BYTES, weights_bytes) if any(len(d.near) < actors for d in through_host) else 0,
    }


def text_items(plan: Plan, algorithm: AlgorithmConfig, weights_bytes: int) -> dict[str, int]:
    """The same of a job with text.

    A token has an id; an answer's, a log-probability and a version too; a sample's, a mask besides.
    """
    tokens, each = algorithm.longest, algorithm.samples_per_prompt
    bucket = min(BUCKET_BYTES, weights_bytes)
    items = {
        "requests": 4 * tokens + ITEM_BYTES,
        "completions": 12 * tokens + ITEM_BYTES,
        "samples": each * (13 * tokens + ITEM_BYTES),
        "scores": 4 * tokens + ITEM_BYTES,
        "returns": each * (4 * tokens + ITEM_BYTES),
        "weights": bucket if len(plan.deliveries) > 1 else 0,
    }
    items |= {c.name: items[role_of(c.name)] for c in plan.channels if c.name not in items}
    return {**items, "weights.reference": bucket}
