"""What runs in Ray processes, and the driver's hold on it: a worker in its host, and the account of emulated memory."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError

from rlplace.errors import AcceleratorOutOfMemory, Problem
from rlplace.placement.slots import Slot
from rlplace.workers.devices import Holding, MemoryAccount
from rlplace.workers.host import Birth, Outcome, WorkerHost
from rlplace.workers.launch import OpenCalls, open_rendezvous
from rlplace.workers.reservation import WorkerReport
from rlplace.workers.worker import Rendezvous

CONTROL = "control"  # concurrency group beside the one thread that runs the worker's methods


class RayHost(WorkerHost):
    """A WorkerHost in a process of its own."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)  # before anything imports torch
        gc.disable()  # importing and building makes many objects and drops few: a sixth of start-up is spent looking
        super().__init__()
        self._door: socket.socket | None = None

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        try:
            return super().call(method, args, kwargs)
        finally:
            if method == "setup":
                gc.freeze()  # modules stay for good: no later collection needs to look at them
                gc.enable()

    def report(self, serve_at: str | None) -> WorkerReport:
        """Says where this process is; opens the rendezvous at the address `serve_at` ("": this node's), None: not."""
        if serve_at is not None:
            self._door = open_rendezvous(serve_at or ray.util.get_node_ip_address())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return WorkerReport(
            machine=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
            visible=tuple(visible.split(",")) if visible else (),
            address=self._door.getsockname()[0] if self._door else "",
            port=self._door.getsockname()[1] if self._door else 0,
        )

    def build_pickled(self, birth: bytes, host: str, port: int) -> None:
        """Unpickled here: what it imports may be missing or broken, which is then a failure of this rank."""
        listen_fd = self._door.detach() if self._door else None
        try:
            unpickled: Birth = cloudpickle.loads(birth)
        except Exception as error:  # noqa: BLE001 -- imports arbitrary modules; it travels as a value
            self.refuse(error)
            return
        self.build(unpickled, Rendezvous(host=host, port=port, listen_fd=listen_fd))


class RayWorker:
    """A WorkerHandle over the actor of one slot."""

    def __init__(self, slot: Slot, actor: Any) -> None:
        self._slot = slot
        self._actor = actor
        self._calls = OpenCalls(slot)

    @property
    def slot(self) -> Slot:
        return self._slot

    def report(self, serve_at: str | None) -> Any:
        """A reference to its WorkerReport."""
        return self._actor.report.remote(serve_at)

    def build(self, birth: Birth, host: str, port: int) -> None:
        """Does not wait: a failure is told to the first call."""
        self._actor.build_pickled.remote(cloudpickle.dumps(birth), host, port)

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Future[Any]:
        future = self._calls.begin(method)
        if not future.done():
            self._bridge(future, self._actor.call.remote(method, args, kwargs))
        return future

    def close(self) -> Future[Any]:
        future = self._calls.begin("close")
        if not future.done():
            self._bridge(future, self._actor.close.remote())
        return future

    def _bridge(self, future: Future[Any], reference: Any) -> None:
        def ended(source: Future[Outcome]) -> None:
            error = source.exception()
            if error is None:
                self._calls.settle(future, source.result())
            else:
                self._calls.fail(future, explain(error))

        reference.future().add_done_callback(ended)

    def where(self) -> Future[str]:
        answer: Future[str] = self._actor.where.options(concurrency_group=CONTROL).remote().future()
        return answer

    def cancel(self) -> None:
        self._actor.cancel.options(concurrency_group=CONTROL).remote()

    def stop(self) -> None:
        if self._calls.end("the worker was stopped") and ray.is_initialized():
            ray.kill(self._actor)


def explain(error: BaseException) -> str:
    """One line for a call that ended without an outcome."""
    text = str(error)
    if not isinstance(error, RayActorError):
        return f"{type(error).__name__}: {text.strip().splitlines()[-1] if text.strip() else ''}"
    pid = next((line.strip() for line in text.splitlines() if line.strip().startswith("pid:")), "")
    detail = text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0].strip().rstrip(".")
    return "the worker process died" + (f" ({pid})" if pid else "") + (f": {detail}" if detail else "")


class AccountKeeper:
    """The MemoryAccount of a job in a process that all its workers can ask."""

    def __init__(self, capacity_bytes: Sequence[int]) -> None:
        self._account = MemoryAccount(capacity_bytes)

    def acquire(self, holding: Holding, size_bytes: int, what: str) -> Problem | None:
        try:
            self._account.acquire(holding, size_bytes, what)
        except AcceleratorOutOfMemory as refusal:
            return refusal.problem
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
        problem: Problem | None = ray.get(self._keeper.acquire.remote(holding, size_bytes, what), timeout=60.0)
        if problem is not None:
            raise AcceleratorOutOfMemory(problem)

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
