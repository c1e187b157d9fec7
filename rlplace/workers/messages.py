"""Messages from one worker to another, by component and rank.

::

    actor rank 0 ── send(value, to="rollout", rank=1) ──▶ mailbox of rollout rank 1's node
                                                          key "actor rank 0 to rank 1"
    rollout rank 1 ── recv(source="actor", rank=0) ◀──────┘

A mailbox is a channel for all ranks of a group on one node. It breaks when its group ends, which also ends the waits of
senders. A receiver waits at its own mailbox, so the launcher tells it when the group of the sender has ended.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from rlplace.codes import problem
from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.errors import (
    ChannelBroken,
    ChannelTimeout,
    WorkerMisuse,
    did_you_mean,
    suggestion,
)
from rlplace.placement.language.slots import Slot, owner_of

# most messages that wait in one mailbox
CAPACITY = 64
TIMEOUT_S = 120.0  # deadline of a send or recv without one of its own
_PARTICIPANTS = 1024  # most names, and most sender-receiver pairs
# interval at which a receiver checks whether the sender's group has ended
_LOOK_S = 0.25


def mailbox_spec(name: str, ranks: int) -> ChannelSpec:
    """Return the spec of a mailbox: the channel that takes messages to the ranks of a group on one node.

    `name`: name of the channel. `ranks`: number of these ranks.
    """
    return ChannelSpec(
        name=name,
        capacity_items=CAPACITY,
        participants=_PARTICIPANTS + CAPACITY * ranks,
        timeout_s=TIMEOUT_S,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """The channels through which the ranks of the group `group` receive messages, one channel for each node of the
    group.

    `of_rank`: for each rank, the index of its channel in `channels`.
    """

    group: str
    channels: tuple[Channel, ...]  # one channel for each node of the group
    of_rank: tuple[int, ...]  # for each rank, the index of its channel

    @property
    def world_size(self) -> int:
        return len(self.of_rank)


class Messages:
    """Sends and receives the messages of one worker.

    Thread-safe: the launcher may report at any time that groups have started or ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Mailboxes by group; the channels are the worker's own ends
        self._mailboxes: dict[str, Mailbox] = {}
        # Ended groups, and why
        self._gone: dict[str, str] = {}

    def meet(self, mailboxes: Iterable[Mailbox]) -> None:
        """Register the mailboxes of groups that have started. A group that had ended before is then running again."""
        with self._lock:
            for mailbox in mailboxes:
                self._mailboxes[mailbox.group] = mailbox
                self._gone.pop(mailbox.group, None)

    def part(self, group: str, why: str) -> None:
        """Record that `group` has ended, so that waits for its messages end with an error.

        `why`: the reason, for errors.
        """
        with self._lock:
            self._gone[group] = why

    def world_size(self, owner: str, group: str) -> int:
        """Return the number of ranks of `group`. Raise WorkerMisuse if there is no such group.

        `owner`: name of the asking worker in errors.
        """
        return self._mailbox(owner, group).world_size

    def send(
        self,
        value: Any,
        sender: Slot,
        to: str,
        rank: int,
        timeout_s: float | None,
        topic: str = "",
    ) -> None:
        """Send `value` to rank `rank` of group `to`.

        `sender`: slot of the sending worker. `timeout_s`: the most seconds to wait until the receiver's mailbox has
        room; None: 120. `topic`: kind of the message; a receiver gets only messages of the topic that it asks for.
        Raise WorkerMisuse if the receiver does not exist, ChannelBroken if its group has ended, ChannelTimeout if the
        mailbox stays full.
        """
        owner = sender.owner
        mailbox = self._mailbox(owner, to)
        receiver = self._peer(owner, mailbox, rank)
        if gone := self._why_gone(to):
            raise _peer_gone(owner, f"send to {receiver}", gone)
        channel = mailbox.channels[mailbox.of_rank[rank]]
        try:
            channel.put(value, key=_key(owner, rank, topic), timeout_s=timeout_s)
        except ChannelTimeout as late:
            raise ChannelTimeout(
                problem(
                    "message-timeout",
                    owner,
                    str(late),
                    error="send",
                    receiver=receiver,
                    capacity=CAPACITY,
                    to=to,
                )
            ) from late
        except ChannelBroken as broken:
            raise _peer_gone(owner, f"send to {receiver}", str(broken)) from broken

    def recv(
        self,
        receiver: Slot,
        source: str,
        rank: int,
        timeout_s: float | None,
        check: Callable[[], None],
        topic: str = "",
    ) -> Any:
        """Wait for the next message from rank `rank` of group `source`, and return its value. Messages keep their
        order.

        `receiver`: slot of the receiving worker. `timeout_s`: the most seconds to wait; None: 120. `check`: called
        during the wait; if it raises an error, the wait ends. `topic`: kind of message, as the sender has named it.
        Raise WorkerMisuse if the sender does not exist, ChannelBroken if its group has ended and no message is left,
        ChannelTimeout after `timeout_s`.
        """
        owner = receiver.owner
        sender = self._peer(owner, self._mailbox(owner, source), rank)
        own = self._mailbox(owner, receiver.component)
        channel = own.channels[own.of_rank[receiver.rank]]
        key = _key(sender, receiver.rank, topic)
        patience_s = TIMEOUT_S if timeout_s is None else timeout_s
        until = time.monotonic() + patience_s
        while True:
            left_s = until - time.monotonic()
            # Read this before looking for a message: the sender may have sent a last one before its end.
            gone = self._why_gone(source)
            look_s = 0.0 if gone else max(0.0, min(left_s, _LOOK_S))
            try:
                return channel.get(key=key, timeout_s=look_s)
            except ChannelTimeout:
                check()
                if gone:
                    raise _peer_gone(owner, f"a message of {sender}", gone) from None
            except ChannelBroken as broken:
                raise _peer_gone(
                    owner, f"a message of {sender}", str(broken)
                ) from broken
            if left_s <= _LOOK_S:
                raise ChannelTimeout(
                    problem(
                        "message-timeout",
                        owner,
                        error="receive",
                        patience_s=patience_s,
                        sender=sender,
                        owner=owner,
                    )
                )

    def _mailbox(self, owner: str, group: str) -> Mailbox:
        with self._lock:
            if group in self._mailboxes:
                return self._mailboxes[group]
            known = sorted(self._mailboxes)
        unknown = problem(
            "unknown-group",
            owner,
            repr(group),
            name=group,
            hint=suggestion(did_you_mean(group, known)),
            known=", ".join(known) or "none",
        )
        raise WorkerMisuse(unknown)

    def _peer(self, owner: str, mailbox: Mailbox, rank: int) -> str:
        """Return the name of rank `rank` of the mailbox's group, such as "actor rank 0". Raise WorkerMisuse if there is
        no such rank.

        `owner`: name of the asking worker in errors.
        """
        if type(rank) is not int or not 0 <= rank < mailbox.world_size:
            raise WorkerMisuse(
                problem(
                    "no-such-rank",
                    owner,
                    f"rank={rank!r}",
                    error="message",
                    group=mailbox.group,
                    rank=rank,
                    last=mailbox.world_size - 1,
                )
            )
        return owner_of(mailbox.group, rank)

    def _why_gone(self, group: str) -> str:
        """Return the reason why `group` has ended, or "" if it has not ended."""
        with self._lock:
            return self._gone.get(group, "")


def _key(sender: str, rank: int, topic: str) -> str:
    return f"{topic}{sender} to rank {rank}"


def _peer_gone(owner: str, wanted: str, why: str) -> ChannelBroken:
    error = "receive"
    if wanted.startswith("send"):
        error = "send"
    gone = problem("peer-gone", owner, error=error, wanted=wanted, reason=why)
    return ChannelBroken(gone)
