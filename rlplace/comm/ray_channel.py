"""The channel between the workers of a Ray job: its state sits in one asyncio actor, and every end is a handle on it.

::

    small item (<= INLINE_BYTES)    producer ── put(bytes) ──▶ seat ── reply to a waiting get ──▶ consumer
    large item                      producer ── reserve ──▶ seat     credit first
                                    producer: ray.put ── fill(reference) ──▶ seat ── reference ──▶ consumer: ray.get

A message costs one actor call to put and one to get; a get waits inside the seat, nobody polls. Guarantees at a death:

- The seat: every end raises ChannelBroken.
- A waiting consumer: its waiter is withdrawn when Ray reports the death (about two seconds), so an item put later goes
  to others. An item granted to it before that report is lost with it, like one that it had just taken.
- A cancelled `get_async`: an item granted at that moment returns to the front of its line.
- A producer: small items are safe in the seat; a large one dies with it, and taking that raises ChannelBroken.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import uuid
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError

from rlplace.comm import codec, refusals
from rlplace.comm.channel import BatchPolicy, ChannelSpec, ChannelStats
from rlplace.comm.seat import ChannelSeat, Entry, pack, refused, unpack
from rlplace.errors import ChannelBroken, ChannelError

INLINE_BYTES = 32 << 10  # above this, credit is granted before data moves and the data bypasses the seat
_GRACE_S = 10.0  # how much later than its deadline a reply may come before the seat counts as silent
_WAITERS = 10_000  # requests that may wait in one seat at a time


class RayChannel:
    """Implements Channel between processes. Picklable; what `get` returns is the caller's own copy, writable.

    The classes of items must be importable on both sides. Requests of one end from several threads are not ordered.
    """

    def __init__(self, spec: ChannelSpec, line: _Line, owner: str) -> None:
        self._spec = spec
        self._line = line  # shared by all ends of this process that were `named` from one another
        self._owner = owner

    @classmethod
    def create(cls, spec: ChannelSpec, *, scheduling_strategy: Any = None) -> RayChannel:
        """Starts the seat where `scheduling_strategy` says (None: anywhere) and does not wait for it: see `ready`.

        The seat ends with its last end, or by `destroy`.
        """
        seat = (
            ray.remote(ChannelSeat)
            .options(
                num_cpus=0,
                max_concurrency=_WAITERS,
                max_restarts=0,
                enable_task_events=False,
                scheduling_strategy=scheduling_strategy,
            )
            .remote(spec)
        )
        return cls(spec, _Line(seat), "an unnamed worker")

    @property
    def spec(self) -> ChannelSpec:
        return self._spec

    def named(self, owner: str) -> RayChannel:
        return RayChannel(self._spec, self._line, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._spec, self._line.seat, self._owner)

    # ── putting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, item: Any, *, key: str = "", weight: float = 1.0, timeout_s: float | None = None) -> None:
        self._put(item, key, weight, self._patience(timeout_s))

    def put_nowait(self, item: Any, *, key: str = "", weight: float = 1.0) -> None:
        self._put(item, key, weight, None)

    async def put_async(self, item: Any, *, key: str = "", weight: float = 1.0, timeout_s: float | None = None) -> None:
        ask = self._ask("put", key, self._patience(timeout_s))
        size_bytes = codec.size_bytes(item)
        reply = await self._answer(ask, self._submit_put(ask, item, weight, size_bytes))
        self._check(reply)
        if size_bytes > INLINE_BYTES:
            await self._answer(ask, self._ship(ask, item))

    def _put(self, item: Any, key: str, weight: float, patience_s: float | None) -> None:
        ask = self._ask("put", key, patience_s)
        size_bytes = codec.size_bytes(item)
        reply = self._wait(ask, self._submit_put(ask, item, weight, size_bytes))
        self._check(reply)
        if size_bytes > INLINE_BYTES:
            self._wait(ask, self._ship(ask, item))

    def _submit_put(self, ask: _Ask, item: Any, weight: float, size_bytes: int) -> ray.ObjectRef[bytes]:
        if size_bytes > INLINE_BYTES:
            return self._line.reserve.remote(pack(ask.request, weight, size_bytes))
        return self._line.put.remote(pack(ask.request, weight, size_bytes, codec.dumps(item)))

    def _ship(self, ask: _Ask, item: Any) -> ray.ObjectRef[None]:
        """Sends the data that credit was granted for; the credit returns if the item cannot be stored."""
        stored = None
        try:
            pieces = codec.encode(item)
            stored = ray.put((pieces.header, [np.asarray(b) for b in pieces.buffers]))
        finally:
            if stored is None:
                self._line.withdraw(ask)
        return self._line.seat.fill.remote(self._line.client, ask.serial, [stored])

    # ── getting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        return self._get(key, None, self._patience(timeout_s))[0]

    def get_nowait(self, *, key: str = "") -> Any:
        return self._get(key, None, None)[0]

    def get_batch(
        self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most", timeout_s: float | None = None
    ) -> list[Any]:
        return self._get(key, (weight, policy), self._patience(timeout_s))

    async def get_async(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        ask = self._ask("get", key, self._patience(timeout_s))
        (entry,) = self._entries(await self._answer(ask, self._line.get.remote(pack(ask.request, None))))
        if isinstance(entry.data, bytes):
            return codec.loads(entry.data)
        return _own(await self._answer(self._ask("fetch", key, self._spec.timeout_s), entry.data))

    def _get(self, key: str, batch: tuple[float, BatchPolicy] | None, patience_s: float | None) -> list[Any]:
        ask = self._ask("get", key, patience_s)
        entries = self._entries(self._wait(ask, self._line.get.remote(pack(ask.request, batch))))
        return [codec.loads(e.data) if isinstance(e.data, bytes) else self._fetch(key, e.data) for e in entries]

    def _fetch(self, key: str, reference: ray.ObjectRef[Any]) -> Any:
        return _own(self._wait(self._ask("fetch", key, self._spec.timeout_s), reference))

    # ── endings and statistics ───────────────────────────────────────────────────────────────────────────────────────

    def leave(self, producer: str) -> None:
        self._wait(self._ask("leave"), self._line.seat.leave.remote(producer))

    def close(self) -> None:
        self._wait(self._ask("close"), self._line.seat.close.remote())

    def break_(self, why: str) -> None:
        self._wait(self._ask("break_"), self._line.seat.break_.remote(why))

    def stats(self) -> ChannelStats:
        stats: ChannelStats = self._wait(self._ask("stats"), self._line.seat.stats.remote())
        return stats

    def ready(self, timeout_s: float | None = None) -> None:
        """Waits until the seat runs. Raises ChannelTimeout or ChannelBroken when it does not start."""
        self._wait(self._ask("ready", "", self._patience(timeout_s)), self._line.seat.stats.remote())

    def destroy(self) -> None:
        """Breaks the channel for every end and ends its process. Idempotent; never waits long."""
        with contextlib.suppress(ChannelError):  # gone already, or it does not answer
            self._wait(self._ask("destroy"), self._line.seat.break_.remote("the channel was destroyed"))
        ray.kill(self._line.seat)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _patience(self, timeout_s: float | None) -> float:
        return self._spec.timeout_s if timeout_s is None else timeout_s

    def _ask(self, method: str, key: str = "", patience_s: float | None = None) -> _Ask:
        serial = self._line.next_serial()
        request = (self._line.client, serial, self._owner, key, patience_s)
        return _Ask(method, serial, (patience_s or 0.0) + _GRACE_S, request)

    def _wait(self, ask: _Ask, reference: ray.ObjectRef[Any]) -> Any:
        answered = False
        try:
            reply = ray.get(reference, timeout=ask.limit_s)
            answered = True
        except GetTimeoutError:
            raise refusals.silent(self._spec, self._owner, ask.method, ask.limit_s) from None
        except (RayActorError, ObjectLostError) as death:
            raise self._broken_by(death) from death
        finally:
            if not answered:  # also when interrupted
                self._line.withdraw(ask)
        return reply

    async def _answer(self, ask: _Ask, reference: ray.ObjectRef[Any]) -> Any:
        reply = asyncio.wrap_future(reference.future())
        try:
            done, _ = await asyncio.wait({reply}, timeout=ask.limit_s)
        except asyncio.CancelledError:
            self._line.withdraw(ask)
            done, _ = await asyncio.wait({reply}, timeout=_GRACE_S)
            if done and ask.method == "get" and reply.exception() is None:
                self._give_back(reply.result())
            raise
        if not done:
            self._line.withdraw(ask)
            raise refusals.silent(self._spec, self._owner, ask.method, ask.limit_s)
        try:
            return reply.result()
        except (RayActorError, ObjectLostError) as death:
            raise self._broken_by(death) from death

    def _give_back(self, reply: bytes | list[Entry]) -> None:
        entries = unpack(reply) if isinstance(reply, bytes) else reply
        if entries and refused(entries) is None:
            self._line.seat.restore.remote([Entry(*e) for e in entries])

    def _entries(self, reply: bytes | list[Entry]) -> list[Entry]:
        if not isinstance(reply, bytes):
            return reply
        entries = unpack(reply)
        error = refused(entries)
        if error is not None:
            raise error
        return [Entry(*e) for e in entries]

    def _check(self, reply: bytes) -> None:
        error = refused(unpack(reply)) if reply else None
        if error is not None:
            raise error

    def _broken_by(self, death: RayError) -> ChannelBroken:
        if isinstance(death, ObjectLostError):
            why = "the producer of this item died before it was taken"
        else:
            why = f"the process that holds the channel is gone: {death}"
        return refusals.broken(self._spec, self._owner, why)


class _Ask(NamedTuple):
    """One request of this end and how long its reply may take."""

    method: str
    serial: int
    limit_s: float
    request: tuple[object, ...]


class _Line:
    """This process's connection to a seat: its identity there, and the lifeline by which the seat notices its end."""

    def __init__(self, seat: Any) -> None:
        self.seat = seat
        self.client = uuid.uuid4().hex
        self.put, self.reserve, self.get = seat.put, seat.reserve, seat.get
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._lifeline: Any = None

    def next_serial(self) -> int:
        if self._lifeline is None:
            with self._lock:
                if self._lifeline is None:
                    self._lifeline = self.seat.lifeline.remote()
                    self.seat.attach.remote(self.client, [self._lifeline])
        return next(self._serials)

    def withdraw(self, ask: _Ask) -> None:
        """Nobody waits for the answer any more. Not awaited: the seat may be gone."""
        self.seat.withdraw.remote(self.client, ask.serial)


def _rebuild(spec: ChannelSpec, seat: Any, owner: str) -> RayChannel:
    return RayChannel(spec, _Line(seat), owner)


def _own(pieces: tuple[bytes, list[Any]]) -> Any:
    """The caller's copy, so that the object store can forget the item."""
    header, buffers = pieces
    return codec.decode(header, [bytearray(b) for b in buffers])
