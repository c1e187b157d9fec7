"""The queue in shared memory does what ChannelQueue says, whatever happens in whatever order.

Both are driven with the same events and the same clock. After each event, whoever was rung in the shared one looks
again, in an arbitrary order, until nobody is rung: a ring that is missing shows as a request that one of the two has
served and the other has not.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlplace.comm.channel import Admission, ChannelSpec, ChannelStats
from rlplace.comm.queue import ChannelQueue
from rlplace.comm.shared import endings, memory
from rlplace.comm.shared.census import stats
from rlplace.comm.shared.layout import NO_VERSION
from rlplace.comm.shared.liveness import this_process
from rlplace.comm.shared.memory import ChannelMemory
from rlplace.comm.shared.payload import Slabs
from rlplace.comm.shared.queue import SharedQueue
from rlplace.comm.shared.requests import GetBatchRequest, GetRequest, PutRequest, Request
from rlplace.comm.tickets import Get, GetBatch, Put, Reserve, Ticket
from rlplace.errors import ChannelBroken, ChannelError

OWNERS = st.sampled_from(["env rank 0", "env rank 1", "rollout rank 0"])
KEYS = st.sampled_from(["", "a", "ü"])
WEIGHTS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])
POLICIES = st.sampled_from(["at_most", "at_least", "exact"])


class Pair:
    """One request on both sides."""

    def __init__(self, ticket: Ticket, request: Request, waits: bool) -> None:
        self.ticket = ticket
        self.request = request
        self.waits = waits
        self.done = False
        self.error: ChannelError | None = None

    @property
    def outcome(self) -> tuple[bool, str | None, list[Any] | None]:
        taken = [pickle.loads(t.data) for t in self.request.taken] if isinstance(self.request, GetRequest) else None
        return self.done or self.error is not None, _of(self.error), taken

    @property
    def expected(self) -> tuple[bool, str | None, list[Any] | None]:
        taken = [entry.item for entry in self.ticket.taken] if isinstance(self.ticket, Get) else None
        return self.ticket.settled, _of(self.ticket.error), taken

    @property
    def open(self) -> bool:
        return not self.ticket.settled

    @property
    def took(self) -> bool:
        return isinstance(self.ticket, Get) and bool(self.ticket.taken)

    @property
    def reserved(self) -> bool:
        return isinstance(self.ticket, Reserve) and self.request.entry != 0 and not self.open  # type: ignore[attr-defined]


def _of(error: ChannelError | None) -> str | None:
    return None if error is None else f"{type(error).__name__} {error.problem.code} {error.problem.what}"


class SharedAndSpecified(RuleBasedStateMachine):
    @initialize(
        items=st.integers(1, 4),
        size_bytes=st.sampled_from([None, 5]),
        keys=st.sampled_from([None, ("", "a", "ü")]),
        producers=st.sampled_from([None, 2]),
        serving=st.sampled_from(["first_come", "least_loaded"]),
        admission=st.sampled_from([None, Admission(weight_per_version=2.0, max_staleness=1)]),
        seed=st.integers(0, 1000),
    )
    def begin(self, items: int, size_bytes: int | None, seed: int, **fields: Any) -> None:
        spec = ChannelSpec(name="q", capacity_items=items, capacity_bytes=size_bytes, **fields)
        self.folder = Path(tempfile.mkdtemp())
        memory.make(self.folder / "q.channel", spec)
        self.memory = ChannelMemory(self.folder / "q.channel")
        self.shared = SharedQueue(self.memory, this_process(), Slabs(self.folder))
        self.specified = ChannelQueue(spec)
        self.random = random.Random(seed)
        self.pairs: list[Pair] = []  # a request's bell is its place here, from 1
        self.now = 0.0
        self.items = 0
        self.waits_differ = False  # the two do not count the waits that were cut short alike

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(
        owner=OWNERS,
        key=KEYS,
        weight=WEIGHTS,
        size=st.integers(0, 6),
        version=st.sampled_from([None, 0, 2]),
        later=st.booleans(),
        waits=st.booleans(),
    )
    def put(
        self, owner: str, key: str, weight: float, size: int, version: int | None, later: bool, waits: bool
    ) -> None:
        self.items += 1
        kind = Reserve if later and waits else Put
        ticket = kind(
            owner=owner, key=key, weight=weight, size_bytes=size, version=version, item=None if later else self.items
        )
        if not waits:
            later, ticket.item = False, self.items
        data = None if later else pickle.dumps(self.items)
        stamp = NO_VERSION if version is None else version
        self.begin_pair(ticket, PutRequest(self.shared, owner, key, size, weight, stamp, data), waits)

    @rule(owner=OWNERS, key=KEYS, waits=st.booleans())
    def get(self, owner: str, key: str, waits: bool) -> None:
        self.begin_pair(Get(owner=owner, key=key), GetRequest(self.shared, owner, key), waits)

    @rule(owner=OWNERS, key=KEYS, weight=WEIGHTS, policy=POLICIES, waits=st.booleans())
    def get_batch(self, owner: str, key: str, weight: float, policy: Any, waits: bool) -> None:
        ticket = GetBatch(owner=owner, key=key, weight=weight, policy=policy)
        self.begin_pair(ticket, GetBatchRequest(self.shared, owner, key, weight, policy), waits)

    @precondition(lambda self: any(p.reserved for p in self.pairs))
    @rule(data=st.data())
    def fill_or_cancel(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from([p for p in self.pairs if p.reserved]))
        assert isinstance(pair.ticket, Reserve)
        assert isinstance(pair.request, PutRequest)
        if data.draw(st.booleans()):
            self.items += 1
            self.specified.fill(pair.ticket, self.items, self.now)
            with contextlib.suppress(ChannelBroken):
                pair.request.fill(pickle.dumps(self.items), 0)
        else:
            self.specified.withdraw(pair.ticket, self.now)
            pair.request.cancel()

    @precondition(lambda self: any(p.open for p in self.pairs))
    @rule(data=st.data(), patient=st.booleans())
    def give_up(self, data: st.DataObject, patient: bool) -> None:
        pair = data.draw(st.sampled_from([p for p in self.pairs if p.open]))
        if patient:
            self.specified.expire(pair.ticket, self.now)
            pair.error = pair.request.expired(self.now)
        else:
            self.waits_differ = True
            self.specified.withdraw(pair.ticket, self.now)
            pair.request.withdraw(self.now)
            pair.done = True

    @precondition(lambda self: any(p.took for p in self.pairs) and self.specified.stats(0).depth_items < 10)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from([p for p in self.pairs if p.took]))
        assert isinstance(pair.request, GetRequest)
        self.specified.withdraw(pair.ticket, self.now)
        with contextlib.suppress(ChannelBroken):
            pair.request.restore([(taken.data, 0) for taken in pair.request.taken])
        pair.request.taken.clear()  # also where it is broken

    @rule(seconds=st.integers(1, 5))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(version=st.integers(0, 4))
    def advance(self, version: int) -> None:
        self.specified.advance(version, self.now)
        endings.advance(self.shared, version)

    @rule(owner=OWNERS)
    def leave(self, owner: str) -> None:
        self.specified.leave(owner, self.now)
        endings.leave(self.shared, owner)

    @rule(rarely=st.integers(0, 9))
    def close(self, rarely: int) -> None:
        if rarely == 0:
            self.waits_differ = True
            self.specified.close(self.now)
            endings.close(self.shared)

    @rule(rarely=st.integers(0, 19))
    def break_(self, rarely: int) -> None:
        if rarely == 0:
            self.waits_differ = True
            self.specified.break_("why not", self.now)
            endings.break_(self.shared, "why not")

    @rule(owner=OWNERS, rarely=st.integers(0, 4))
    def died(self, owner: str, rarely: int) -> None:
        if rarely == 0 and owner in self.specified.stats(self.now).producers:
            self.waits_differ = True
            self.specified.died(owner, self.now)
            endings.end_of_owner(self.shared, owner)

    # ── comparison ───────────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def both_agree(self) -> None:
        if not hasattr(self, "pairs"):
            return
        self.settle()
        for pair in self.pairs:
            assert pair.outcome == pair.expected
        assert self.comparable(stats(self.shared, self.now)) == self.comparable(self.specified.stats(self.now))

    def comparable(self, found: ChannelStats) -> dict[str, Any]:
        fields = {name: getattr(found, name) for name in ChannelStats.__dataclass_fields__}
        if self.waits_differ:
            del fields["producer_wait_s"], fields["consumer_wait_s"]
        putters = [w for w in found.waits if w.wants != "item"]
        getters = sorted((w for w in found.waits if w.wants == "item"), key=lambda w: w.key)  # keeps order within a key
        return {**fields, "waits": (putters, getters), "dead": set(found.dead)}

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin_pair(self, ticket: Put | Get, request: Request, waits: bool) -> None:
        pair = Pair(ticket, request, waits)
        self.pairs.append(pair)
        if waits:
            self.specified.put(ticket, self.now) if isinstance(ticket, Put) else self.specified.get(ticket, self.now)
            self.attempt(pair, bell=len(self.pairs))
        else:
            self.specified.attempt(ticket, self.now)
            self.attempt(pair, bell=0)
            if not pair.done and pair.error is None:
                pair.error = request.refused(self.now)

    def attempt(self, pair: Pair, bell: int) -> None:
        try:
            pair.done = pair.request.attempt(bell, self.now)
        except ChannelError as error:
            pair.error = error

    def settle(self) -> None:
        """Who was rung looks again, until nobody is."""
        while self.shared.rings:
            bells, self.shared.rings = self.shared.rings, []
            self.random.shuffle(bells)
            for bell in bells:
                pair = self.pairs[bell - 1]
                if not pair.done and pair.error is None:
                    self.attempt(pair, bell)


TestSharedAndSpecified = SharedAndSpecified.TestCase
TestSharedAndSpecified.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
