"""Simulated workers on a logical clock: they take the calls of the real loop and spend predicted seconds.

::

    Loop ── group.run(3) ──▶ driver: sends ──▶ rank: receives, runs the method as a process ──▶ driver: settles the call
      └──── clock.wait_all ── the logical clock goes on until all are settled

The schedule, the order of calls and what is waited for are those of the loop itself.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

from rlplace.foresight.costs import Cost, Costs
from rlplace.foresight.world import (
    WANTED,
    Barrier,
    Channel,
    Cores,
    Event,
    Sleep,
    Work,
    World,
)
from rlplace.metrics import Metrics
from rlplace.placement.language.slots import Slot
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import OFF_S, CallRecord, Stopwatch
from rlplace.workers.launch.clock import Clock
from rlplace.workers.launch.group import (
    Call,
    Pending,
    Settle,
    WorkerGroup,
    WorkerHandle,
    deadline_passed,
)
from rlplace.workers.launch.host import Done, GroupSpec, Outcome, Request
from rlplace.workers.worker import MoveReport, Worker

# A method as a generator: yields what it waits for, returns the method's result
Body = Generator[Any, Any, Any]
_DRIVER = "driver"
_UNBOUNDED = 1 << 60
# Of every call, in predictions that need the seconds of stages only
_NOT_MEASURED = CallRecord(
    method="",
    began_s=0.0,
    seconds=0.0,
    cpu_s=0.0,
    process=0,
    process_cpu_s=0.0,
    parts=(),
    spans=(),
)


class LogicalClock(Clock):
    """The clock of a simulated world. Its time advances while the driver waits for calls."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.now

    def epoch(self) -> float:
        return self._world.now

    def wait_all(self, pending: Sequence[Pending], timeout_s: float) -> list[list[Any]]:
        if not self._run(pending, len(pending), timeout_s):
            raise deadline_passed(pending, 0.0)
        return [[call.result() for call in p.calls] for p in pending]

    def wait_any(self, pending: Sequence[Pending], timeout_s: float) -> bool:
        return self._run(pending, 1, timeout_s)

    def _run(self, pending: Sequence[Pending], enough: int, timeout_s: float) -> bool:
        """Advance the clock until `enough` of `pending` have ended, but by at most `timeout_s` seconds.

        Return whether enough of them have ended.
        """
        ended: list[Pending] = []
        for each in pending:
            _note_end(each, ended)
        return self._world.run(
            lambda: len(ended) >= enough, self._world.now + timeout_s
        )


def _note_end(pending: Pending, ended: list[Pending]) -> None:
    """Append `pending` to `ended` as soon as all its calls have ended; at once if they have."""
    left = [call for call in pending.calls if not call.done()]
    if not left:
        ended.append(pending)
        return
    others = itertools.count(len(left) - 1, -1)

    def call_ended(call: Future[Any]) -> None:
        if next(others) == 0:
            ended.append(pending)

    for call in left:
        call.add_done_callback(call_ended)


class Site:
    """The state that all simulated ranks of a prediction share: clock, processors, channels and barriers.

    `separable`: whether a stage may be simulated without the others, in the same seconds. `steady`: stages that take
    the same seconds in all iterations but the first. `measured`: whether the ranks measure the parts of their calls.
    `counts_items`: whether the most items of each channel are asked for.
    """

    separable = False
    steady: Collection[str] = ()
    measured = True
    counts_items = True

    def __init__(self, config: Any, plan: Plan, costs: Costs, cores: int) -> None:
        """Create the simulated clock, processors and channels.

        `costs`: the costs of a profile. `cores`: number of processors of each node.
        """
        self.config = config
        self.plan = plan
        self.costs = costs
        self.world = World()
        self.clock = LogicalClock(self.world)
        self.cores = {
            node.rank: Cores(self.world, cores, WANTED) for node in plan.topology.nodes
        }
        self.channels = {
            c.name: Channel(self.world, c.capacity_items) for c in plan.channels
        }
        self.launcher = config.cluster.launcher
        self._barriers: dict[str, Barrier] = {}
        self._lent: dict[int, Channel] = {}
        self._devices: dict[int, Cores] = {}
        self._pushed: dict[tuple[str, int], tuple[list[int], Event]] = {}
        self._asked = Channel(self.world, _UNBOUNDED)
        self._answers = Channel(self.world, _UNBOUNDED)
        for queue in (self._asked, self._answers):
            self.world.spawn(self._drive(queue))
        self._give_processors(cores)

    def _give_processors(self, cores: int) -> None:
        """Give each rank a processor of its own, on nodes with one for each rank and one more for the driver.

        `cores`: number of processors of each node. On other nodes, and where ranks share processes, ranks take turns.
        """
        if self.launcher == "inline":
            return
        placement = self.plan.placement
        on: dict[int, list[Slot]] = {}
        for component in placement.components:
            for slot in placement.slots(component):
                on.setdefault(slot.node, []).append(slot)
        for node, slots in on.items():
            if len(slots) < cores and not any(slot.process for slot in slots):
                self.cores[node].give([slot.owner for slot in slots])

    def before(self, stage: str, iteration: int, omitted: Collection[str]) -> None:
        """Bring the channels into the state that they have before a stage, if stages before it were omitted.

        Called before all stages, if some are omitted. `omitted`: the stages of this iteration that are not simulated.
        """

    def device(self, accelerator: int) -> Cores:
        """Return the simulated device of an accelerator. It does the work of one thread at a time."""
        if accelerator not in self._devices:
            self._devices[accelerator] = Cores(self.world, 1)
        return self._devices[accelerator]

    def barrier(self, component: str) -> Barrier:
        if component not in self._barriers:
            ranks = self.plan.placement.world_size(component)
            self._barriers[component] = Barrier(self.world, ranks)
        return self._barriers[component]

    def push(self, channel: str, version: int) -> tuple[list[int], Event]:
        """Return the ranks that have pushed this version of the weights so far, and the event that all have pushed.

        `channel`: name of the weights.
        """
        key = (channel, version)
        if key not in self._pushed:
            self._pushed[key] = [], Event(self.world)
        return self._pushed[key]

    def lent(self, rank: int) -> Channel:
        """Return the channel in which rank `rank` of env reports the seconds that it has computed for its rollout rank.

        Such an env rank shares a process with a rollout rank.
        """
        return self._lent.setdefault(rank, Channel(self.world, 1))

    def ask(self, act: Callable[[], None]) -> None:
        """Put `act`, which sends a message, into the driver's queue. The driver runs the queue in order."""
        self._hand(self._asked, act)

    def answer(self, act: Callable[[], None]) -> None:
        """Put `act`, which takes a result, into the driver's queue of results. The driver runs the queue in order."""
        self._hand(self._answers, act)

    def _hand(self, queue: Channel, act: Callable[[], None]) -> None:
        for _ in queue.put(act):
            raise AssertionError("a channel without bounds has room")

    def _drive(self, queue: Channel) -> Body:
        # The measured cost covers sending and taking, so each is half of it.
        each = self.costs.of(f"driver/{self.launcher}_call").cpu_s / 2
        while True:
            act = yield from queue.get()
            yield Work(self.cores[0], _DRIVER, each)
            act()


class _StoppedWatch(Stopwatch):
    """A stopwatch that measures nothing, for predictions that need the seconds of stages only."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)

    def lap(self, part: str, size: float = 0.0) -> None:
        pass

    def metrics(self, component: str) -> Metrics:
        return {}


class Rank:
    """Base of simulated ranks. Subclasses have the methods of a worker, as generators that take the predicted time."""

    def __init__(self, site: Site, slot: Slot) -> None:
        self.site = site
        self.slot = slot
        self.world = site.world
        self.costs = site.costs
        self.job = site.config
        self.plan = site.plan
        self.mailbox = Channel(site.world, _UNBOUNDED)
        inline = site.launcher == "inline"
        self._process = (
            _DRIVER
            if inline
            else f"{slot.process} {slot.rank}"
            if slot.process
            else slot.owner
        )
        self._cores = site.cores[slot.node]
        self._watches = list[Stopwatch]()
        self._ended = 0.0
        # When the last lap ended, and whether others used the processor since
        self._off = True
        site.world.spawn(self._serve())

    @property
    def component(self) -> str:
        return self.slot.component

    def _serve(self) -> Body:
        around = (
            Cost(0.0)
            if self.site.launcher == "inline"
            else self.costs.of(f"{self.component}/ray_call")
        )
        while True:
            settle, requests = yield from self.mailbox.get()
            yield from self.spend(around)
            outcomes = list[Done]()
            for method, args, _ in requests:
                began = self.world.now
                self._watches = []
                value = yield from getattr(self, method)(*args)
                record = _NOT_MEASURED
                if self.site.measured:
                    record = self._record(method, began)
                outcomes.append(Done(value, record))
            self.site.answer(functools.partial(settle, outcomes))

    def _record(self, method: str, began_s: float) -> CallRecord:
        """Return the record of a call that ends now."""
        return CallRecord(
            method=method,
            began_s=began_s,
            seconds=self.world.now - began_s,
            cpu_s=0.0,
            process=0,
            process_cpu_s=0.0,
            parts=(),
            spans=tuple(watch.spans(0.0) for watch in self._watches),
        )

    def spend(self, cost: Cost) -> Body:
        """Let the rank work for `cost.cpu_s` on its processor or accelerator, then sleep for `cost.blocked_s`."""
        if cost.on_accelerator and self.slot.accelerators:
            yield Work(
                self.site.device(self.slot.accelerators[0]), self.slot.owner, cost.cpu_s
            )
        else:
            yield Work(self._cores, self._process, cost.cpu_s)
        if cost.blocked_s > 0.0:
            yield Sleep(cost.blocked_s)

    def lap(self, method: str, part: str, size: float = 0.0) -> Body:
        """Let the rank work for one lap: one run of the part `part` of `method`, with `size` units of work.

        The lap has the cold cost if other threads may have used the processor since the rank's last lap.
        """
        cold = self._off or self.world.now > self._ended
        name = self.costs.known(f"{self.component}.{method}", part, cold=cold)
        yield from self.lasting(self.costs.of(name, size))

    def lasting(self, cost: Cost) -> Body:
        """Work for the seconds of a cost. Record whether others may have used the processor before or meanwhile."""
        waited = self.world.now > self._ended
        began = self.world.now
        yield from self.spend(cost)
        self._ended = self.world.now
        self._off = waited or self._ended - began > cost.seconds + OFF_S

    def watch(self, *parts: str) -> Stopwatch:
        """Return a new stopwatch on the logical clock. Its measured spans are recorded with the call.

        `parts`: names of the parts that it measures.
        """
        if not self.site.measured:
            return _StoppedWatch()
        watch = Stopwatch(*parts, read=lambda: (self.world.now, self.world.now))
        self._watches.append(watch)
        return watch

    def move(self, to: Residency) -> Body:
        yield from self.lap(f"move_{to.word}", "rest")
        return MoveReport(residency=to, accelerator_bytes=0, host_bytes=0)

    def push_weights(self, version: int) -> Body:
        yield from self.lap("push_weights", "rest")
        there, every = self.site.push("weights", version)
        there.append(self.slot.rank)
        if len(there) == self.plan.placement.world_size(self.component):
            every.set()
        return dict[str, Metrics]()

    def pull_weights(self, version: int) -> Body:
        _, every = self.site.push("weights", version)
        yield every
        yield from self.lap("pull_weights", "rest")
        return dict[str, Metrics]()


class SimulatedCall(Call):
    """The future result of a call on a simulated rank.

    The thread that waits for it also simulates the rank, so it has none of the locks of other futures. Simulated ranks
    do not fail, so it ends with a value.
    """

    def __init__(self, slot: Slot, method: str) -> None:
        # Not called: the constructor of futures, which makes the locks.
        self.slot = slot
        self.method = method
        self._value: Any = None
        self._over = False
        self._acts: list[Callable[[Future[Any]], object]] = []

    def done(self) -> bool:
        return self._over

    def result(self, timeout: float | None = None) -> Any:
        assert self._over, "a simulated call is asked after its end"
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return None

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        if self._over:
            fn(self)
        else:
            self._acts.append(fn)

    def set_result(self, result: Any) -> None:
        self._value = result
        self._over = True
        acts = self._acts
        self._acts = []
        for act in acts:
            act(self)


class SimulatedGroup(WorkerGroup):
    """A group of simulated ranks. They do not fail, and one thread does everything, so no call needs a lock."""

    _call_class = SimulatedCall

    def _settle(self, call: Call, outcome: Outcome) -> None:
        assert isinstance(outcome, Done), "simulated ranks do not fail"
        del self._open[call]
        call.record = outcome.record
        call.set_result(outcome.value)


class _Handle(WorkerHandle):
    """The driver's handle of a simulated rank, through which calls are sent."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank.slot)
        self._rank = rank

    def send(self, settle: Settle, requests: Sequence[Request]) -> None:
        def deliver() -> None:
            for _ in self._rank.mailbox.put((settle, requests)):
                raise AssertionError("a mailbox has room")

        self._rank.site.ask(deliver)

    def where(self) -> Future[str]:
        answer: Future[str] = Future()
        answer.set_result("on a logical clock, where nothing is left to happen")
        return answer

    def cancel(self) -> None:
        """Do nothing, since simulated ranks run only while the driver waits."""

    def proceed(self) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def end(self) -> None:
        """Do nothing, since simulated ranks run only while the driver waits."""


def make_groups(site: Site, kinds: Mapping[str, type[Rank]]) -> dict[str, WorkerGroup]:
    """Return component -> worker group of simulated ranks, one rank on each slot of the plan.

    `kinds`: component -> class of its simulated ranks.
    """
    groups: dict[str, WorkerGroup] = {}
    for component, kind in kinds.items():
        slots = tuple(site.plan.placement.slots(component))
        # WorkerGroup only reads method names from its class.
        worker = cast(type[Worker], kind)
        spec = GroupSpec(
            name=component, worker=worker, config=None, slots=slots, channels={}
        )
        groups[component] = SimulatedGroup(
            spec, [_Handle(kind(site, slot)) for slot in slots]
        )
    return groups
