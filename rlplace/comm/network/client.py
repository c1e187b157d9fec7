"""An end of a channel that lives on another node: every call is one round trip to its server, a large put two."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from rlplace.comm import channel_errors, codec
from rlplace.comm.channel import ChannelSpec, ChannelStats
from rlplace.comm.ends import open_all, raise_failed
from rlplace.comm.network import wire
from rlplace.comm.network.auth import Keys
from rlplace.comm.network.connection import GRACE_S, Connection, ConnectionBroken, Silent, Waiter
from rlplace.comm.network.wire import Frame


class RemoteChannel:
    """Implements Channel over a connection that its creator owns. What `get` returns is the caller's own, writable.

    What a death does:

    - The server: every end raises ChannelBroken, within seconds of it.
    - This process: what it waited for is withdrawn within seconds. An item that was on its way to it goes back to the
      front of its line; one that it had confirmed (received) is gone with it.
    - The network: an interruption that both sides outlast (`wire.LOST_S` after TCP has given up) loses and doubles
      nothing; a longer one is the death of the server to this end, and of this process to the server.
    """

    def __init__(self, connection: Connection, keys: Keys, spec: ChannelSpec, name: str, owner: str) -> None:
        self._connection = connection
        self._keys = keys
        self._spec = spec
        self._name = name  # in the server
        self._owner = owner
        self._failed: dict[str, deque[Exception]] = {}  # by key: why items of a batch could not be opened

    @classmethod
    def connect(cls, endpoint: str, keys: Keys, spec: ChannelSpec, name: str) -> RemoteChannel:
        """An end with a connection of its own; `over` shares one. Does not wait: the first call raises a failure."""
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
        channel_errors.check_put(self._spec, self._owner, key, weight, version)
        packed, terms = codec.pack(item, wire.INLINE_BYTES), (key, weight, version, patience_s)
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

    # ── getting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        return self._get(None, key, self._patience(timeout_s))[0]

    def get_nowait(self, *, key: str = "") -> Any:
        return self._get(None, key, None)[0]

    def get_batch(self, weight: float, *, key: str = "", timeout_s: float | None = None) -> list[Any]:
        return self._get(weight, key, self._patience(timeout_s))

    def get_batch_nowait(self, weight: float, *, key: str = "") -> list[Any]:
        return self._get(weight, key, None)

    def _get(self, limit: float | None, key: str, patience_s: float | None) -> list[Any]:
        channel_errors.check_get(self._spec, self._owner, key, limit)
        raise_failed(self._failed, key)
        waiter = self._ask("get", limit, key, patience_s, patience_s=patience_s)
        assert waiter.reply is not None
        return open_all(wire.disclose(waiter.reply.marks, waiter.frames), codec.unpack, self._failed, key)

    # ── endings and statistics ───────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        self._value("close")

    def break_(self, why: str) -> None:
        self._value("break_", why)

    def stats(self) -> ChannelStats:
        stats: ChannelStats = self._value("stats")
        return stats

    def disconnect(self) -> None:
        """End the connection, for every end that shares it. The channel stays as it is."""
        self._connection.close()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _patience(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._spec.timeout_s
        channel_errors.check_timeout(self._spec, self._owner, timeout_s)
        return timeout_s

    def _value(self, method: str, *arguments: Any) -> Any:
        reply = self._ask(method, *arguments, patience_s=0.0).reply
        assert reply is not None
        return reply.value

    def _ask(self, method: str, *arguments: Any, patience_s: float | None, outgoing: Sequence[Frame] = ()) -> Waiter:
        limit_s = (patience_s or 0.0) + GRACE_S
        try:
            waiter = self._connection.ask(
                method, self._name, self._owner, *arguments, outgoing=outgoing, limit_s=limit_s
            )
        except ConnectionBroken as why:
            raise channel_errors.broken(self._spec, self._owner, str(why)) from None
        except Silent:
            raise channel_errors.silent(self._spec, self._owner, method, limit_s) from None
        assert waiter.reply is not None
        if waiter.reply.error is not None:
            raise waiter.reply.error
        return waiter


def _rebuild(endpoint: str, keys: Keys, spec: ChannelSpec, name: str, owner: str) -> RemoteChannel:
    return RemoteChannel.connect(endpoint, keys, spec, name).named(owner)
