"""The actor's part in a sync of device tensors: fills its buckets, broadcasts them, lends all of them to its guests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch

from rlplace.comm.channel import Channel
from rlplace.comm.weights import refusals
from rlplace.comm.weights.joint import Joint, carriers, give_back_memory, name
from rlplace.comm.weights.lending import Lender
from rlplace.comm.weights.meeting import MeetingPoint
from rlplace.comm.weights.messages import DevicePush
from rlplace.comm.weights.plan import Assembly
from rlplace.comm.weights.sync import Shard

DEVICE_BUCKET_BYTES = 64 << 20  # large enough that telling of a bucket takes little of its time


class DeviceSender:
    """Takes part for actor rank `rank`; rank 0 tells the readers. A push is over when every reader has all of it.

    `meeting`: a store that all members reach, such as the one by which the actor ranks joined.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        rank: int,
        device: torch.device,
        meeting: MeetingPoint,
        bucket_bytes: int = DEVICE_BUCKET_BYTES,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._device = device
        self._point = meeting
        self._bucket_bytes = bucket_bytes
        self._joint = Joint(("actor", rank), device, timeout_s=channel.spec.timeout_s)
        self._round = 0

    def send(
        self, assembly: Assembly, version: int, shards: Sequence[Shard], *, partial: bool, checked: bool
    ) -> Counter[str]:
        """Bytes by what carried them. Blocks until the readers have taken them; raises WeightSyncError or
        ChannelTimeout, and then the readers have what they had."""
        deadline_s = time.monotonic() + self._channel.spec.timeout_s
        push = DevicePush(
            round=self._round,
            version=version,
            assembly=assembly,
            bucket_bytes=self._bucket_bytes,
            partial=partial,
            checked=checked,
            meeting=self._point,
        )
        self._round += 1
        if self._rank == 0:
            for reader in push.delivery.readers:
                self._channel.put(push, key=str(reader))
        me = name("actor", self._rank)
        try:
            self._joint.join(push, deadline_s)
            guests = push.delivery.guests(self._rank)
            meeting = self._joint.meeting_at(self._point)
            lender = Lender(meeting, [name("rollout", guest) for guest in guests], deadline_s=deadline_s)
            return self._give(push, shards, lender)
        except RuntimeError as error:
            lacking = self._joint.lacking(push.delivery.readers, version)
            raise refusals.broken_off(me, version, str(error), lacking) from error

    def _give(self, push: DevicePush, shards: Sequence[Shard], lender: Lender) -> Counter[str]:
        lent, broadcast = carriers(self._device)
        ways: Counter[str] = Counter()
        guests, several = len(push.delivery.guests(self._rank)), len(push.delivery.group) > 1
        whole = False
        try:
            for bucket in push.buckets():
                data = bucket.empty(self._device)
                size = push.assembly.layout.count_bytes(bucket.pieces)
                if bucket.owner == self._rank:
                    bucket.fill(data, shards, checked=push.checked)
                    ways[broadcast] += several * size
                self._joint.broadcast(data, bucket.owner)
                lender.lend(data)
                ways[lent] += guests * size
            lender.finish()
            whole = True
        finally:
            if not whole:
                self._joint.leave()
                lender.break_off(f"actor rank {self._rank} could not go on")
            give_back_memory(self._device)
        return +ways

    def close(self) -> None:
        self._joint.close()
