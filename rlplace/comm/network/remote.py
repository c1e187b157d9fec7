"""An end of a channel that lives on another node: every call is one round trip to the node's gate, a large put two."""

from __future__ import annotations

from typing import Any

from rlplace.comm import codec, refusals
from rlplace.comm.channel import BatchPolicy, ChannelSpec, ChannelStats, Lease
from rlplace.comm.lease import OwnedLease
from rlplace.comm.network import wire
from rlplace.comm.network.connection import GRACE_S, Connection, ConnectionBroken, Silent, Waiter
from rlplace.comm.network.keys import Keys


class RemoteChannel:
    """Implements Channel over a connection that its creator owns. What `get` returns is the caller's own, writable.

    Guarantees at a death:

    - The gate: every end raises ChannelBroken, within seconds of it.
    - This process: what it waited for is withdrawn within seconds. An item that was on its way to it goes back to the
      front of its line; one that it had confirmed (received) is gone with it.
    - The network: an interruption that both sides outlast (`sockets.LOST_S` after TCP has given up) loses and doubles
      nothing; a longer one is the death of the gate to this end, and of this process to the gate.
    """

    def __init__(self, connection: Connection, keys: Keys, spec: ChannelSpec, name: str, owner: str) -> None:
        self._connection = connection
        self._keys = keys
        self._spec = spec
        self._name = name  # in the gate
        self._owner = owner

    @classmethod
    def connect(cls, endpoint: str, keys: Keys, spec: ChannelSpec, name: str) -> RemoteChannel:
        """An end with a connection of its own; `over` shares one. Does not wait: the first call tells of a failure."""
        return cls.over(Connection(endpoint, keys), keys, spec, name)

    @classmethod
    def over(cls, connection: Connection, keys: Keys, spec: ChannelSpec, name: str) -> RemoteChannel:
        return cls(connection, keys, spec, name, "an unnamed worker")

    @property
    def spec(self) -> ChannelSpec:
        return self._spec

    def named(self, owner: str) -> RemoteChannel:
        return RemoteChannel(self._connection, self._keys, self._spec, self._name, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._connection.endpoint, self._keys, self._spec, self._name, self._owner)

    # ── putting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._put(item, key, weight, version, self._patience(timeout_s))

    def put_nowait(self, item: Any, *, key: str = "", weight: float = 1.0, version: int | None = None) -> None:
        self._put(item, key, weight, version, None)

    def _put(self, item: Any, key: str, weight: float, version: int | None, patience_s: float | None) -> None:
        packed, terms = codec.pack(item, wire.INLINE_BYTES), (codec.size_bytes(item), key, weight, version, patience_s)
        if isinstance(packed, bytes):
            self._ask("put", packed, *terms, patience_s=patience_s)
            return
        marks, frames = wire.enclose((packed,), self._keys.frame_bytes)
        credit = self._ask("reserve", *terms, patience_s=patience_s)
        filled = False
        try:
            self._ask("fill", credit.request.serial, marks, outgoing=frames, patience_s=self._spec.timeout_s)
            filled = True
        finally:
            if not filled:
                self._connection.withdraw(credit)

    async def put_async(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        patience_s = self._patience(timeout_s)
        packed, terms = codec.pack(item, wire.INLINE_BYTES), (codec.size_bytes(item), key, weight, version, patience_s)
        if isinstance(packed, bytes):
            await self._ask_async("put", packed, *terms, patience_s=patience_s)
            return
        marks, frames = wire.enclose((packed,), self._keys.frame_bytes)
        credit = await self._ask_async("reserve", *terms, patience_s=patience_s)
        filled = False
        try:
            await self._ask_async(
                "fill", credit.request.serial, marks, outgoing=frames, patience_s=self._spec.timeout_s
            )
            filled = True
        finally:
            if not filled:
                self._connection.withdraw(credit)

    # ── getting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        return self._get(None, key, self._patience(timeout_s))[0]

    def get_nowait(self, *, key: str = "") -> Any:
        return self._get(None, key, None)[0]

    async def get_async(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        return (await self._get_async(None, key, self._patience(timeout_s)))[0]

    def get_lease(self, *, key: str = "", timeout_s: float | None = None) -> Lease:
        return OwnedLease(self.get(key=key, timeout_s=timeout_s))

    def get_batch(
        self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most", timeout_s: float | None = None
    ) -> list[Any]:
        return self._get((weight, policy), key, self._patience(timeout_s))

    def get_batch_nowait(self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most") -> list[Any]:
        return self._get((weight, policy), key, None)

    async def get_batch_async(
        self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most", timeout_s: float | None = None
    ) -> list[Any]:
        return await self._get_async((weight, policy), key, self._patience(timeout_s))

    def _get(self, batch: tuple[float, BatchPolicy] | None, key: str, patience_s: float | None) -> list[Any]:
        waiter = self._ask("get", batch, key, patience_s, patience_s=patience_s)
        return self._items(waiter)

    async def _get_async(
        self, batch: tuple[float, BatchPolicy] | None, key: str, patience_s: float | None
    ) -> list[Any]:
        return self._items(await self._ask_async("get", batch, key, patience_s, patience_s=patience_s))

    @staticmethod
    def _items(waiter: Waiter) -> list[Any]:
        assert waiter.reply is not None
        return [codec.open_packed(packed) for packed in wire.disclose(waiter.reply.marks, waiter.frames)]

    # ── versions, endings and statistics ─────────────────────────────────────────────────────────────────────────────

    def advance(self, version: int) -> None:
        self._tell("advance", version)

    def leave(self, producer: str) -> None:
        self._tell("leave", producer)

    def close(self) -> None:
        self._tell("close")

    def break_(self, why: str) -> None:
        self._tell("break_", why)

    def stats(self) -> ChannelStats:
        stats: ChannelStats = self._tell("stats")
        return stats

    def disconnect(self) -> None:
        """Ends the connection, for every end that shares it. The channel stays as it is."""
        self._connection.close()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _patience(self, timeout_s: float | None) -> float:
        return self._spec.timeout_s if timeout_s is None else timeout_s

    def _tell(self, method: str, *arguments: Any) -> Any:
        reply = self._ask(method, *arguments, patience_s=0.0).reply
        assert reply is not None
        return reply.value

    def _ask(self, method: str, *arguments: Any, patience_s: float | None, outgoing: Any = ()) -> Waiter:
        limit_s = (patience_s or 0.0) + GRACE_S
        try:
            waiter = self._connection.ask(
                method, self._name, self._owner, *arguments, outgoing=outgoing, limit_s=limit_s
            )
        except ConnectionBroken as why:
            raise refusals.broken(self._spec, self._owner, str(why)) from None
        except Silent:
            raise refusals.silent(self._spec, self._owner, method, limit_s) from None
        return self._checked(waiter)

    async def _ask_async(self, method: str, *arguments: Any, patience_s: float | None, outgoing: Any = ()) -> Waiter:
        limit_s = (patience_s or 0.0) + GRACE_S
        try:
            waiter = await self._connection.ask_async(
                method, self._name, self._owner, *arguments, outgoing=outgoing, limit_s=limit_s
            )
        except ConnectionBroken as why:
            raise refusals.broken(self._spec, self._owner, str(why)) from None
        except Silent:
            raise refusals.silent(self._spec, self._owner, method, limit_s) from None
        return self._checked(waiter)

    @staticmethod
    def _checked(waiter: Waiter) -> Waiter:
        assert waiter.reply is not None
        if waiter.reply.error is not None:
            raise waiter.reply.error
        return waiter


def _rebuild(endpoint: str, keys: Keys, spec: ChannelSpec, name: str, owner: str) -> RemoteChannel:
    return RemoteChannel.connect(endpoint, keys, spec, name).named(owner)
