"""One member of a sync of device tensors: an actor rank that gives, or a rollout rank that takes; the group they form.

::

    bucket by bucket, in one order for all      owner fills ─▶ broadcast in the group ─▶ free readers take
                                                                        └─▶ hosts lend ─▶ their guests take

Each byte comes to each reader once, and nobody but a reader ever has more than two buckets of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rlplace.comm.device import DeviceGroup
from rlplace.comm.weights.meeting import Meeting, MeetingPoint
from rlplace.comm.weights.messages import DevicePush

_ALONE = "-"  # said by who is in no group now


class Joint:
    """Owns a member's end of the meeting and of the group, which is made in the first sync and after every failure."""

    def __init__(self, me: tuple[str, int], device: torch.device, *, timeout_s: float) -> None:
        """`me`: component and rank."""
        self._me = me
        self.device = device
        self._timeout_s = timeout_s
        self._meeting: Meeting | None = None
        self._point: MeetingPoint | None = None
        self._group: DeviceGroup | None = None
        self._formed = _ALONE  # the round in which the group was

    def meeting_at(self, point: MeetingPoint) -> Meeting:
        """RuntimeError if nobody serves it."""
        if self._meeting is None or self._point != point:
            self.leave()
            self._meeting, self._point = Meeting(point.enter(self._timeout_s), name(*self._me)), point
        return self._meeting

    def join(self, push: DevicePush, deadline_s: float) -> None:
        """Returns when all members are here and those of the group are in it. Raises as `Meeting.meet`."""
        meeting, delivery = self.meeting_at(push.meeting), push.delivery
        group = [name(*member) for member in delivery.group]
        guests = [name("rollout", r) for r in delivery.readers if delivery.host(r) is not None]
        words = meeting.meet(push.round, self._formed, [*group, *guests], deadline_s=deadline_s)
        if len(group) == 1 or meeting.me not in group:
            return
        if self._formed == _ALONE or len(set(words[: len(group)])) > 1:
            self.leave()
            self._group = DeviceGroup(
                meeting.group_store(push.round),
                rank=group.index(meeting.me),
                size=len(group),
                device=self.device,
                timeout_s=max(1.0, deadline_s - time.monotonic()),
            )
            self._formed = str(push.round)

    def broadcast(self, bucket: Tensor, owner: int) -> None:
        """From actor rank `owner`; nothing where it is alone."""
        if self._group is not None:
            self._group.broadcast(bucket, owner)

    def lacking(self, readers: Sequence[int], version: int) -> list[int]:
        """Rollout ranks that have not said that they have `version`; all of them where nobody can be asked."""
        try:
            return [r for r in readers if self._meeting is None or self._meeting.has(name("rollout", r)) < version]
        except RuntimeError:
            return list(readers)

    def leave(self) -> None:
        """The group: the next sync makes a new one, at every member."""
        if self._group is not None:
            self._group.close()
            self._group = None
        self._formed = _ALONE

    def close(self) -> None:
        self.leave()
        self._meeting = None


def name(component: str, rank: int) -> str:
    return f"{component} rank {rank}"


def carriers(device: torch.device) -> tuple[str, str]:
    """What lends and what broadcasts, as reports call it."""
    return ("cuda_ipc", "nccl") if device.type == "cuda" else ("shared_tensor", "gloo")


def give_back_memory(device: torch.device) -> None:
    """Buckets and copies are large and rare: others on the accelerator need the room in between."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
