"""The Worker contract: one rank of a component, its arguments and place, its lifecycle, and errors of any worker.

::

    created ── setup ──▶ ready ◀── move(...) ──▶ offloaded
                           └───────── close ──────────┘──▶ closed
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rlplace.codes import problem
from rlplace.comm.channel import Channel
from rlplace.comm.work import Lanes, Work
from rlplace.errors import (
    ChannelBroken,
    ChannelMisuse,
    NotResident,
    RewardError,
    WorkerMisuse,
    did_you_mean,
)
from rlplace.metrics import Metrics, Reduction
from rlplace.placement.language.slots import Slot
from rlplace.placement.schedule import Residency
from rlplace.workers.collected import Collected
from rlplace.workers.lending import Lending
from rlplace.workers.messages import TIMEOUT_S, Messages

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlplace.tokens import Scores
    from rlplace.workers.arguments import WorkerArguments
    from rlplace.workers.engines.generation import GenerationEngine
    from rlplace.workers.facts import JobFacts
    from rlplace.workers.launch.devices import Device
    from rlplace.workers.launch.group import GroupBuilder
    from rlplace.workers.own_state import StateOfRank
    from rlplace.workers.process_group import ProcessGroup
    from rlplace.workers.registered import Registered
    from rlplace.workers.weights import WeightEnds

_BROADCAST = "broadcast of "  # prefix of keys of a group's mailboxes
# default of constructor arguments: keep the config that the launcher has set
_AS_LAUNCHED: Any = object()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address where the ranks of one group join; port 0 for a class that does not need a process of its own.

    Rank 0 already listens there: `listen_fd` is its socket (rank 0 only), which belongs to the code that uses it.
    `master_port` is another port of the same host, which is kept free for rank 0 to listen at: MASTER_PORT.
    """

    host: str
    port: int
    master_port: int = 0
    listen_fd: int | None = None
    timeout_s: float = 120.0


@dataclasses.dataclass(slots=True, kw_only=True)
class WorkerContext:
    """A worker's environment. Made by the launcher, owned by the worker's process."""

    slot: Slot
    world_size: int
    device: Device  # memory of this slot's accelerators: accounted if emulated, real on a GPU
    rendezvous: Rendezvous
    channels: Mapping[str, Channel]  # by name; keys are already those of this rank
    # Job folder in this node's shared memory, removed when the job ends; None if all workers are threads
    folder: Path | None = None
    # Shared with the other workers of the process
    lending: Lending = dataclasses.field(default_factory=Lending)
    # Set when another worker of the job has failed
    cancelled: threading.Event = dataclasses.field(default_factory=threading.Event)
    facts: JobFacts | None = None  # facts of the job; None outside of a job
    # Resources that the engine opened for this worker, closed after its `close`
    opened: contextlib.ExitStack = dataclasses.field(
        default_factory=contextlib.ExitStack
    )
    # Messages to and from the workers of all groups
    messages: Messages = dataclasses.field(default_factory=Messages)

    @property
    def rank(self) -> int:
        return self.slot.rank

    @property
    def owner(self) -> str:
        """This worker's name in errors and statistics."""
        return self.slot.owner

    @property
    def log(self) -> logging.Logger:
        return logging.getLogger(f"rlplace.{self.slot.component}.{self.slot.rank}")

    def check_cancelled(self, method: str) -> None:
        """Raise ChannelBroken if another worker has failed or the run is ending."""
        if self.cancelled.is_set():
            raise cancelled(self.owner, method)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """What a change of residency did on one rank. Bytes are measured."""

    residency: Residency
    # Bytes on each of the rank's accelerators after the move
    accelerator_bytes: int
    host_bytes: int  # bytes of offloaded copies on the host after the move


class Worker:
    """Base of all workers. A subclass adds methods; each is callable on the group by its name.

    `config` is whatever frozen value `create_group` was given. A subclass may have a constructor with the arguments
    `(self)`, `(self, config)` or `(self, config, context)`, and call `super().__init__(...)` with any of these: both
    attributes are there before. The constructor must be cheap: heavy imports belong in `setup`.

    A method may be an `async def`: the call ends when the coroutine does.
    """

    # True for a class that joins a process group: `context.rendezvous` is open, and no two ranks share a process.
    needs_own_process: ClassVar[bool] = False
    # Most ranks that a component of this class may have in a job; None: any number.
    most_ranks: ClassVar[int | None] = None
    # Whether `setup` takes or gives back memory of accelerators: then those that share them are set up in turns.
    uses_accelerators: ClassVar[bool] = True
    # Modules that `setup` imports, for a process that imports them once for many workers.
    imports: ClassVar[tuple[str, ...]] = ()
    # Whether the launcher provides what the tools below need: mailboxes for `send`, the variables RANK, WORLD_SIZE, ...
    # in a process of its own, and a visible log.
    with_tools: ClassVar[bool] = True

    _module_of_weights: nn.Module | None = None
    _engine_of_weights: GenerationEngine | None = None
    _weight_ends: WeightEnds | None = None

    config: Any
    context: WorkerContext

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        worker._collected = Collected()
        worker._lanes = Lanes()
        worker._registered = None
        worker._joined = None
        worker._own_state = None
        return worker

    _collected: Collected
    _lanes: Lanes  # of messages that are sent and received in the background
    _registered: Registered | None  # what `offload` has registered
    _joined: ProcessGroup | None
    _own_state: StateOfRank | None  # writes what `save_state` returns

    def __init__(
        self, config: Any = _AS_LAUNCHED, context: WorkerContext | None = None
    ) -> None:
        if config is not _AS_LAUNCHED:
            self.config = config
        if context is not None:
            self.context = context

    @classmethod
    def create_group(
        cls, config: Any = None, facts: JobFacts | None = None
    ) -> GroupBuilder:
        """`create_group(config).launch(cluster, name=..., placement_strategy=...)` starts one process per slot.

        `facts`: of the job, the same for all of its groups; see `rlplace.workers.facts.facts_of`.
        Raises WorkerMisuse for a class whose constructor has other arguments than `config` and `context`, or a method
        with a name that the group itself has.
        """
        from rlplace.workers.launch.construction import check_constructor
        from rlplace.workers.launch.group import GroupBuilder, check_methods

        check_constructor(cls)
        check_methods(cls)
        return GroupBuilder(worker=cls, config=config, facts=facts)

    # ── called by the launcher and the loop ──────────────────────────────────────────────────────────────────────────

    def setup(self) -> None:
        """Import, build and connect; ends with residency OFF. Collectives among the group's ranks are allowed.

        Objects that were passed to `offload` leave the accelerators automatically when `setup` ends.
        """

    def move(self, to: Residency) -> MoveReport:
        """Bring this rank's state on or off its accelerators. Moving to the present residency is allowed and free.

        Moves what was given to `offload`; nothing else. Called by `Loop._move` as `placement.schedule.schedule_of`
        decided. Raises AcceleratorOutOfMemory; then what had no room is where it was.
        """
        if self._registered is not None:
            return self._registered.move(to)
        return MoveReport(residency=to, accelerator_bytes=0, host_bytes=0)

    def begin_again(self, iteration: int) -> Metrics:
        """Discard this rank's data of an iteration that is repeated because a worker of any group was replaced.

        Called on all ranks, new ones too, while no rank is working and all channels are empty.
        """
        if self._weight_ends is not None:
            self._weight_ends.begin_again()
        if self._registered is not None:
            self._registered.begin_again()
        return {}

    # ── state that a checkpoint keeps ────────────────────────────────────────────────────────────────────────────────

    def save_state(self) -> Any:
        """Return what the next iteration follows from: dicts, lists, numbers, texts, tensors and arrays, nested.

        None on all ranks but 0 where the ranks have the same state. Tensors may be those that the worker goes on with:
        they are copied before it does. They are on the accelerators, or where `offload` has put them.
        """
        return None

    def load_state(self, state: Any) -> None:
        """Load what `save_state` has returned; its tensors are on the host. Called once, after `setup`."""

    def load_states(self, states: list[Any]) -> None:
        """Take the states of all ranks that saved, in rank order; another number of ranks may have saved.

        By default each rank takes its own, or that of rank 0 where the others have none.
        """
        from rlplace.workers.own_state import state_for

        self.load_state(state_for(self, states))

    def write_state(self, folder: str) -> Metrics:
        """Write the result of `save_state` into `folder` in the background. Called by the loop."""
        state = self.save_state()
        self._state_of_rank().write(Path(folder), state)
        return {}

    def read_state(self, folder: str) -> Metrics:
        """Load this worker's state from a checkpoint's `folder`. Called by the loop before the first iteration."""
        states = self._state_of_rank().read(Path(folder))
        if not states:
            return {}
        registered = self._registered
        if registered is None:
            self.load_states(states)
            return {}
        # Offloaded tensors have no storage to copy into, so all of them come back for the load.
        before = registered.residency
        registered.move(Residency.FULL)
        self.load_states(states)
        registered.account()
        registered.move(before)
        return {}

    def _state_of_rank(self) -> StateOfRank:
        from rlplace.workers.own_state import StateOfRank

        if self._own_state is None:
            self._own_state = StateOfRank(self)
            self.context.opened.callback(self._own_state.close)
        return self._own_state

    # ── weights that go to another component, or come from one ───────────────────────────────────────────────────────

    def weights(self) -> Mapping[str, Tensor]:
        """Return the tensors that are sent to, or filled from, another component, by name.

        To be overridden, unless `weights_of` was called. They are the tensors themselves, not copies, and the same
        names in source and target. A source of several ranks has the same values on all of them, or DTensors, as FSDP
        does. A target gets the whole on each rank, in the dtype of its own tensors; of a DTensor, its part.
        """
        if self._engine_of_weights is not None:
            from rlplace.workers.weights import only_taken

            raise only_taken(self)
        if self._module_of_weights is None:
            from rlplace.workers.weights import undeclared

            raise undeclared(self)
        from rlplace.comm.weights.named import tensors_of

        return tensors_of(self._module_of_weights)

    def weights_of(self, module: nn.Module | GenerationEngine) -> None:
        """Have `weights` return the parameters and buffers of a module; to be called once, in `setup`.

        An engine loads what is pulled, and sends nothing.
        """
        from rlplace.workers.engines.generation import GenerationEngine

        if isinstance(module, GenerationEngine):
            self._engine_of_weights = module
        else:
            self._module_of_weights = module

    def weights_loaded(self, version: int) -> None:
        """Called once the tensors of `weights` have the values of `version`. By default it does nothing."""

    def push_weights(self, version: int, to: str | None = None) -> Metrics:
        """Send this rank's weights as `version`, which only goes up. Call it on the group, with `pull_weights`.

        ::

            wait_all([learner.push_weights(version), sampler.pull_weights(version)])

        `to`: the component that takes them; None: all that the job has planned. Between nodes, or between threads,
        the push ends once all is taken. Raises WeightSyncError, NotResident, or as a channel.
        """
        return self._ends_of_weights().push(version, to)

    def pull_weights(self, version: int, source: str | None = None) -> Metrics:
        """Wait for exactly `version`, whole; copy it into the tensors of `weights`, which stay the objects they are.

        `source`: the component that sends them, if several do. On an error the weights in use stay as they are.
        """
        metrics = self._ends_of_weights().pull(version, source)
        self.weights_loaded(version)
        return metrics

    def _ends_of_weights(self) -> WeightEnds:
        from rlplace.workers.weights import WeightEnds

        if self._weight_ends is None:
            self._weight_ends = WeightEnds(self)
        return self._weight_ends

    def _require_weights(self) -> None:
        """Raise WeightSyncError if the job plans to send or fill weights that the class does not provide."""
        component = self.context.slot.component
        facts = self.context.facts
        kind = type(self)
        by_engine = facts is not None and (
            (facts.syncs_from(component) and kind.push_weights is Worker.push_weights)
            or (facts.syncs_to(component) and kind.pull_weights is Worker.pull_weights)
        )
        named = self._module_of_weights or self._engine_of_weights
        unnamed = kind.weights is Worker.weights and named is None
        if by_engine and unnamed:
            from rlplace.workers.weights import undeclared

            raise undeclared(self)

    def onload(self) -> MoveReport:
        """Bring all state onto the accelerators: `move(Residency.FULL)`."""
        return self.move(Residency.FULL)

    def close(self) -> None:
        """Release everything. Called once, also after a failure; must not block."""

    # ── the worker's place ───────────────────────────────────────────────────────────────────────────────────────────

    @functools.cached_property
    def rank(self) -> int:
        """Number of this worker in its group, from 0."""
        return self.context.rank

    @functools.cached_property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self.context.world_size

    @functools.cached_property
    def component(self) -> str:
        """Name that the group was launched with."""
        return self.context.slot.component

    @functools.cached_property
    def log(self) -> logging.Logger:
        """Logger of this worker, from level INFO on; its lines go where the worker prints."""
        return self.context.log

    # ── channels and messages ────────────────────────────────────────────────────────────────────────────────────────

    def channel(self, name: str) -> Channel:
        """Return this worker's end of a channel, by the channel's name.

        These are the channels that the group was launched with (`launch(..., channels=...)`; without that argument all
        that the cluster had made by then), and those that were handed over as an argument of a method since.
        Raises WorkerMisuse for any other name.
        """
        channels = self.context.channels
        if name in channels:
            return channels[name]
        near = did_you_mean(name, channels)
        error = ""
        if near is not None:
            error = "misspelt"
        raise WorkerMisuse(
            problem(
                "unknown-channel",
                self.context.owner,
                repr(name),
                error=error,
                name=name,
                near=near,
                known=", ".join(channels) or "none",
            )
        )

    def world_size_of(self, component: str) -> int:
        """Return the number of workers in another group. Raises WorkerMisuse for an unknown one."""
        return self.context.messages.world_size(self.context.owner, component)

    def send(
        self, value: Any, to: str, rank: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """Send a value to one rank of a launched group, also of this one; the receiver calls `recv`.

        `value`: anything that can be pickled, with arrays and tensors of any nesting; they travel as in a channel, by
        shared memory or sockets. A tensor on a GPU is copied to the host, and arrives there. Returns once the message
        is in the receiver's mailbox, which holds 64 messages for all ranks of a group on one node; until then it waits,
        `timeout_s` seconds at most (None: 120).

        Raises WorkerMisuse for a receiver that does not exist; ChannelBroken at once when the receiver's group has
        ended; ChannelTimeout.
        """
        self.context.messages.send(value, self.context.slot, to, rank, timeout_s)

    def recv(
        self, source: str, rank: int = 0, *, timeout_s: float | None = None
    ) -> Any:
        """Return the next message of one rank of a launched group; messages of one sender keep their order.

        What is returned is this worker's own, its tensors are on the host. Waits `timeout_s` seconds at most (None:
        120). Raises WorkerMisuse for a sender that does not exist; ChannelBroken within a second when the sender's
        group has ended and no message of it is left; ChannelTimeout, which names the sender.
        """
        return self._recv(source, rank, timeout_s)

    def send_async(
        self, value: Any, to: str, rank: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """Begin a `send`: `await` the result, or call its `wait()`. The value must not change until then."""
        context = self.context
        return self._lanes.begin(
            ("send", to, rank),
            lambda: context.messages.send(value, context.slot, to, rank, timeout_s),
        )

    def recv_async(
        self, source: str, rank: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """Begin a `recv`: `await` the message, or call `wait()` of the result."""
        return self._lanes.begin(
            ("recv", source, rank), lambda: self._recv(source, rank, timeout_s)
        )

    def broadcast(
        self, value: Any = None, *, root: int = 0, timeout_s: float | None = None
    ) -> Any:
        """Return the value of rank `root` on all ranks of the group; called by all of them, in the same order.

        The value of other ranks than `root` is not looked at. Travels and fails as `send` and `recv`.
        """
        context = self.context
        slot = context.slot
        if context.rank != root:
            return self._recv(slot.component, root, timeout_s, _BROADCAST)
        for rank in range(context.world_size):
            if rank != root:
                context.messages.send(
                    value, slot, slot.component, rank, timeout_s, _BROADCAST
                )
        return value

    def _recv(
        self, source: str, rank: int, timeout_s: float | None, topic: str = ""
    ) -> Any:
        context = self.context
        return context.messages.recv(
            context.slot,
            source,
            rank,
            timeout_s,
            lambda: context.check_cancelled("recv"),
            topic,
        )

    # ── memory of accelerators ───────────────────────────────────────────────────────────────────────────────────────

    def offload(self, *things: Any) -> MoveReport:
        """Register what leaves the accelerators with the component; without arguments, `move(Residency.OFF)`.

        `things`: torch modules (parameters and buffers are there from residency WEIGHTS on, gradients at FULL),
        optimizers (their state is there at FULL), tensors or mappings of tensors (from WEIGHTS on). A GenerationEngine
        registers itself. Tensor objects stay what they are; only the memory below them comes and goes. Registered
        things stay where they are until the next move; those that are registered in `setup` leave when it ends. The
        bytes are accounted on the accelerators, where these are emulated.

        Returns what the rank holds now, measured, as `move`. Raises WorkerMisuse for what cannot be offloaded, and
        AcceleratorOutOfMemory.
        """
        if not things:
            return self.move(Residency.OFF)
        if self._registered is None:
            from rlplace.workers.registered import Registered

            self._registered = Registered(self.context.slot, self.context.device)
        return self._registered.add(things)

    # ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def timer(self, name: str) -> AbstractContextManager[None]:
        """Time a block: `with self.timer("simulate"): ...`.

        Its seconds are added to the metric `<component>/<name>_s`, of which the longest of all ranks counts, until
        `take_metrics`; and to the record of the call, which the timeline of a run shows. Timers may be nested.
        """
        return self._collected.timer(self.context.slot.component, name)

    def metric(
        self, name: str, value: Any, *, reduce: Reduction = "mean", weight: float = 1.0
    ) -> None:
        """Count a number as the metric `<component>/<name>`; a name with a `/` stays as it is.

        Numbers of one name are reduced in the same way over the calls until `take_metrics`, and over the ranks then.
        `weight` counts in a mean only. What a method returns as a mapping of names to numbers counts too, as means.
        Raises WorkerMisuse for what is no number, or for two reductions of one name.
        """
        context = self.context
        self._collected.add(
            context.owner, context.slot.component, name, value, reduce, weight
        )

    def take_metrics(self) -> Metrics:
        """Return what `timer`, `metric` and results of methods have collected since the last call, and forget it.

        The loop of a run calls this on every group after each stage, and writes the reduced numbers into the run's
        metrics. In a loop of one's own: `reduce_metrics(group.take_metrics().wait())`.
        """
        return self._collected.take()

    # ── torch.distributed ────────────────────────────────────────────────────────────────────────────────────────────

    def process_group(
        self, backend: str | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """Join the default process group of torch.distributed with all ranks of the group, and return it. A collective.

        For classes with `needs_own_process = True`. `backend` None: nccl on GPUs, else gloo. `timeout_s`: for all ranks
        to join, and of each collective. Called again, it returns the same group. It is left when the worker closes.

        A plain `torch.distributed.init_process_group()` works as well in a process of its own: RANK, WORLD_SIZE,
        LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set before the constructor runs.
        Raises WorkerMisuse; ClusterError, which names the ranks that did not come.
        """
        if not self.needs_own_process:
            raise WorkerMisuse(
                problem(
                    "no-process-group",
                    self.context.owner,
                    f"class {type(self).__qualname__}(Worker) without needs_own_process",
                )
            )
        if self._joined is None:
            from rlplace.workers.process_group import ProcessGroup

            self._joined = ProcessGroup(self.context)
            self.context.opened.callback(self._joined.close)
        return self._joined.join(backend, timeout_s)

    # ── around each call, by the launcher ────────────────────────────────────────────────────────────────────────────

    def _begin_call(self) -> None:
        self._collected.begin_call()

    def _end_call(self, method: str, result: Any) -> None:
        """Collect the results and timers of a method that has ended without an error."""
        if self._registered is not None:
            if method == "setup":
                self.move(Residency.OFF)
            elif method not in ("move", "onload", "offload"):
                self._registered.account()
        if self.with_tools and method != "take_metrics":
            slot = self.context.slot
            self._collected.add_result(
                self.context.owner, slot.component, method, result
            )


class RoleWorker(Worker):
    """Base of the shipped workers. Owns what it has opened, and closes it in reverse order."""

    # The metrics and messages of these workers are handled by the run itself.
    with_tools: ClassVar[bool] = False

    config: WorkerArguments

    def __init__(self, config: WorkerArguments, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._opened = contextlib.ExitStack()
        self.residency = Residency.OFF

    def move(self, to: Residency) -> MoveReport:
        self.residency = to
        return super().move(to)

    @classmethod
    def create_group(
        cls, config: Any = None, facts: JobFacts | None = None
    ) -> GroupBuilder:
        """Return the group of a job's component; `config` is the result of `Job.arguments`.

        Raises WorkerMisuse for the config of a whole job, which `rlplace.FSDPActor` and similar classes take.
        """
        if config is None or isinstance(config, Mapping):
            raise WorkerMisuse(
                problem(
                    "no-worker-arguments",
                    cls.__qualname__,
                    type(config).__name__,
                    worker=cls.__qualname__,
                )
            )
        return super().create_group(config, facts)

    def _require(self, needs: Residency, method: str) -> None:
        """Raise NotResident if the residency is below `needs`."""
        if self.residency < needs:
            raise not_resident(
                self.context.owner, method, has=self.residency, needs=needs
            )

    def close(self) -> None:
        self._opened.close()


def not_resident(
    owner: str, method: str, *, has: Residency, needs: Residency
) -> NotResident:
    return NotResident(
        problem(
            "not-resident",
            owner,
            error="worker",
            method=method,
            residency=has.word,
            needed=needs.word,
            move=needs.name,
        )
    )


def cancelled(owner: str, method: str) -> ChannelBroken:
    return ChannelBroken(problem("cancelled", owner, method=method))


def out_of_step(
    owner: str, error: str, *, got: str, expected: str, **facts: Any
) -> ChannelMisuse:
    """Build the error for a message of an unexpected step, stage group or row. `error`: its name in the texts."""
    unexpected = problem(
        "out-of-step", owner, got, error=error, expected=expected, **facts
    )
    return ChannelMisuse(unexpected)


def score_not_finite(component: str, score: Scores) -> RewardError:
    computes = "compute" if component == "critic" else "dtype"
    return RewardError(
        problem(
            "score-not-finite",
            component,
            str(score.values[:8].tolist()) + (" ..." if len(score.values) > 8 else ""),
            sample=score.sample,
            group=score.group,
            component=component,
            computes=computes,
        )
    )
