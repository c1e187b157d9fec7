"""Workers that use the tools of the base class; a module of their own, so that other processes can import them."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from typing import Any, ClassVar

import numpy as np

from rlplace.comm.channel import Channel
from rlplace.workers.worker import Worker, WorkerContext

PATIENCE_S = 60.0


class Impossible(Exception):
    """Cannot be made again from its message alone, and has an attribute."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step = step


@dataclasses.dataclass
class Batch:
    """Holds what workers send each other."""

    name: str
    rows: Any


class Peer(Worker):
    """Has a constructor without arguments, as many have."""

    def __init__(self) -> None:
        super().__init__()
        self.made_with = self.config

    def place(self) -> tuple[Any, int, int, str]:
        return self.made_with, self.rank, self.world_size, self.component

    # ── channels ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, channel: Channel, item: Any) -> str:
        channel.put(item)
        return channel.owner

    def get(self, channel: Channel) -> Any:
        return channel.get(timeout_s=PATIENCE_S)

    def get_nested(self, request: dict[str, Any]) -> Any:
        return request["from"][0].get(timeout_s=PATIENCE_S)

    def get_by_name(self, name: str) -> Any:
        return self.channel(name).get(timeout_s=PATIENCE_S)

    async def put_and_get(self, there: Channel, back: Channel) -> list[Any]:
        answer = back.get_async(key=str(self.rank), timeout_s=PATIENCE_S)
        await there.put_async(self.rank, key="all", weight=2.0)
        return [await answer]

    async def answer(self, there: Channel, back: Channel, ranks: int) -> int:
        batch = await there.get_batch_async(
            2.0 * ranks, key="all", timeout_s=PATIENCE_S
        )
        while len(batch) < ranks:
            batch += await there.get_batch_async(2.0, key="all", timeout_s=PATIENCE_S)
        for rank in batch:
            await back.put_async(f"for {rank}", key=str(rank))
        return len(batch)

    def die_instead(self, channel: Channel) -> None:
        """Be killed without ever having used the channel."""
        os.kill(os.getpid(), signal.SIGKILL)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def send_batch(self, to: str, rank: int) -> None:
        rows = {"x": np.full((2, 3), float(self.rank)), "ids": [self.rank]}
        for number in range(2):
            self.send(Batch(name=f"{self.rank}.{number}", rows=rows), to, rank)

    def receive(self, source: str, rank: int, timeout_s: float = PATIENCE_S) -> Any:
        return self.recv(source, rank, timeout_s=timeout_s)

    def receive_two(self, source: str, rank: int) -> list[tuple[str, float, Any]]:
        batches = [self.recv(source=source, rank=rank) for _ in range(2)]
        return [(b.name, float(b.rows["x"].sum()), b.rows["ids"]) for b in batches]

    def exchange(self) -> Any:
        """Send to the next rank of the group, receive from the one before."""
        coming = self.recv_async(self.component, (self.rank - 1) % self.world_size)
        self.send_async(
            f"of {self.rank}", self.component, (self.rank + 1) % self.world_size
        ).wait()
        return coming.wait()

    def spread(self, root: int) -> Any:
        return self.broadcast({"from": self.rank}, root=root, timeout_s=PATIENCE_S)

    def sizes(self, *names: str) -> list[int]:
        return [self.world_size_of(name) for name in names]

    def until_cancelled(self) -> bool:
        return self.context.cancelled.wait(PATIENCE_S)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    # ── metrics, logs, errors ────────────────────────────────────────────────────────────────────────────────────────

    def work(self) -> dict[str, float]:
        with self.timer("simulate"), self.timer("inner"):
            threading.Event().wait(0.01)
        with self.timer("simulate"):
            pass
        self.metric("steps", 8, reduce="sum")
        self.metric("return", float(self.rank), weight=3.0)
        return {"loss": 0.5 + self.rank}

    def say(self, text: str) -> None:
        print("printed", text)
        self.log.info("logged %s", text)

    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise Impossible(7, "not today")


class Joined(Worker):
    """Reduces over all ranks of its group, by torch."""

    needs_own_process: ClassVar[bool] = True

    def __init__(self, config: Any, context: WorkerContext) -> None:
        super().__init__()
        variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        self.seen = [os.environ.get(name) for name in variables]

    def variables(self) -> list[str | None]:
        return self.seen

    def reduced(self) -> float:
        """Use the group that `process_group` opens."""
        import torch

        group = self.process_group("gloo", timeout_s=PATIENCE_S)
        assert self.process_group() is group
        return self._sum(torch)

    def reduced_by_variables(self) -> float:
        """Open and close a group, as scripts do that know only the variables."""
        import torch

        torch.distributed.init_process_group("gloo")
        total = self._sum(torch)
        torch.distributed.destroy_process_group()
        return total

    def _sum(self, torch: Any) -> float:
        number = torch.tensor([self.rank + 1.0])
        torch.distributed.all_reduce(number)
        return float(number)
