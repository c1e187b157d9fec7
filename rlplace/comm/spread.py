"""One channel whose keys live in several places: every branch has its own queue and its own capacity.

::

    SpreadChannel ── put, get ──▶ the branch its key belongs to          leave, close, break_, advance ──▶ all branches
                                                                       stats ◀── their sum
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlplace.comm import refusals
from rlplace.comm.channel import BatchPolicy, Channel, ChannelSpec, ChannelStats, Lease
from rlplace.errors import ChannelError


class Branch:
    """A branch that is connected when it is first used: most ends use few of many. Owns that connection."""

    def __init__(self, keys: tuple[str, ...] | None, connect: Callable[[], Channel]) -> None:
        """`keys` None: all that no other branch has."""
        self.keys = keys
        self._connect = connect
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def channel(self) -> Channel:
        with self._lock:
            if self._channel is None:
                self._channel = self._connect()
            return self._channel


class SpreadChannel:
    """Implements Channel over branches. Order and waiting lines are per key, so they are what one queue would give.

    Capacities and admission bound each branch alone, by its own spec.
    """

    def __init__(self, spec: ChannelSpec, branches: Sequence[Branch], owner: str = "an unnamed worker") -> None:
        """No two of the `branches` have a key in common."""
        self._spec = spec
        self._branches = tuple(branches)
        self._owner = owner
        self._branch_of: Mapping[str, Branch] = {key: branch for branch in branches for key in branch.keys or ()}
        self._rest = next((branch for branch in branches if branch.keys is None), None)
        self._ends: dict[str, Channel] = {}  # by key, filled on first use

    @property
    def spec(self) -> ChannelSpec:
        return self._spec

    def named(self, owner: str) -> SpreadChannel:
        return SpreadChannel(self._spec, self._branches, owner)

    def _end(self, key: str) -> Channel:
        end = self._ends.get(key)
        if end is None:
            branch = self._branch_of.get(key, self._rest)
            if branch is None:
                raise refusals.unknown_key(self._spec, self._owner, key)
            end = self._ends[key] = branch.channel().named(self._owner)
        return end

    # ── by key ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._end(key).put(item, key=key, weight=weight, version=version, timeout_s=timeout_s)

    def put_nowait(self, item: Any, *, key: str = "", weight: float = 1.0, version: int | None = None) -> None:
        self._end(key).put_nowait(item, key=key, weight=weight, version=version)

    async def put_async(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        await self._end(key).put_async(item, key=key, weight=weight, version=version, timeout_s=timeout_s)

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        return self._end(key).get(key=key, timeout_s=timeout_s)

    def get_nowait(self, *, key: str = "") -> Any:
        return self._end(key).get_nowait(key=key)

    async def get_async(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        return await self._end(key).get_async(key=key, timeout_s=timeout_s)

    def get_lease(self, *, key: str = "", timeout_s: float | None = None) -> Lease:
        return self._end(key).get_lease(key=key, timeout_s=timeout_s)

    def get_batch(
        self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most", timeout_s: float | None = None
    ) -> list[Any]:
        return self._end(key).get_batch(weight, key=key, policy=policy, timeout_s=timeout_s)

    def get_batch_nowait(self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most") -> list[Any]:
        return self._end(key).get_batch_nowait(weight, key=key, policy=policy)

    async def get_batch_async(
        self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most", timeout_s: float | None = None
    ) -> list[Any]:
        return await self._end(key).get_batch_async(weight, key=key, policy=policy, timeout_s=timeout_s)

    # ── all branches ──────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, version: int) -> None:
        self._on_all(lambda branch: branch.advance(version))

    def leave(self, producer: str) -> None:
        self._on_all(lambda branch: branch.leave(producer))

    def close(self) -> None:
        self._on_all(lambda branch: branch.close())

    def break_(self, why: str) -> None:
        self._on_all(lambda branch: branch.break_(why))

    def _on_all(self, act: Callable[[Channel], None]) -> None:
        """A branch that fails, because its node is gone, does not keep the others from being told."""
        failed: ChannelError | None = None
        for branch in self._branches:
            try:
                act(branch.channel().named(self._owner))
            except ChannelError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def stats(self) -> ChannelStats:
        """The sum; a high-water mark is the sum of the branches' own, which need not have stood at the same moment."""
        return summed([branch.channel().stats() for branch in self._branches])


def summed(branches: Sequence[ChannelStats]) -> ChannelStats:
    """Statistics of branches that have no key in common, as one."""
    oldest = [branch.oldest_version for branch in branches if branch.oldest_version is not None]
    counts: dict[str, Any] = {
        field: sum(getattr(branch, field) for branch in branches)
        for field in ("depth_items", "depth_bytes", "high_water_items", "high_water_bytes", "puts", "gets")
    }
    waits = [wait for branch in branches for wait in branch.waits]
    return dataclasses.replace(
        branches[0],
        **counts,
        producer_wait_s=sum(branch.producer_wait_s for branch in branches),
        consumer_wait_s=sum(branch.consumer_wait_s for branch in branches),
        waits=tuple(sorted(waits, key=lambda wait: wait.wants == "item")),  # puts first; sorting keeps their order
        depth_by_key={key: depth for branch in branches for key, depth in branch.depth_by_key.items()},
        producers=_once(name for branch in branches for name in branch.producers),
        consumers=_once(name for branch in branches for name in branch.consumers),
        dead=_once(name for branch in branches for name in branch.dead),
        version=max(branch.version for branch in branches),
        oldest_version=min(oldest, default=None),
        staleness_max=max(branch.staleness_max for branch in branches),
    )


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
