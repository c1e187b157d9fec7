"""The sides of one comparison: our channels, sockets of pyzmq, queues of multiprocessing, and a Ray-actor channel."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder

Job = tuple[Any, ...]  # a function of comm_jobs and its arguments after `start`
_HEAD_START_S = 0.3  # for every process to get its job and its ends of the channels
_DEADLINE_S = 300.0


class Side(Protocol):
    """Processes that run jobs at the same time, and the channels between them."""

    def channel(self, capacity_items: int) -> Any: ...

    def run(self, *jobs: Job) -> list[Any]:
        """What each job returned; each in a process of its own."""
        ...

    def close(self) -> None: ...


class Shared:
    """Spawned processes, and channels in shared memory."""

    def __init__(self, processes: int) -> None:
        self._folder = JobFolder.create()
        self._made = 0
        spawn = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            here, there = spawn.Pipe()
            self._processes.append(
                spawn.Process(target=_serve, args=(there,), daemon=True)
            )
            self._lines.append(here)
            self._processes[-1].start()
        self.run(*[(_wake,)] * processes)  # until all have started

    @property
    def folder(self) -> Path:
        return self._folder.path

    def channel(self, capacity_items: int) -> SharedChannel:
        self._made += 1
        spec = ChannelSpec(
            name=f"channel {self._made}",
            capacity_items=capacity_items,
            timeout_s=_DEADLINE_S,
        )
        return SharedChannel.create(self.folder, spec)

    def run(self, *jobs: Job) -> list[Any]:
        start = time.monotonic() + _HEAD_START_S
        for line, job in zip(self._lines, jobs, strict=False):
            line.send((start, job))
        running = {
            line: i for i, (line, _) in enumerate(zip(self._lines, jobs, strict=False))
        }
        results: list[Any] = [None] * len(jobs)
        while running:
            ended = wait(list(running), _DEADLINE_S)
            if not ended:
                raise TimeoutError(
                    f"{', '.join(jobs[i][0].__name__ for i in running.values())}: no end in sight"
                )
            for line in [line for line in running if line in ended]:
                result = results[running.pop(line)] = line.recv()
                if isinstance(result, BaseException):
                    raise result
        return results

    def close(self) -> None:
        for line in self._lines:
            line.send(None)
        for process in self._processes:
            process.join(10.0)
            process.kill()  # one that is stuck
        self._folder.close()


class Sockets(Shared):
    """Spawned processes, and PUSH/PULL sockets of pyzmq over ipc between two of them."""

    def channel(self, capacity_items: int) -> Any:
        self._made += 1
        return SocketChannel(f"ipc://{self.folder}/{self._made}", capacity_items)


class SocketChannel:
    """One producer, one consumer; arrays travel out of band as frames, not copied where pyzmq can. No keys, no ends,
    no deadlines, no recovery: what a pair of sockets gives by itself. Each side may hold `capacity_items`.
    """

    def __init__(self, endpoint: str, capacity_items: int) -> None:
        self._endpoint = endpoint
        self._capacity_items = capacity_items
        self._socket: Any = None

    def put(self, item: Any) -> None:
        import zmq

        buffers: list[pickle.PickleBuffer] = []
        header = pickle.dumps(item, 5, buffer_callback=buffers.append)
        socket = self._socket or self._open(zmq.PUSH)
        if buffers:
            socket.send_multipart((header, *buffers), copy=False)
        else:
            socket.send(header)

    def get(self, timeout_s: float | None = None) -> Any:
        import zmq

        socket = self._socket or self._open(zmq.PULL)
        if timeout_s is not None and not socket.poll(1000 * timeout_s):
            raise TimeoutError
        frames = socket.recv_multipart(copy=False)
        return pickle.loads(
            frames[0].buffer, buffers=[frame.buffer for frame in frames[1:]]
        )

    def destroy(self) -> None:
        """The sockets are their processes'."""

    def _open(self, kind: int) -> Any:
        import zmq

        self._socket = zmq.Context.instance().socket(kind)
        self._socket.set_hwm(self._capacity_items)
        if kind == zmq.PULL:
            self._socket.bind(self._endpoint)
        else:
            self._socket.connect(self._endpoint)
        return self._socket


class Queues:
    """Queues of multiprocessing, which only processes that are started with them can use: new ones for each run."""

    def __init__(self) -> None:
        self._spawn = multiprocessing.get_context("spawn")

    def channel(self, capacity_items: int) -> Any:
        return QueueChannel(self._spawn.Queue(capacity_items))

    def run(self, *jobs: Job) -> list[Any]:
        ends = [self._spawn.Pipe() for _ in jobs]
        processes = [
            self._spawn.Process(target=_run_once, args=(there, job), daemon=True)
            for (_, there), job in zip(ends, jobs, strict=True)
        ]
        for process in processes:
            process.start()
        for here, _ in ends:
            here.recv()  # it has started
        start = time.monotonic() + _HEAD_START_S
        for here, _ in ends:
            here.send(start)
        results = [here.recv() for here, _ in ends]
        for process in processes:
            process.join(10.0)
            process.kill()
        return results

    def close(self) -> None:
        """Nothing is left between runs."""


class QueueChannel:
    """A bounded queue; a thread of the producer pickles and sends."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def get(self, timeout_s: float | None = None) -> Any:
        return self._queue.get(timeout=timeout_s)

    def destroy(self) -> None:
        self._queue.close()


def _run_once(line: Connection, job: Job) -> None:
    line.send("started")
    start, (function, *arguments) = line.recv(), job
    line.send(function(start, *arguments))


def _wake(start: float) -> None:
    """Nothing, in a process that has imported everything."""


def _serve(line: Connection) -> None:
    while (message := line.recv()) is not None:
        start, (function, *arguments) = message
        try:
            line.send(function(start, *arguments))
        except Exception as error:  # noqa: BLE001  whatever it is, the driver raises it
            line.send(error)


class RayActors:
    """Ray actors, and the channel of ray_actor_channel.py between them; a cluster of this machine alone."""

    def __init__(self, processes: int) -> None:
        import ray

        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  else Ray's processes would run at a disadvantage
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
        )
        actor: Any = ray.remote(Runner).options(num_cpus=0)
        self._actors = [actor.remote() for _ in range(processes)]
        self.run(*[(_wake,)] * processes)

    def channel(self, capacity_items: int) -> Any:
        from benchmarks.ray_actor_channel import RayActorChannel

        return RayActorChannel.create(capacity_items)

    def run(self, *jobs: Job) -> list[Any]:
        import ray

        start = time.monotonic() + _HEAD_START_S
        running = [
            a.run.remote(start, job[0], job[1:])
            for a, job in zip(self._actors, jobs, strict=False)
        ]
        results: list[Any] = ray.get(running, timeout=_DEADLINE_S)
        return results

    def close(self) -> None:
        import ray

        ray.shutdown()


class Runner:
    """A Ray actor that does what it is told."""

    def run(
        self, start: float, function: Callable[..., Any], arguments: Sequence[Any]
    ) -> Any:
        return function(start, *arguments)
