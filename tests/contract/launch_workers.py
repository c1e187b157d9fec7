"""Workers for the launch suites; a module of their own, so that other processes can import them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlplace.placement.schedule import Residency
from rlplace.workers.worker import MoveReport, Worker, WorkerContext


class Probe(Worker):
    """Answers, fails, waits and dies on command."""

    def setup(self) -> None:
        self.seen = [("setup", threading.get_ident())]

    def rank(self) -> int:
        return self.context.rank

    def about(self) -> dict[str, Any]:
        context = self.context
        return {
            "owner": context.owner,
            "world_size": context.world_size,
            "accelerators": context.slot.accelerators,
            "channels": sorted(context.channels),
            "config": self.config,
            "rendezvous": context.rendezvous,
        }

    def process(self) -> tuple[int, str | None, str | None]:
        return (
            os.getpid(),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            os.environ.get("OMP_NUM_THREADS"),
        )

    def device_order(self) -> str | None:
        return os.environ.get("CUDA_DEVICE_ORDER")

    def node_id(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def same_thread(self) -> bool:
        return self.seen[0][1] == threading.get_ident()

    def add(self, a: int, b: int = 0, *, scale: int = 1) -> int:
        return (a + b) * scale + 100 * self.context.rank

    def fail_on(self, rank: int, kind: type[BaseException] = ValueError) -> int:
        if self.context.rank == rank:
            raise kind(f"rank {rank} was to fail")
        return self.context.rank

    def die_or_get(self, rank: int, channel: str) -> Any:
        if self.context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.context.channels[channel].get()

    def put(self, channel: str, item: Any) -> None:
        self.context.channels[channel].put(item)

    def get(self, channel: str) -> Any:
        return self.context.channels[channel].get()

    def put_lock(self, channel: str) -> None:
        """An item that cannot leave this process."""
        self.context.channels[channel].put(threading.Lock(), key=str(self.context.rank))

    def get_by_rank(self, channel: str) -> str:
        return type(
            self.context.channels[channel].get(key=str(self.context.rank))
        ).__name__

    def folder(self) -> str | None:
        return None if self.context.folder is None else str(self.context.folder)

    def until_cancelled(self) -> bool:
        return self.context.cancelled.wait(60.0)

    def stuck(self) -> None:
        """Reacts to nothing but the end of its process."""
        threading.Event().wait(60.0)

    def acquire(self, size_bytes: int, what: str) -> int:
        self.context.device.acquire(size_bytes, what)
        return self.context.device.held_bytes()

    def release(self, what: str) -> int:
        self.context.device.release(what)
        return self.context.device.held_bytes()


class Settling(Probe):
    """Cannot be set up on the accelerator that the file of its config names, if there is one."""

    def setup(self) -> None:
        super().setup()
        file = Path(self.config)
        if file.exists() and int(file.read_text()) in self.context.slot.accelerators:
            raise RuntimeError("no accelerator here")


class Mover(Worker):
    """100 bytes of weights, 50 more when full."""

    def move(self, to: Residency) -> MoveReport:
        device = self.context.device
        for level, what, size in (
            (Residency.WEIGHTS, "weights", 100),
            (Residency.FULL, "gradients", 50),
        ):
            if to >= level:
                device.acquire(size, what)
            else:
                device.release(what)
        return MoveReport(
            residency=to, accelerator_bytes=device.held_bytes(), host_bytes=0
        )


class Fragile(Worker):
    """Its constructor fails on one rank."""

    def __init__(self, config: Any, context: WorkerContext) -> None:
        super().__init__(config, context)
        if context.rank == config:
            raise ValueError(f"no constructor on rank {config}")


class Closing(Worker):
    """Writes into a folder that it was closed."""

    def close(self) -> None:
        with open(f"{self.config}/{self.context.rank}", "a", encoding="utf-8") as file:
            file.write("closed\n")


class Collective(Worker):
    """Meets the other ranks at the rendezvous, without torch: rank 0 accepts on the socket it was given."""

    needs_own_process: ClassVar[bool] = True

    def meet(self) -> list[int]:
        rendezvous = self.context.rendezvous
        if self.context.rank:
            with socket.create_connection(
                (rendezvous.host, rendezvous.port), timeout=30.0
            ) as peer:
                peer.sendall(bytes([self.context.rank]))
            return []
        assert rendezvous.listen_fd is not None
        met = []
        with socket.socket(fileno=rendezvous.listen_fd) as listening:
            listening.settimeout(30.0)
            for _ in range(self.context.world_size - 1):
                with listening.accept()[0] as peer:
                    met.append(peer.recv(1)[0])
        return sorted(met)


class OnHost(Probe):
    uses_accelerators = False


class Meeting(Worker):
    """Is set up once all those have begun to be that its config names; writes into a folder when it begins and ends."""

    config: tuple[Path, Sequence[str]]

    def setup(self) -> None:
        folder, others = self.config
        self._write(folder, "begins")
        deadline = time.monotonic() + 20
        while not all((folder / f"{other} begins").exists() for other in others):
            assert time.monotonic() < deadline, (
                f"{self.context.owner} waited for {others}"
            )
            time.sleep(0.001)
        self._write(folder, "ends")

    def _write(self, folder: Path, what: str) -> None:
        (folder / f"{self.context.owner} {what}").write_text(str(time.monotonic()))
