"""Two sides of one comparison: our channels between processes, and a plain Ray-actor channel between actors."""

from __future__ import annotations

import multiprocessing
import os
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
            self._processes.append(spawn.Process(target=_serve, args=(there,), daemon=True))
            self._lines.append(here)
            self._processes[-1].start()
        self.run(*[(_wake,)] * processes)  # until all have started

    @property
    def folder(self) -> Path:
        return self._folder.path

    def channel(self, capacity_items: int) -> SharedChannel:
        self._made += 1
        spec = ChannelSpec(name=f"channel {self._made}", capacity_items=capacity_items, timeout_s=_DEADLINE_S)
        return SharedChannel.create(self.folder, spec)

    def run(self, *jobs: Job) -> list[Any]:
        start = time.monotonic() + _HEAD_START_S
        for line, job in zip(self._lines, jobs, strict=False):
            line.send((start, job))
        running = {line: i for i, (line, _) in enumerate(zip(self._lines, jobs, strict=False))}
        results: list[Any] = [None] * len(jobs)
        while running:
            ended = wait(list(running), _DEADLINE_S)
            if not ended:
                raise TimeoutError(f"{', '.join(jobs[i][0].__name__ for i in running.values())}: no end in sight")
            for line in ended:
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
        ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
        actor = ray.remote(Runner).options(num_cpus=0)
        self._actors = [actor.remote() for _ in range(processes)]
        self.run(*[(_wake,)] * processes)

    def channel(self, capacity_items: int) -> Any:
        from ray_actor_channel import RayActorChannel

        return RayActorChannel.create(capacity_items)

    def run(self, *jobs: Job) -> list[Any]:
        import ray

        start = time.monotonic() + _HEAD_START_S
        running = [a.run.remote(start, job[0], job[1:]) for a, job in zip(self._actors, jobs, strict=False)]
        results: list[Any] = ray.get(running, timeout=_DEADLINE_S)
        return results

    def close(self) -> None:
        import ray

        ray.shutdown()


class Runner:
    """A Ray actor that does what it is told."""

    def run(self, start: float, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        return function(start, *arguments)
