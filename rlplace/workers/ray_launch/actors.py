"""The Ray actors that run workers, and their handles in the driver."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError

from rlplace.comm.address import ChannelAddress, Place, ProcessChannels
from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.errors import ClusterError
from rlplace.placement.language.slots import Slot
from rlplace.proxies import keep_local
from rlplace.signals import outlast_sigterm, unblock_sigterm
from rlplace.workers.launch.devices import Device, ProcessClaims
from rlplace.workers.launch.exchange import exchanged
from rlplace.workers.launch.group import Settle, WorkerHandle
from rlplace.workers.launch.host import Failure, Outcome, Request, WorkerHost
from rlplace.workers.launch.output import Outputs
from rlplace.workers.launch.reservation import VISIBLE, WorkerReport
from rlplace.workers.launch.variables import reserve_port, torch_variables
from rlplace.workers.lending import Lending
from rlplace.workers.messages import Mailbox
from rlplace.workers.ray_launch import private
from rlplace.workers.ray_launch.code_folder import look_in
from rlplace.workers.ray_launch.connections import Connection, Connections, Service
from rlplace.workers.ray_launch.fork import FORKED, ray_is_set_up
from rlplace.workers.worker import Rendezvous

# concurrency group for control calls, beside the threads that run the workers' methods
CONTROL = "control"
# nested containers in requests: three of the request itself, then those of arguments
_DEPTH = 7


class RayHost:
    """The Ray actor of one process, in which one or several workers live.

    Each worker has a number within the process, and its own thread, which runs all its methods.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        outputs: Sequence[Path | None],
        nodes: Sequence[str] = (),
    ) -> None:
        """Prepare the process for its workers; `make` creates them.

        `environment`: environment variables to set. `outputs`: output file of each worker; None for a worker without a
        file. `nodes`: addresses of all machines of the cluster.
        """
        self._files = outputs
        self._outputs = Outputs(outputs)
        ray_is_set_up()
        outlast_sigterm()
        # Must happen before any module imports torch.
        os.environ.update(environment)
        # Needed also for a Ray cluster that was joined
        keep_local(nodes)
        # Imports and constructors create many objects and free few: collecting would take a sixth of the start-up time.
        gc.disable()
        self._ends = ProcessChannels()
        self._lending = Lending()
        self._claims = ProcessClaims()
        self._hosts = [WorkerHost(shows_failures=True) for _ in outputs]
        self._services: list[Service | None] = [None] * len(outputs)
        self._listening: socket.socket | None = None
        # An open socket that reserves the port of MASTER_PORT
        self._master: socket.socket | None = None
        # For the store of weight syncs between accelerators
        self._weights: socket.socket | None = None
        self._owners: list[str] = []

    def _name_process(self) -> None:
        """Use the names of the workers as the process name that `ps` and `nvidia-smi` show.

        The class of this actor gets the same name, because Ray sets the process name to the class name after each call.
        """
        name = ", ".join(self._owners)
        self.__class__ = type(name, (RayHost,), {})
        private.show_name(name)

    def report(
        self,
        number: int,
        serve_at: str | None,
        weights_at: str | None,
        folder: Path | None,
    ) -> WorkerReport:
        """Return where this process runs, and at which socket the worker takes requests.

        `number`: number of the worker in this process. `serve_at`: address at which this process listens, so that the
        ranks of the worker's group can meet there; "": the address of this node; None: do not listen. `weights_at`: the
        same for the store at which the members of weight syncs meet. `folder`: folder in which the worker's socket is
        created; None: the worker has no socket.
        """
        address = ""
        if serve_at is not None:
            # Rank 0 keeps the socket open, so no other process can take the port.
            host = serve_at or ray.util.get_node_ip_address()
            self._listening = socket.create_server((host, 0), backlog=1024)
            self._master = reserve_port(host)
        if weights_at is not None:
            host = weights_at or ray.util.get_node_ip_address()
            self._weights = socket.create_server((host, 0), backlog=1024)
        for listening in (self._listening, self._weights):
            if listening is not None:
                address = listening.getsockname()[0]
        service = self._services[number] = None if folder is None else Service(folder)
        return WorkerReport(
            machine=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
            visible=tuple(filter(None, os.environ.get(VISIBLE, "").split(","))),
            address=address,
            port=_port_of(self._listening),
            master_port=_port_of(self._master),
            weights_port=_port_of(self._weights),
            forked=FORKED in os.environ,
            socket=None if service is None else service.path,
        )

    def make(
        self,
        number: int,
        pickled: bytes,
        slot: Slot,
        device: Device,
        folder: Path,
        rendezvous: Rendezvous,
    ) -> None:
        """Create a worker. If an import fails, every later call of the worker returns the error.

        `number`: index of the worker in this process. `pickled`: a pickled pair: the folder of the worker's code, and
        the bytes of the pickled GroupSpec and channel addresses. `slot`, `device`: slot and accelerators of the worker.
        `folder`: the job folder of this node. `rendezvous`: address where the ranks of the group meet.
        """
        unblock_sigterm()
        self._outputs.enter(self._files[number], slot.owner)
        self._owners.append(slot.owner)
        self._name_process()
        listen_fd = self._listening.detach() if self._listening else None
        weights_fd = self._weights.detach() if self._weights else None
        if len(self._hosts) > 1:
            device.share_process(self._claims)
        host = self._hosts[number]
        place = Place(node=slot.node, process=slot.process, ends=self._ends)
        try:
            folder_of_code, whole = cloudpickle.loads(pickled)
            look_in(folder_of_code)
            spec, addresses = cloudpickle.loads(whole)
            spec = dataclasses.replace(
                spec, channels={name: a.connect(place) for name, a in addresses.items()}
            )
        except Exception as error:  # noqa: BLE001 -- imports arbitrary modules; it travels as a value
            host.refuse(error)
            return
        if spec.worker.with_tools and spec.worker.needs_own_process:
            os.environ.update(torch_variables(spec.slots, slot, device, rendezvous))
        host.build(
            spec,
            slot,
            device,
            dataclasses.replace(rendezvous, listen_fd=listen_fd, weights_fd=weights_fd),
            folder,
            self._lending,
            place,
        )

    def run(self, number: int, requests: Sequence[Request]) -> list[Outcome]:
        outcomes = [
            outcome.carried(cloudpickle.dumps)
            if isinstance(outcome, Failure)
            else outcome
            for outcome in self._hosts[number].run(requests)
        ]
        if requests[0][0] == "setup":
            # Imported modules are never freed, so later collections need not look at them.
            gc.freeze()
            gc.enable()
        return outcomes

    def answer(self, number: int) -> None:
        """Answer the requests that arrive at the socket of worker `number`, until the worker is closed."""
        service = self._services[number]
        assert service is not None, "report was given a folder"
        self._name_process()
        service.answer(functools.partial(self.run, number))

    def control(
        self, number: int, method: str, after: object = None, *arguments: Any
    ) -> Any:
        """Call a method of a worker's WorkerHost while the worker's own thread may be busy; return the result.

        `number`: number of the worker. `method`: `cancel`, `proceed`, `where`, `meet` or `part`. `after`: result of an
        earlier Ray call; Ray starts this call only when that result exists, and its value is not used. `arguments`:
        arguments of the method.
        """
        return getattr(self._hosts[number], method)(*arguments)

    def on_channel(self, spec: ChannelSpec, method: str, args: tuple[Any, ...]) -> Any:
        """Call `method` of a channel that lives in this process, with the arguments `args`, and return the result.

        `spec`: spec of the channel. `method`: name of a method that does not wait.
        """
        return getattr(self._ends.local(spec), method)(*args)


def _port_of(listening: socket.socket | None) -> int:
    """Return the port of a socket; 0 if there is none."""
    if listening is None:
        return 0
    port: int = listening.getsockname()[1]
    return port


class RayProcess:
    """Handle of the Ray actor of one process. It counts the running workers, and ends the actor when the last one has
    left.
    """

    def __init__(self, actor: Any, workers: int) -> None:
        self.actor = actor
        self._running = workers
        self._lock = threading.Lock()

    @property
    def ended(self) -> bool:
        return self._running == 0

    def leave(self) -> None:
        """Subtract one from the number of running workers. If no worker is left, end the actor."""
        with self._lock:
            self._running -= 1
        if self.ended and ray.is_initialized():
            ray.kill(self.actor)


def thread_of(number: int) -> str:
    """Return the name of the Ray concurrency group, which is one thread, for the worker with number `number`."""
    return f"worker {number}"


class RayWorker(WorkerHandle):
    """The driver's handle of one worker that runs in a Ray actor.

    Requests go through the worker's socket if the worker is on the driver's machine, else through Ray.
    """

    def __init__(
        self,
        slot: Slot,
        device: Device,
        process: RayProcess,
        number: int,
        address_of: Callable[[Channel], ChannelAddress],
    ) -> None:
        """Create the handle of a worker.

        `process`: handle of the worker's process. `number`: number of the worker in this process. `address_of`: returns
        the address of a channel for the worker's node.
        """
        super().__init__(slot)
        self._address_of = address_of
        self._device = device
        self._process = process
        self._number = number
        self._ended = False
        self._connection: Connection | None = None
        # The Ray reference of the last `cancel`
        self._cancelling: Any = None

    def report(
        self, serve_at: str | None, weights_at: str | None, folder: Path | None
    ) -> Any:
        """Ask the worker's process for a WorkerReport, and return a Ray reference to the report.

        `serve_at`: address at which the process listens, so that the ranks of the group can meet there; "": the address
        of its node; None: do not listen. `weights_at`: the same for the store at which the members of weight syncs
        meet. `folder`: folder in which the worker's socket is created; None: the worker has no socket.
        """
        return self._in_its_thread("report").remote(
            self._number, serve_at, weights_at, folder
        )

    def connect(self, connections: Connections, path: Path) -> None:
        """Connect to the worker's socket at `path`; all later requests go through this connection.

        If the worker has died, requests go through Ray instead, whose error says why the worker has died.

        `connections`: all connections of the driver.
        """
        with contextlib.suppress(OSError):
            self._connection = connections.open(path)

    def make(self, pickled: Any, folder: Path, rendezvous: Rendezvous) -> None:
        """Start to create the worker, without waiting. If the creation fails, the first request reports it.

        `pickled`: Ray reference to the argument `pickled` of `RayHost.make`. `folder`: the job folder of the worker's
        node. `rendezvous`: address where the ranks of the group meet.
        """
        self._in_its_thread("make").remote(
            self._number, pickled, self.slot, self._device, folder, rendezvous
        )
        if (connection := self._connection) is not None:

            def over(source: Future[None]) -> None:
                error = source.exception()
                connection.fail(
                    Failure(
                        what="the worker is closed" if error is None else explain(error)
                    )
                )

            self._in_its_thread("answer").remote(
                self._number
            ).future().add_done_callback(over)

    def send(self, settle: Settle, requests: Sequence[Request]) -> None:
        requests = exchanged(list(requests), (Channel,), self._address_of, _DEPTH)
        if self._connection is not None:
            self._connection.send(settle, requests)
            return

        def ended(source: Future[list[Outcome]]) -> None:
            error = source.exception()
            settle(source.result() if error is None else Failure(what=explain(error)))

        self._in_its_thread("run").remote(
            self._number, requests
        ).future().add_done_callback(ended)

    def where(self) -> Future[str]:
        answer: Future[str] = self._beside("where").future()
        return answer

    def meet(self, mailboxes: Sequence[Mailbox]) -> Future[None]:
        addresses = exchanged(tuple(mailboxes), (Channel,), self._address_of)
        answer: Future[None] = self._beside("meet", None, addresses).future()
        return answer

    def part(self, group: str, why: str) -> None:
        if ray.is_initialized():
            self._beside("part", None, group, why)

    def cancel(self) -> None:
        self._cancelling = self._beside("cancel")

    def proceed(self) -> Future[None]:
        # Control threads take calls in any order. Passing the reference of `cancel` as argument orders `proceed` behind
        # it.
        answer: Future[None] = self._beside("proceed", self._cancelling).future()
        return answer

    def end(self) -> None:
        """End the worker. A second call does nothing.

        If several workers share the process, a running method may continue until the last of these workers ends.
        """
        if self._ended:
            return
        self._ended = True
        if ray.is_initialized():
            self.cancel()
            # Runs once the current call has given up.
            self.send(lambda answer: None, [("close", (), {})])
        self._process.leave()
        # If this fails, the account is dropped with the node or reset by the worker's successor.
        with contextlib.suppress(ClusterError, OSError):
            self._device.worker_ended()

    def _in_its_thread(self, method: str) -> Any:
        return getattr(self._process.actor, method).options(
            concurrency_group=thread_of(self._number)
        )

    def _beside(self, method: str, after: Any = None, *arguments: Any) -> Any:
        control = self._process.actor.control.options(concurrency_group=CONTROL)
        return control.remote(self._number, method, after, *arguments)


def explain(error: BaseException) -> str:
    """Return one line of text that says why a Ray call ended without a result.

    `error`: Ray's error of the call.
    """
    text = str(error)
    if not isinstance(error, RayActorError):
        return f"{type(error).__name__}: {text.strip().splitlines()[-1] if text.strip() else ''}"
    if "its node has died" in text:
        return "the worker process died with its node"
    pid = next(
        (line.strip() for line in text.splitlines() if line.strip().startswith("pid:")),
        "",
    )
    detail = (
        text.partition("Worker exit detail: ")[2]
        .partition(" Some common causes")[0]
        .strip()
        .rstrip(".")
    )
    return (
        "the worker process died"
        + (f" ({pid})" if pid else "")
        + (f": {detail}" if detail else "")
    )


def answer_of(reference: Any, timeout_s: float) -> Any:
    """Wait until a Ray call has ended, and return its result.

    `reference`: Ray reference to the result. `timeout_s`: the most seconds to wait. Raise the error that the called
    code has raised, GetTimeoutError at the deadline, RayActorError if the process has died.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause from None
