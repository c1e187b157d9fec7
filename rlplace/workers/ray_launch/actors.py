"""What runs in Ray processes, and the driver's hold on it: the workers of one process in their hosts."""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError

from rlplace.comm.address import ProcessChannels
from rlplace.comm.channel import ChannelSpec
from rlplace.placement.language.slots import Slot
from rlplace.workers.launch.host import Birth, Outcome, WorkerHost
from rlplace.workers.launch.launcher import Call, OpenCalls, open_rendezvous
from rlplace.workers.launch.reservation import WorkerReport
from rlplace.workers.worker import Rendezvous

CONTROL = "control"  # concurrency group beside the threads that run the workers' methods


class RayHost:
    """The WorkerHosts of one process, by number. Each worker has one thread, in which all its methods run."""

    def __init__(self, environment: Mapping[str, str], workers: int) -> None:
        os.environ.update(environment)  # before anything imports torch
        gc.disable()  # importing and building makes many objects and drops few: a sixth of start-up is spent looking
        self._ends = ProcessChannels()
        self._hosts = [WorkerHost(self._ends) for _ in range(workers)]
        self._door: socket.socket | None = None

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

    def build(self, number: int, common: bytes, own: Mapping[str, Any], host: str, port: int) -> None:
        """Unpickled here: what it imports may be missing or broken, which is then a failure of this rank."""
        listen_fd = self._door.detach() if self._door else None
        try:
            birth: Birth = dataclasses.replace(cloudpickle.loads(common), **own)
        except Exception as error:  # noqa: BLE001 -- imports arbitrary modules; it travels as a value
            self._hosts[number].refuse(error)
            return
        self._hosts[number].build(birth, Rendezvous(host=host, port=port, listen_fd=listen_fd))

    def call(self, number: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        try:
            return self._hosts[number].call(method, args, kwargs)
        finally:
            if method == "setup":
                gc.freeze()  # modules stay for good: no later collection needs to look at them
                gc.enable()

    def close(self, number: int) -> Outcome:
        return self._hosts[number].close()

    def where(self, number: int) -> str:
        return self._hosts[number].where()

    def cancel(self, number: int) -> None:
        self._hosts[number].cancel()

    def on_channel(self, spec: ChannelSpec, method: str, args: tuple[Any, ...]) -> Any:
        """Calls a method that does not wait of a channel inside this process."""
        return getattr(self._ends.local(spec), method)(*args)


class RayProcess:
    """The actor of one process, and how many of its workers run: it is ended with the last of them."""

    def __init__(self, actor: Any, workers: int) -> None:
        self.actor = actor
        self._running = workers
        self._lock = threading.Lock()

    @property
    def ended(self) -> bool:
        return self._running == 0

    def leave(self) -> None:
        """One of its workers was stopped."""
        with self._lock:
            self._running -= 1
        if self.ended and ray.is_initialized():
            ray.kill(self.actor)


def thread_of(number: int) -> str:
    """The concurrency group of a worker."""
    return f"worker {number}"


class RayWorker:
    """A WorkerHandle over one worker of a process."""

    def __init__(self, slot: Slot, process: RayProcess, number: int) -> None:
        """`number` counts the workers of the process."""
        self._slot = slot
        self._process = process
        self._number = number
        self._calls = OpenCalls(slot)
        actor, own = process.actor, thread_of(number)
        self._report = actor.report.options(concurrency_group=own)
        self._build = actor.build.options(concurrency_group=own)
        self._call = actor.call.options(concurrency_group=own)
        self._close = actor.close.options(concurrency_group=own)
        self._where = actor.where.options(concurrency_group=CONTROL)
        self._cancel = actor.cancel.options(concurrency_group=CONTROL)

    @property
    def slot(self) -> Slot:
        return self._slot

    def report(self, serve_at: str | None) -> Any:
        """A reference to its WorkerReport."""
        return self._report.remote(serve_at)

    def build(self, common: Any, own: Mapping[str, Any], host: str, port: int) -> None:
        """`common`: a reference to the pickled Birth that the group shares; `own`: what differs in it for this worker.

        Does not wait: a failure is told to the first call.
        """
        self._build.remote(self._number, common, own, host, port)

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        future = self._calls.begin(method)
        if not future.done():
            self._bridge(future, self._call.remote(self._number, method, args, kwargs))
        return future

    def close(self) -> Future[Any]:
        future = self._calls.begin("close")
        if not future.done():
            self._bridge(future, self._close.remote(self._number))
        return future

    def _bridge(self, future: Call, reference: Any) -> None:
        def ended(source: Future[Outcome]) -> None:
            error = source.exception()
            if error is None:
                self._calls.settle(future, source.result())
            else:
                self._calls.fail(future, explain(error))

        reference.future().add_done_callback(ended)

    def where(self) -> Future[str]:
        answer: Future[str] = self._where.remote(self._number).future()
        return answer

    def cancel(self) -> None:
        self._cancel.remote(self._number)

    def stop(self) -> None:
        """In a shared process the others go on: what this one is stuck in ends with the last of them."""
        if self._calls.end("the worker was stopped"):
            if ray.is_initialized():
                self._cancel.remote(self._number)
                self._close.remote(self._number)  # once it gives up
            self._process.leave()


def explain(error: BaseException) -> str:
    """One line for a call that ended without an outcome."""
    text = str(error)
    if not isinstance(error, RayActorError):
        return f"{type(error).__name__}: {text.strip().splitlines()[-1] if text.strip() else ''}"
    pid = next((line.strip() for line in text.splitlines() if line.strip().startswith("pid:")), "")
    detail = text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0].strip().rstrip(".")
    return "the worker process died" + (f" ({pid})" if pid else "") + (f": {detail}" if detail else "")
