"""What a channel in shared memory promises to a peer that another process acts for: see network.backing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from rlplace.comm.codec import Packed
from rlplace.comm.shared.requests import GetRequest, PutRequest
from rlplace.errors import ChannelBroken


class SharedReservation:
    """Credit that was granted; `fill` and `withdraw` are the channel's."""

    def __init__(
        self, request: PutRequest, fill: Callable[[PutRequest, Packed], None], withdraw: Callable[[PutRequest], None]
    ) -> None:
        self._request, self._fill, self._withdraw = request, fill, withdraw

    def fill(self, packed: Packed) -> None:
        with contextlib.suppress(ChannelBroken):
            self._fill(self._request, packed)

    def withdraw(self) -> None:
        self._withdraw(self._request)


class SharedTaking:
    """Items that were taken, the taker's own by now."""

    def __init__(
        self, request: GetRequest, packed: list[Packed], restore: Callable[[GetRequest, list[Packed]], None]
    ) -> None:
        self.packed = packed
        self._request, self._restore = request, restore

    def restore(self) -> None:
        with contextlib.suppress(ChannelBroken):
            self._restore(self._request, self.packed)
