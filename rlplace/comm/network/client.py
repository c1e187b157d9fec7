"""An end of a channel that lives on another node: every call is one round trip to its server, a large put two."""

from __future__ import annotations

from typing import Any

from rlplace.comm import codec
from rlplace.comm.channel import Channel, ChannelSpec, ChannelStats
from rlplace.comm.network import wire
from rlplace.comm.network.auth import Keys
from rlplace.comm.network.connection import Connection


class RemoteChannel(Channel):
    """Implements Channel over a connection that its creator owns. What `get` returns is the caller's own, writable.

    What a death does:

    - The server: every end raises ChannelBroken, within seconds of it.
    - This process: what it waited for is withdrawn within seconds. An item that was on its way to it goes back to the
      front of its line; one that it had confirmed (received) is gone with it.
    - The network: an interruption that both sides outlast (`wire.LOST_S` after TCP has given up) loses and doubles
      nothing; a longer one is the death of the server to this end, and of this process to the server.
    """

    def __init__(self, connection: Connection, spec: ChannelSpec) -> None:
        """Does not wait: the first call raises a failure."""
        super().__init__(spec)
        self.connection = connection
        self._pack = codec.Packers(wire.INLINE_BYTES).pack

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.connection.endpoint, self.connection.keys, self.spec, self.owner)

    def _put(self, item: Any, key: str, weight: float, version: int | None, patience_s: float | None) -> None:
        packed, terms = self._pack(item), (key, weight, version, patience_s)
        if isinstance(packed, bytes):
            self.connection.ask(self, "put", packed, *terms, patience_s=patience_s)
            return
        marks, frames = wire.enclose((packed,), self.connection.keys.frame_bytes)
        credit = self.connection.ask(self, "put", None, *terms, patience_s=patience_s)
        serial, patience_s = credit.request.serial, self.spec.timeout_s
        try:
            self.connection.ask(self, "fill", serial, marks, outgoing=frames, patience_s=patience_s)
        except BaseException:  # interrupted, or the channel broke
            self.connection.withdraw(credit)
            raise

    def _get(self, limit: float | None, key: str, patience_s: float | None) -> list[Any]:
        waiter = self.connection.ask(self, "get", limit, key, patience_s, patience_s=patience_s)
        return self._open_all(wire.disclose(waiter.reply.marks, waiter.frames), codec.unpack, key)

    def close(self) -> None:
        self.connection.ask(self, "close")

    def break_(self, why: str) -> None:
        self.connection.ask(self, "break_", why)

    def stats(self) -> ChannelStats:
        stats: ChannelStats = self.connection.ask(self, "stats").reply.value
        return stats


def _rebuild(endpoint: str, keys: Keys, spec: ChannelSpec, owner: str) -> RemoteChannel:
    """An end with a connection of its own."""
    return RemoteChannel(Connection(endpoint, keys), spec).named(owner)
