"""The account of emulated memory in a process of its own, which all workers of a job ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from rlplace.errors import AcceleratorOutOfMemory
from rlplace.workers.launch.devices import Holding, MemoryAccount


class AccountKeeper:
    """The MemoryAccount of a job in a process that all its workers can ask."""

    def __init__(self, capacity_bytes: Sequence[int]) -> None:
        self._account = MemoryAccount(capacity_bytes)

    def acquire(self, holding: Holding, size_bytes: int, what: str) -> AcceleratorOutOfMemory | None:
        try:
            self._account.acquire(holding, size_bytes, what)
        except AcceleratorOutOfMemory as refusal:
            return refusal
        return None

    def release(self, owner: str, what: str) -> None:
        self._account.release(owner, what)

    def release_all(self, owner: str) -> None:
        self._account.release_all(owner)

    def held_bytes(self, owner: str) -> int:
        return self._account.held_bytes(owner)


class RayAccount:
    """An Account whose keeper is an actor. Picklable; every question waits for its answer."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    @classmethod
    def start(cls, account: MemoryAccount) -> RayAccount:
        return cls(ray.remote(AccountKeeper).options(num_cpus=0).remote(account.capacity_bytes))

    def acquire(self, holding: Holding, size_bytes: int, what: str) -> None:
        asked = self._keeper.acquire.remote(holding, size_bytes, what)
        refusal: AcceleratorOutOfMemory | None = ray.get(asked, timeout=60.0)
        if refusal is not None:
            raise refusal

    def release(self, owner: str, what: str) -> None:
        ray.get(self._keeper.release.remote(owner, what), timeout=60.0)

    def release_all(self, owner: str) -> None:
        """Does not wait: the driver asks for it when things end."""
        self._keeper.release_all.remote(owner)

    def held_bytes(self, owner: str) -> int:
        held: int = ray.get(self._keeper.held_bytes.remote(owner), timeout=60.0)
        return held

    def stop(self) -> None:
        ray.kill(self._keeper)
