"""The channel that anybody would first write with Ray: a queue in an asyncio actor, an actor call for each put and get.

It is what `benchmarks/comm.py` compares with, and does nothing but carry items: no credit in bytes, no weights, no
batches, no deadlines, no endings.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray


class Queue:
    """Runs inside the actor."""

    def __init__(self, capacity_items: int) -> None:
        self._items: asyncio.Queue[Any] = asyncio.Queue(capacity_items)

    async def put(self, item: Any) -> None:
        await self._items.put(item)

    async def get(self) -> Any:
        return await self._items.get()


class RayActorChannel:
    """An end; may be sent to other processes of the Ray cluster."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    @classmethod
    def create(cls, capacity_items: int) -> RayActorChannel:
        return cls(
            ray.remote(Queue)
            .options(num_cpus=0, max_concurrency=1000)
            .remote(capacity_items)
        )

    def put(self, item: Any) -> None:
        ray.get(self._queue.put.remote(item))

    def get(self) -> Any:
        return ray.get(self._queue.get.remote())

    def destroy(self) -> None:
        ray.kill(self._queue)
