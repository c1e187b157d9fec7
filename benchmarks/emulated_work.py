"""Workers that take as long as modelled work would on real accelerators, and no processor: for `placements.py`.

One second of a worker stands for `Model.scale` seconds of the job. An accelerator does one thing at a time: whoever
computes holds it, so that two residents at work on one accelerator slow each other down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlplace.errors import ChannelEmpty
from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.workers.worker import MoveReport, Worker, WorkerContext

SAMPLES = 64
TURNS = 4
TOKENS = 320  # of an iteration; of a sample; of a sample on average
PASS = 4  # samples of a forward and backward pass of one rank
SEGMENT = 16  # tokens between two looks at what has arrived
GB = 1_000_000_000
CACHE_BYTES = 24 * GB
MAPPED_BYTES = 2 * GB  # mapping a whole cache takes as long as copying so much


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the work of a job costs in seconds of one accelerator; bytes are those of an 8B model in bf16."""

    name: str
    step_s: float = 0.022  # of one token for all in flight: reading the weights
    in_flight_s: float = 0.0004  # of one token for each in flight
    turn_s: float = 0.5  # an environment's answer to one turn
    token_s: float = 0.011  # to learn one token
    weights_bytes: int = 16 * GB
    state_bytes: int = (
        112 * GB
    )  # float32 masters and moments, over all ranks of the actor
    simulator_bytes: int = 8 * GB
    bytes_per_s: float = 25.0 * GB  # between host and accelerator, and of a sync
    scale: float = 50.0  # inf: everything happens and nothing takes time

    def held(self, component: str, residency: Residency, ranks: int) -> int:
        """Bytes on each accelerator."""
        if residency is Residency.OFF:
            return 0
        full = residency is Residency.FULL
        match component:
            case "actor":
                return (self.weights_bytes + full * self.state_bytes) // ranks
            case "rollout":
                return self.weights_bytes + full * CACHE_BYTES
        return full * self.simulator_bytes

    def move_s(
        self, component: str, before: Residency, after: Residency, ranks: int
    ) -> float:
        """An engine copies nothing: weights come with the sync, its cache is mapped."""
        copied = abs(
            self.held(component, after, ranks) - self.held(component, before, ranks)
        )
        return (MAPPED_BYTES if component == "rollout" else copied) / self.bytes_per_s

    @property
    def sync_s(self) -> float:
        return self.weights_bytes / self.bytes_per_s

    def lengths(self, sample: int) -> list[int]:
        """Tokens of each turn, with a long tail; the same in every placement and iteration."""
        draw = random.Random(f"sample {sample}")
        return [
            max(4, int(draw.lognormvariate(-0.18, 0.6) * TOKENS / TURNS))
            for _ in range(TURNS)
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every worker is told. Two iterations of a model, two of the next, and round again."""

    models: tuple[Model, ...]
    folder: Path  # of the accelerators' locks
    ranks: Mapping[str, int]

    def model(self, iteration: int) -> Model:
        return self.models[iteration // 2 % len(self.models)]


class Accelerator:
    """One accelerator, which all its residents open. First come, first served."""

    def __init__(self, folder: Path, number: int) -> None:
        self._queue, self._device = (
            open(folder / f"{number} {part}", "w")  # noqa: SIM115 -- until close
            for part in ("queue", "device")
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Who waits for the device holds the queue, so that whoever leaves cannot come back before."""
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        fcntl.flock(self._device, fcntl.LOCK_EX)
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._device, fcntl.LOCK_UN)

    def close(self) -> None:
        self._queue.close()
        self._device.close()


class Emulated(Worker):
    """A rank on one accelerator."""

    config: Job

    def __init__(self, config: Job, context: WorkerContext) -> None:
        super().__init__(config, context)
        (number,) = context.slot.accelerators
        self._accelerator = Accelerator(config.folder, number)
        self._residency = Residency.OFF
        self._next = 0  # iteration, to which moves belong

    def shares(self) -> range:
        """The samples of this rank."""
        return range(self.context.rank, SAMPLES, self.context.world_size)

    def compute(
        self, seconds: float, model: Model, watch: Stopwatch, wait: str = "wait"
    ) -> None:
        """Work once the accelerator is nobody else's; until then is a lap of `wait`."""
        with self._accelerator.held():
            watch.lap(wait)
            time.sleep(seconds / model.scale)
        watch.lap("work")

    def move(self, to: Residency) -> MoveReport:
        model = self.config.model(self._next)
        component = self.context.slot.component
        ranks = self.context.world_size
        device = self.context.device
        held = model.held(component, to, ranks)
        if to > self._residency:
            device.acquire(held, "state")
        time.sleep(model.move_s(component, self._residency, to, ranks) / model.scale)
        if to < self._residency:
            device.acquire(held, "state")
        self._residency = to
        return MoveReport(residency=to, accelerator_bytes=held, host_bytes=0)

    def close(self) -> None:
        self._accelerator.close()


class Actor(Emulated):
    """Learns for as long as its share of the tokens takes."""

    def push_weights(self, version: int, to: str | None = None) -> Metrics:
        for rank in (
            range(self.config.ranks["rollout"]) if self.context.rank == 0 else ()
        ):
            self.context.channels["weights"].put(version, key=str(rank))
        return {}

    def __init__(self, config: Job, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._accumulated: list[int] = []

    def accumulate(self, iteration: int, version: int) -> Metrics:
        """Compute passes of samples as they come; leave the last pass to `learn`."""
        model = self.config.model(iteration)
        watch = Stopwatch("accumulate_wait")
        passed = 0
        for number in range(1, len(self.shares()) + 1):
            self._accumulated.append(
                self.context.channels["samples"].get(key=str(self.context.rank))
            )
            watch.lap("accumulate_wait")
            if number - passed > PASS:
                self.compute(
                    PASS * TOKENS * model.token_s, model, watch, "accumulate_wait"
                )
                passed += PASS
        return watch.metrics("actor")

    def learn(self, iteration: int, version: int) -> Metrics:
        watch = Stopwatch("wait")
        channel = self.context.channels["samples"]
        model = self.config.model(iteration)
        due = len(self.shares())
        passed = max(0, len(self._accumulated) - 1) // PASS * PASS
        tokens = [
            *self._accumulated,
            *(
                channel.get(key=str(self.context.rank))
                for _ in range(due - len(self._accumulated))
            ),
        ]
        self._accumulated = []
        # Balanced over ranks.
        self.compute(
            (SAMPLES / self.context.world_size - passed) * TOKENS * model.token_s,
            model,
            watch,
        )
        self._next = iteration + 1
        return {
            **watch.metrics("actor"),
            "actor/samples": Metric(len(tokens), "sum"),
            "actor/tokens": Metric(sum(tokens), "sum"),
            "actor/squares": Metric(
                sum(n * n for n in tokens), "sum"
            ),  # tells other samples of as many tokens
        }


class Rollout(Emulated):
    """Continues all samples it has, a segment at a time: whoever has finished leaves, whoever has arrived joins."""

    def pull_weights(self, version: int, source: str | None = None) -> Metrics:
        began = time.perf_counter()
        model = self.config.model(self._next)
        self.context.channels["weights"].get(key=str(self.context.rank))
        wait_s = time.perf_counter() - began
        time.sleep(model.sync_s / model.scale)
        return {"rollout/sync_wait_s": Metric(wait_s, "max")}

    def generate(self, iteration: int) -> Metrics:
        model = self.config.model(iteration)
        watch = Stopwatch("wait")
        due = len(self.shares()) * TURNS
        flight = dict[tuple[int, int], int]()  # (sample, turn) -> tokens to come
        while due:
            self._join(iteration, flight)
            tokens = min(SEGMENT, *flight.values())
            self.compute(
                tokens * (model.step_s + model.in_flight_s * len(flight)), model, watch
            )
            for asked in list(flight):
                flight[asked] -= tokens
                if not flight[asked]:
                    del flight[asked]
                    self.context.channels["completions"].put(
                        asked, key=str(asked[0] % self.config.ranks["env"])
                    )
                    due -= 1
        self._next = iteration + 1
        return watch.metrics("rollout")

    def _join(self, iteration: int, flight: dict[tuple[int, int], int]) -> None:
        """Waits only where there is nothing else to do."""
        requests = self.context.channels["requests"]
        key = str(self.context.rank)
        while True:
            try:
                sample, turn = (
                    requests.get_nowait(key=key) if flight else requests.get(key=key)
                )
            except ChannelEmpty:
                return
            flight[sample, turn] = self.config.model(iteration).lengths(sample)[turn]


class Env(Emulated):
    """Asks for every turn of its samples and simulates each answer."""

    def run(self, iteration: int) -> Metrics:
        model = self.config.model(iteration)
        watch = Stopwatch("wait")
        channels = self.context.channels
        for sample in self.shares():
            self._ask(sample, 0)
        for _ in range(len(self.shares()) * TURNS):
            sample, turn = channels["completions"].get(key=str(self.context.rank))
            self.compute(model.turn_s, model, watch)
            if turn + 1 < TURNS:
                self._ask(sample, turn + 1)
            else:
                tokens = sum(model.lengths(sample))
                channels["samples"].put(
                    tokens, key=str(sample % self.config.ranks["actor"])
                )
        self._next = iteration + 1
        return watch.metrics("env")

    def _ask(self, sample: int, turn: int) -> None:
        self.context.channels["requests"].put(
            (sample, turn), key=str(sample % self.config.ranks["rollout"])
        )
