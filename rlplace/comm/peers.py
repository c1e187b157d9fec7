"""Point to point and collectives between workers of any groups, over one channel whose keys name sender and receiver.

::

    env rank 2 ── send(x, to=rollout 3, tag="t") ──▶ key "env 2>rollout 3/t" ──▶ recv(source=env 2, tag="t")
    collectives   key "all>env 1/t", each value with its sender and what it is part of:
                  "all_gather, number 4 of env rank 0, env rank 1"

Messages of one source and tag arrive in the order they were sent. Collectives of the same ranks and tag are started in
the same order everywhere; a value that is part of another collective than the receiver's is an error that names both.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlplace.comm.channel import Channel, Lease
from rlplace.comm.handles import Handle, Inbox, Mailbox, Outbox, Receive, Send
from rlplace.errors import ChannelMisuse, ChannelTimeout, Problem

_SHOWN = 8  # members of a group listed by name
_DRAIN_S = 0.02  # how often an end that waits for credit takes in what others have sent it


class Peer(NamedTuple):
    """One end: a rank of a component, or of whatever the caller numbers."""

    component: str
    rank: int

    def __str__(self) -> str:
        return f"{self.component} rank {self.rank}"

    @classmethod
    def all(cls, component: str, world_size: int) -> tuple[Peer, ...]:
        """All ranks of a component, as a group."""
        return tuple(cls(component, rank) for rank in range(world_size))


class Peers:
    """What the worker `me` sends to and receives from others. All ends of a job use one channel without declared keys.

    Blocking forms raise as the channel does; `timeout_s=None` is the channel's deadline. The `i` forms start an
    operation and return its Handle. Sends, receives of different sources and tags, and collectives of different tags
    may run in threads of their own. A received value is the caller's own; within one process it passes by reference.

    A send waits where the channel has no credit, until somebody receives: two that only send to each other are stuck.
    Collectives never are: who waits in one takes in all that others have sent it. Their tags are remembered: use few.
    """

    def __init__(self, channel: Channel, me: Peer) -> None:
        self.me = me
        self._channel = channel.named(str(me))
        self._outbox = Outbox(self._channel, str(me))
        self._inboxes: dict[str, Inbox] = {}  # by key, while a started receive is not done
        self._mailboxes: dict[str, Mailbox] = {}  # by tag
        self._started: dict[tuple[str, str], int] = {}  # (group, tag) -> collectives started

    # ── point to point ───────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, value: Any, *, to: Peer, tag: str = "", timeout_s: float | None = None) -> None:
        """Blocks until the channel has the value, not until it is received."""
        self._outbox.send(value, self._key(self.me, to, tag), timeout_s)

    def isend(self, value: Any, *, to: Peer, tag: str = "") -> Handle[None]:
        return self._outbox.start(value, self._key(self.me, to, tag))

    def recv(self, *, source: Peer, tag: str = "", timeout_s: float | None = None) -> Any:
        try:
            return self._receive(self._channel.get, self._key(source, self.me, tag), timeout_s)
        except ChannelTimeout as late:
            raise self._late(late, f"a message{_tagged(tag)}", source) from None

    def recv_lease(self, *, source: Peer, tag: str = "", timeout_s: float | None = None) -> Lease:
        """As `recv`, without the copy where the way can map memory."""
        try:
            lease: Lease = self._receive(self._channel.get_lease, self._key(source, self.me, tag), timeout_s)
        except ChannelTimeout as late:
            raise self._late(late, f"a message{_tagged(tag)}", source) from None
        return lease

    def irecv(self, *, source: Peer, tag: str = "") -> Handle[Any]:
        key = self._key(source, self.me, tag)
        inbox = self._inboxes.get(key)
        if inbox is None:
            inbox = self._inboxes[key] = Inbox(self._channel, key, lambda: self._inboxes.pop(key))
        return inbox.start(self._channel.get)

    # ── collectives ──────────────────────────────────────────────────────────────────────────────────────────────────

    def broadcast(
        self, value: Any = None, *, source: Peer, group: Sequence[Peer], tag: str = "", timeout_s: float | None = None
    ) -> Any:
        """`value` of `source` at every member of `group`; what others give as `value` is ignored."""
        return self.ibroadcast(value, source=source, group=group, tag=tag).wait(timeout_s)

    def ibroadcast(self, value: Any = None, *, source: Peer, group: Sequence[Peer], tag: str = "") -> Handle[Any]:
        return self._begin(f"broadcast from {source}", value, [source], group, group, tag, lambda got: got[source])

    def gather(
        self, value: Any, *, to: Peer, group: Sequence[Peer], tag: str = "", timeout_s: float | None = None
    ) -> list[Any] | None:
        """The values of all members in the order of `group`, at `to`; None elsewhere."""
        return self.igather(value, to=to, group=group, tag=tag).wait(timeout_s)

    def igather(self, value: Any, *, to: Peer, group: Sequence[Peer], tag: str = "") -> Handle[list[Any] | None]:
        def finish(got: Mapping[Peer, Any]) -> list[Any] | None:
            return [got[peer] for peer in group] if self.me == to else None

        return self._begin(f"gather to {to}", value, group, [to], group, tag, finish)

    def all_gather(
        self, value: Any, *, group: Sequence[Peer], tag: str = "", timeout_s: float | None = None
    ) -> list[Any]:
        """The values of all members in the order of `group`, at every member."""
        values: list[Any] = self.iall_gather(value, group=group, tag=tag).wait(timeout_s)
        return values

    def iall_gather(self, value: Any, *, group: Sequence[Peer], tag: str = "") -> Handle[list[Any]]:
        return self._begin("all_gather", value, group, group, group, tag, lambda got: [got[peer] for peer in group])

    def barrier(self, *, group: Sequence[Peer], tag: str = "", timeout_s: float | None = None) -> None:
        """Returns when every member has come here."""
        first = group[0]
        deadline_s = time.monotonic() + (self._channel.spec.timeout_s if timeout_s is None else timeout_s)
        for senders, receivers in ((group, [first]), ([first], group)):
            step = self._begin("barrier", None, senders, receivers, group, tag, lambda got: None)
            step.wait(max(0.0, deadline_s - time.monotonic()))

    def close(self) -> None:
        """Forgets what waits to be sent. The channel belongs to whoever made it."""
        self._outbox.close()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(
        self,
        operation: str,
        value: Any,
        senders: Sequence[Peer],
        receivers: Sequence[Peer],
        group: Sequence[Peer],
        tag: str,
        finish: Callable[[Mapping[Peer, Any]], Any],
    ) -> Collective:
        """Starts an operation in which every sender sends its value to every receiver, all of them in `group`."""
        self._check(operation, {self.me, *senders, *receivers}, group)
        names = _names(group)
        number = self._started.get((names, tag), 0)
        self._started[names, tag] = number + 1
        name = f"{operation}{_tagged(tag)}, number {number} of {names}"
        mailbox, message = self._mailbox(tag), (self.me, (name, value))
        targets = receivers if self.me in senders else ()
        sources = senders if self.me in receivers else ()
        sends = [self._outbox.start(message, _all_key(peer, tag)) for peer in targets if peer != self.me]
        receives = {peer: mailbox.start(peer) for peer in sources if peer != self.me}
        return Collective(self, name, mailbox, {self.me: value}, sends, receives, finish)

    def _check(self, operation: str, needed: set[Peer], group: Sequence[Peer]) -> None:
        missing = sorted(needed - set(group))
        if missing or len(set(group)) != len(group):
            raise ChannelMisuse(
                Problem(
                    code="bad-group",
                    key=f"channel {self._channel.spec.name}",
                    what=f"{self.me} started {operation} "
                    + (f"without {missing[0]}" if missing else "with a rank twice"),
                    got=_names(group),
                    why="a group names every rank that takes part, once, and its caller too",
                )
            )

    @staticmethod
    def _key(source: Peer, target: Peer, tag: str) -> str:
        return f"{source[0]} {source[1]}>{target[0]} {target[1]}/{tag}"

    def _receive(self, get: Callable[..., Any], key: str, timeout_s: float | None) -> Any:
        inbox = self._inboxes.get(key)
        return get(key=key, timeout_s=timeout_s) if inbox is None else inbox.receive(get, timeout_s)

    def _mailbox(self, tag: str) -> Mailbox:
        mailbox = self._mailboxes.get(tag)
        if mailbox is None:
            mailbox = self._mailboxes[tag] = Mailbox(self._channel, _all_key(self.me, tag))
        return mailbox

    def _late(self, late: ChannelTimeout, wanted: str, source: Peer) -> ChannelTimeout:
        """The channel's error with what was waited for, and what the other one is doing instead."""
        stats = self._channel.stats()
        waits = [f"{w.wants} at key {w.key!r}" for w in stats.waits if w.owner == str(source)]
        if str(source) in stats.dead:
            other = f"{source} is dead"
        elif waits:
            other = f"{source} itself waits for {', '.join(waits)}"
        else:
            other = f"{source} does not wait for anybody here"
        what = f"{late.problem.what} of {source}: {wanted}"
        return ChannelTimeout(dataclasses.replace(late.problem, what=what, why=f"{other}\n{late.problem.why}"))


class Collective:
    """A collective under way at one of its members."""

    def __init__(
        self,
        peers: Peers,
        name: str,
        mailbox: Mailbox,
        values: dict[Peer, Any],
        sends: Sequence[Send],
        receives: dict[Peer, Receive],
        finish: Callable[[Mapping[Peer, Any]], Any],
    ) -> None:
        self._peers = peers
        self._name = name
        self._mailbox = mailbox
        self._values = values
        self._sends = sends
        self._receives = receives  # of those whose values are still to come
        self._finish = finish

    def done(self) -> bool:
        for peer in [peer for peer, receive in self._receives.items() if receive.done()]:
            self._take(peer, None)
        return not self._receives and all(send.done() for send in self._sends)

    def wait(self, timeout_s: float | None = None) -> Any:
        spec = self._peers._channel.spec
        deadline_s = time.monotonic() + (spec.timeout_s if timeout_s is None else timeout_s)
        for peer in list(self._receives):
            self._take(peer, max(0.0, deadline_s - time.monotonic()))
        for send in self._sends:
            self._finish_sending(send, deadline_s)
        return self._finish(self._values)

    def _finish_sending(self, send: Send, deadline_s: float) -> None:
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                return send.wait(min(left_s, _DRAIN_S))
            except ChannelTimeout:
                if left_s <= _DRAIN_S:
                    raise
                self._mailbox.drain()

    def _take(self, peer: Peer, timeout_s: float | None) -> None:
        try:
            name, value = self._receives[peer].wait(timeout_s)
        except ChannelTimeout as late:
            raise self._peers._late(late, self._name, peer) from None
        if name != self._name:
            raise ChannelMisuse(
                Problem(
                    code="collective-mismatch",
                    key=f"channel {self._peers._channel.spec.name}",
                    what=f"{self._peers.me} and {peer} are in different collectives",
                    got=f"{self._peers.me}: {self._name}\n{peer}: {name}",
                    why="ranks of a group start the same collectives in the same order; others need another tag",
                )
            )
        self._values[peer] = value
        del self._receives[peer]


def _all_key(target: Peer, tag: str) -> str:
    return f"all>{target[0]} {target[1]}/{tag}"


def _tagged(tag: str) -> str:
    return f" tagged {tag!r}" if tag else ""


def _names(group: Sequence[Peer]) -> str:
    """The members for people, and for machines different for different groups."""
    if len(group) <= _SHOWN:
        return ", ".join(map(str, group))
    digest = zlib.crc32(repr(tuple(group)).encode())
    return f"{', '.join(map(str, group[:_SHOWN]))} and {len(group) - _SHOWN} more ({digest:08x})"
