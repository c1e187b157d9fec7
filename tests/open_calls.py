"""Worker groups of one rank whose calls end when a test says so, in the order in which they were made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import cast

from rlplace.comm.channel import Channel
from rlplace.metrics import Metric
from rlplace.placement.language.slots import Slot
from rlplace.placement.schedule import Residency
from rlplace.workers.launch.group import Call, Pending, WorkerGroup
from rlplace.workers.worker import MoveReport


def slot_of(component: str, rank: int = 0) -> Slot:
    """On the accelerator of the rank's number, all on one node."""
    return Slot(
        component=component,
        rank=rank,
        node=0,
        local_rank=rank,
        accelerators=(rank,),
        local_accelerators=(rank,),
    )


class OpenGroup:
    """`log` gets what is called, `rollout generate 3`, also of other groups. Calls of `at_once` end by themselves."""

    def __init__(
        self,
        name: str,
        log: list[str],
        *,
        slots: Sequence[Slot] = (),
        at_once: Collection[str] = ("move",),
    ) -> None:
        self.name, self._log, self.at_once = name, log, at_once
        self.open: deque[Call] = deque()
        self.slots = slots
        self.channels: dict[str, Channel] = {}
        self.handles = (self,)  # it is its rank, too

    def __getattr__(self, method: str) -> Callable[..., Pending]:
        def call(*told: object) -> Pending:
            self._log.append(" ".join(map(str, (self.name, method, *told))))
            self.open.append(Call(self.slot, method))
            pending = Pending(cast(WorkerGroup, self), [self.open[-1]])
            if method in self.at_once:
                self.end(self.open.pop(), moved=method == "move")
            return pending

        return call

    def hold(self) -> None:
        """Hold nothing back: each call is seen when it is made."""

    flush = drop = hold

    def execute_on(self, ranks: Collection[int]) -> OpenGroup:
        return self

    @property
    def slot(self) -> Slot:
        return slot_of(self.name)

    def end(self, call: Call, *, moved: bool = False) -> None:
        still = MoveReport(residency=Residency.FULL, accelerator_bytes=0, host_bytes=0)
        call.set_result(still if moved else {f"{self.name}/ended": Metric(1.0, "sum")})

    def end_all(self) -> None:
        while self.open:
            self.end(self.open.popleft())

    def where(self) -> Future[str]:
        place: Future[str] = Future()
        place.set_result("in a test")
        return place
