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
    """The address where the ranks of one group meet to form a process group.

    `port`: port of `host` at which rank 0 listens; 0 for a class without `needs_own_process`. `listen_fd`: on rank 0,
    the socket that already listens at `port`; the code that uses the socket owns it. `master_port`: another port of
    `host`, kept free for rank 0, for the variable MASTER_PORT. `weights_port`, `weights_fd`: as `port` and `listen_fd`,
    for the store at which the members of weight syncs between accelerators meet; 0 and None for a group that sends no
    weights like this. `timeout_s`: the most seconds until all ranks have joined.
    """

    host: str
    port: int
    master_port: int = 0
    listen_fd: int | None = None
    weights_port: int = 0
    weights_fd: int | None = None
    timeout_s: float = 120.0


@dataclasses.dataclass(slots=True, kw_only=True)
class WorkerContext:
    """A worker's place in its job, with its channels and accelerators. The launcher makes it, in the worker's process.

    `world_size`: number of ranks of the group. `channels`: this worker's ends of channels, by name. `folder`: the job
    folder in shared memory; None if all workers are threads. `lending`: shared by all workers of the process.
    `cancelled`: set when another worker has failed or the run ends. `facts`: numbers of ranks and weight syncs of the
    job; None outside of a job. `opened`: resources that are closed after the worker's `close`. `messages`: sends and
    receives messages between workers of all groups.
    """

    slot: Slot
    world_size: int
    device: Device  # memory of this slot's accelerators: accounted if emulated, real on a GPU
    rendezvous: Rendezvous
    channels: Mapping[str, Channel]  # this worker's ends, by name
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
        """This worker's name in errors and statistics, such as "actor rank 0"."""
        return self.slot.owner

    @property
    def log(self) -> logging.Logger:
        return logging.getLogger(f"rlplace.{self.slot.component}.{self.slot.rank}")

    def check_cancelled(self, method: str) -> None:
        """Raise ChannelBroken if another worker has failed or the run is ending. Long methods call this repeatedly.

        `method`: name of the running method, for the error.
        """
        if self.cancelled.is_set():
            raise cancelled(self.owner, method)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """Residency and measured bytes of one rank after a change of residency.

    `accelerator_bytes`: bytes on each of the rank's accelerators. `host_bytes`: bytes of offloaded copies on the host.
    """

    residency: Residency
    # Bytes on each of the rank's accelerators after the move
    accelerator_bytes: int
    host_bytes: int  # bytes of offloaded copies on the host after the move


class Worker:
    """Base class of all workers. A worker is one rank of a component. Its public methods can be called on the worker
    group.

    `self.config` is the value that was passed to `create_group`. The constructor of a subclass may have the arguments
    `(self)`, `(self, config)` or `(self, config, context)`, and may call `super().__init__(...)` with any of them:
    `self.config` and `self.context` are set before the constructor runs. The constructor must be cheap; slow imports
    belong in `setup`.

    A method may be an `async def`: a call then ends when the coroutine ends.

    A subclass may set: `needs_own_process`, if its ranks join a process group; `most_ranks`, the most ranks in a job;
    `uses_accelerators`, whether `setup` takes or frees accelerator memory; `imports`, names of modules that `setup`
    imports. `with_tools`: whether the launcher prepares `send` and `recv`, metrics in results, the log, and the
    variables of torch.distributed.
    """

    # True for a class that joins a process group: `context.rendezvous` is open, and no two ranks share a process.
    needs_own_process: ClassVar[bool] = False
    # Most ranks that a component of this class may have in a job; None: any number.
    most_ranks: ClassVar[int | None] = None
    # Whether `setup` takes or gives back memory of accelerators: then components that share them are set up in turns.
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
        """Return a builder of worker groups. Its method `launch` starts one process per slot.

        ::

            create_group(config).launch(cluster, name=..., placement_strategy=...)

        `config`: any value; it becomes `self.config` of each worker. `facts`: numbers of ranks and weight syncs of the
        job, equal for all of its groups; see `rlplace.workers.facts.facts_of`. Raise WorkerMisuse if the constructor of
        the class needs other arguments than `config` and `context`, or if a method has a name that WorkerGroup uses
        itself.
        """
        from rlplace.workers.launch.construction import check_constructor
        from rlplace.workers.launch.group import GroupBuilder, check_methods

        check_constructor(cls)
        check_methods(cls)
        return GroupBuilder(worker=cls, config=config, facts=facts)

    # ── called by the launcher and the loop ──────────────────────────────────────────────────────────────────────────

    def setup(self) -> None:
        """Import libraries, create the worker's state, and connect to other ranks. Called once, before all other
        methods.

        After `setup`, the worker must have residency OFF: objects that were passed to `offload` are then offloaded
        automatically. Collectives among the ranks of the group are allowed.
        """

    def move(self, to: Residency) -> MoveReport:
        """Offload or onload this rank's state as residency `to` requires; return the new residency and the measured
        bytes.

        Only objects that were passed to `offload` are moved. If the rank has residency `to` already, nothing changes.
        The loop of a run calls this at the beginning of a stage, as the plan says. Raise AcceleratorOutOfMemory if an
        object does not fit; this object stays where it was.
        """
        if self._registered is not None:
            return self._registered.move(to)
        return MoveReport(residency=to, accelerator_bytes=0, host_bytes=0)

    def begin_again(self, iteration: int) -> Metrics:
        """Discard this rank's data of `iteration`, which will be repeated because a worker of the job was replaced;
        return metrics.

        The base class returns none. Called on all ranks, including those that were replaced, while no rank is working
        and all channels are empty.
        """
        if self._weight_ends is not None:
            self._weight_ends.begin_again()
        if self._registered is not None:
            self._registered.begin_again()
        return {}

    # ── another plan of the job ──────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def can_follow(cls, component: str, before: Any, after: Any) -> bool:
        """Return whether the workers of a group can continue under another plan of the job, in their processes and
        with their state.

        By default they cannot, and are replaced. `component`: name of the group, whose slots are equal in both plans.
        `before`, `after`: `config` of the workers under both plans.
        """
        return False

    def leave_plan(self) -> None:
        """Close what depends on the plan: ends of channels and of weight syncs. They are used no more."""

    def follow_plan(
        self, config: Any, facts: JobFacts | None, channels: Mapping[str, Channel]
    ) -> None:
        """Continue under another plan, after `leave_plan`. The state of the worker stays.

        `config`, `facts`: those of the other plan. `channels`: this worker's ends, by name; `context.channels` has them
        already.
        """
        self.config = config
        self.context.facts = facts

    # ── state that a checkpoint keeps ────────────────────────────────────────────────────────────────────────────────

    def save_state(self) -> Any:
        """Return the state that a checkpoint needs, so that the next iteration can continue from it. By default None.

        A state consists of dicts, lists, tuples, numbers, texts, bytes, None, tensors and NumPy arrays, nested at will.
        If all ranks have the same state, return it on rank 0, and None on all other ranks. Tensors need no copy: the
        caller copies them before the worker continues, including tensors that are offloaded.
        """
        return None

    def load_state(self, state: Any) -> None:
        """Load a state that `save_state` has returned. Its tensors are on the host.

        Called at most once, after `setup`. By default do nothing.
        """

    def load_states(self, states: list[Any]) -> None:
        """Load this rank's state from the states of all ranks that saved.

        By default each rank loads its own state, or the state of rank 0 if all other ranks have saved None. Override
        this method if the number of ranks may differ from the saved number. `states`: in rank order.
        """
        from rlplace.workers.own_state import state_for

        self.load_state(state_for(self, states))

    def write_state(self, folder: str) -> Metrics:
        """Copy the result of `save_state`, and write the copy into `folder` in the background. Return no metrics.

        The loop of a run calls this.
        """
        state = self.save_state()
        self._state_of_rank().write(Path(folder), state)
        return {}

    def read_state(self, folder: str) -> Metrics:
        """Load this worker's state from the checkpoint in `folder`. Return no metrics.

        The loop of a run calls this before the first iteration.
        """
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
        """Return the tensors that a weight sync sends from this rank, or fills on this rank: name -> tensor.

        Override this method, or call `weights_of`. Return the tensors themselves, not copies. Source and target must
        use the same names. The ranks of a source must have equal tensors, or DTensors, as with FSDP. Each rank of a
        target gets whole tensors, in the dtypes of its own tensors; if its tensor is a DTensor, it gets its own shard.
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
        """Use the parameters and buffers of `module` as the result of `weights`. Call this once, in `setup`.

        If `module` is a GenerationEngine, `pull_weights` loads the received weights into it. An engine cannot send
        weights.
        """
        from rlplace.workers.engines.generation import GenerationEngine

        if isinstance(module, GenerationEngine):
            self._engine_of_weights = module
        else:
            self._module_of_weights = module

    def weights_loaded(self, version: int) -> None:
        """React to new weights. `pull_weights` calls this after it has loaded version `version`. By default do
        nothing.
        """

    def push_weights(self, version: int, to: str | None = None) -> Metrics:
        """Send this rank's weights as version `version`, and return the metrics of the push.

        Call this on the whole group, together with `pull_weights` of the receiving group::

            wait_all([learner.push_weights(version), sampler.pull_weights(version)])

        `version`: greater than all versions before. `to`: component that receives the weights; None: every component
        with a planned sync from this component. Between nodes, or between threads, the push ends when the receivers
        have taken all bytes. Raise WeightSyncError if no sync is planned or the result of `weights` is wrong,
        NotResident if the weights are offloaded, and the errors of a channel.
        """
        return self._ends_of_weights().push(version, to)

    def pull_weights(self, version: int, source: str | None = None) -> Metrics:
        """Wait for version `version` of the weights, copy it into the tensors of `weights`, and return the metrics of
        the pull.

        `source`: component that sends the weights; None: the only component with a planned sync to this component.
        Nothing is copied before all weights have arrived with the expected names and shapes.
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
        """Raise WeightSyncError if this component takes part in a planned weight sync, but the class has no weights."""
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
        """Bring all registered state onto the accelerators; return the new residency and the measured bytes, as `move`
        does.
        """
        return self.move(Residency.FULL)

    def close(self) -> None:
        """Release all resources of the worker. Called once, also after a failure. Must not block."""

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
        """Name of the worker's component. It is the name with which the group was launched."""
        return self.context.slot.component

    @functools.cached_property
    def log(self) -> logging.Logger:
        """Logger of this worker, from level INFO on. Its lines go where the worker's standard error goes."""
        return self.context.log

    # ── channels and messages ────────────────────────────────────────────────────────────────────────────────────────

    def channel(self, name: str) -> Channel:
        """Return this worker's end of the channel `name`.

        A worker knows the channels of `launch(..., channels=...)`; without this argument, all channels that the cluster
        had made before the launch. It also knows channels that were arguments of an earlier method call. Raise
        WorkerMisuse for any other name.
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
        """Return the number of workers in the group of `component`. Raise WorkerMisuse if there is no such group."""
        return self.context.messages.world_size(self.context.owner, component)

    def send(
        self, value: Any, to: str, rank: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """Send `value` to rank `rank` of the launched group `to`, which may be this worker's own group. The receiver
        calls `recv`.

        `value`: any value that can be pickled, including nested arrays and tensors. It travels as in a channel, by
        shared memory or sockets. A tensor on a GPU arrives as a tensor on the host. `timeout_s`: the most seconds to
        wait until the receiver's mailbox has room; None: 120. A mailbox holds 64 messages, for all ranks of a group on
        one node.

        Raise WorkerMisuse if the receiver does not exist, ChannelBroken at once if the receiver's group has ended,
        ChannelTimeout if the mailbox stays full.
        """
        self.context.messages.send(value, self.context.slot, to, rank, timeout_s)

    def recv(
        self, source: str, rank: int = 0, *, timeout_s: float | None = None
    ) -> Any:
        """Wait for the next message from rank `rank` of the launched group `source`, and return its value.

        Messages of one sender keep their order. This worker may change the value; its tensors are on the host.
        `timeout_s`: the most seconds to wait; None: 120. Raise WorkerMisuse if the sender does not exist,
        ChannelTimeout at the deadline, and ChannelBroken within a second if the sender's group has ended and none of
        the sender's messages is left.
        """
        return self._recv(source, rank, timeout_s)

    def send_async(
        self, value: Any, to: str, rank: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """Begin to send `value` in the background, with the arguments of `send`; return an object for the running
        operation.

        Wait for its end with `await`, or with its method `wait()`. The value must not change before the end.
        """
        context = self.context
        return self._lanes.begin(
            ("send", to, rank),
            lambda: context.messages.send(value, context.slot, to, rank, timeout_s),
        )

    def recv_async(
        self, source: str, rank: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """Begin to wait for a message in the background, with the arguments of `recv`; return an object for the running
        operation.

        `await` of this object, or its method `wait()`, returns the value of the message.
        """
        return self._lanes.begin(
            ("recv", source, rank), lambda: self._recv(source, rank, timeout_s)
        )

    def broadcast(
        self, value: Any = None, *, root: int = 0, timeout_s: float | None = None
    ) -> Any:
        """Return the `value` of rank `root`, on all ranks of the group. All ranks must call this, in the same order.

        The `value` of all other ranks is ignored. `timeout_s`: the most seconds to wait; None: 120. Raise the errors of
        `send` and `recv`.
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
        """Register objects that `move` offloads and onloads. Without arguments, do `move(Residency.OFF)`.

        Return the present residency and the measured bytes of the rank, as `move` does.

        `things`: torch modules (parameters and buffers are on the accelerators at residencies WEIGHTS and FULL,
        gradients at FULL), optimizers (their state is on the accelerators at FULL), tensors or mappings of tensors (at
        WEIGHTS and FULL). A GenerationEngine registers itself. Tensor objects stay; only their memory is freed and
        allocated again. Registered objects stay where they are until the next move; objects that `setup` has registered
        are offloaded at its end. On emulated accelerators, the bytes are counted in an account. Raise WorkerMisuse if
        an object cannot be offloaded, AcceleratorOutOfMemory if the bytes do not fit.
        """
        if not things:
            return self.move(Residency.OFF)
        if self._registered is None:
            from rlplace.workers.registered import Registered

            self._registered = Registered(self.context.slot, self.context.device)
        return self._registered.add(things)

    # ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def timer(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that measures the seconds of its `with` block: `with self.timer("simulate"): ...`.

        The seconds are added to the metric `<component>/<name>_s` until `take_metrics`. The run reports the maximum
        over ranks. The block also appears as a part of the method call in the run's timeline. Timers may be nested.
        """
        return self._collected.timer(self.context.slot.component, name)

    def metric(
        self, name: str, value: Any, *, reduce: Reduction = "mean", weight: float = 1.0
    ) -> None:
        """Add a number to the metric `<component>/<name>`, or to the metric `name` if `name` contains a `/`.

        `reduce`: mean, sum, max or min. It combines the numbers of a metric until `take_metrics`, and then the numbers
        of all ranks. `weight`: weight of the number in a mean. The numbers in a mapping that a method returns also
        become metrics, as means. Raise WorkerMisuse if `value` is not a number, or if a metric gets two different
        reductions.
        """
        context = self.context
        self._collected.add(
            context.owner, context.slot.component, name, value, reduce, weight
        )

    def take_metrics(self) -> Metrics:
        """Return the metrics that were collected since the last `take_metrics`.

        Metrics come from `timer`, `metric` and the results of methods. The loop of a run calls this on every group
        after each stage, combines the numbers of all ranks, and writes them into the run's metrics. In a loop of your
        own, call `reduce_metrics(group.take_metrics().wait())`.
        """
        return self._collected.take()

    # ── torch.distributed ────────────────────────────────────────────────────────────────────────────────────────────

    def process_group(
        self, backend: str | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """Join torch.distributed's default process group together with all ranks of the worker group, and return it. A
        collective.

        Only for classes with `needs_own_process = True`. `backend`: "nccl" or "gloo"; None: nccl on GPUs, else gloo.
        `timeout_s`: the most seconds until all ranks have joined, and the timeout of each collective. A second call
        returns the open process group. The worker leaves the process group when it is closed.

        A plain `torch.distributed.init_process_group()` works as well: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
        MASTER_ADDR and MASTER_PORT are set before the constructor runs. Raise WorkerMisuse for a class without
        `needs_own_process`, or if the open process group has other ranks. Raise ClusterError, which names the missing
        ranks, if not all ranks join in time.
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
        """Collect the metrics in a method's result, and record memory that the method has allocated or freed.

        Called after each method that has ended without an error. After `setup`, also offload the registered objects.
        """
        if self._registered is not None:
            if method == "setup":
                self.move(Residency.OFF)
            elif method not in ("move", "onload", "offload"):
                self._registered.account()
        if self.with_tools and method != "take_metrics":
            slot = self.context.slot
            self._collected.add_result(self.context.owner, slot.component, result)


class RoleWorker(Worker):
    """Base class of the workers that come with rlplace. Owns opened resources, and closes the last opened one first.
    `with_tools` is False: a run handles their messages and metrics itself.
    """

    # The metrics and messages of these workers are handled by the run itself.
    with_tools: ClassVar[bool] = False

    # Whether workers of exactly this class can continue under another plan: `_enter_plan` then opens all that depends
    # on the plan. A subclass sets it anew, since it may keep more.
    follows_plans: ClassVar[bool] = False

    config: WorkerArguments

    def __init__(self, config: WorkerArguments, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._opened = contextlib.ExitStack()
        # What depends on the plan; closed before the rest
        self._of_plan = contextlib.ExitStack()
        self.residency = Residency.OFF

    @classmethod
    def can_follow(cls, component: str, before: Any, after: Any) -> bool:
        if not vars(cls).get("follows_plans", False):
            return False
        arguments: WorkerArguments = before
        return arguments.differs_only_in_plan(after, component)

    def _enter_plan(self) -> None:
        """Open what depends on the plan, and let `_of_plan` close it. Called by `setup`, and after a change of the
        plan.
        """

    def leave_plan(self) -> None:
        self._of_plan.close()

    def follow_plan(
        self, config: Any, facts: JobFacts | None, channels: Mapping[str, Channel]
    ) -> None:
        super().follow_plan(config, facts, channels)
        self._enter_plan()

    def move(self, to: Residency) -> MoveReport:
        self.residency = to
        return super().move(to)

    @classmethod
    def create_group(
        cls, config: Any = None, facts: JobFacts | None = None
    ) -> GroupBuilder:
        """Return a builder of worker groups for a component of a job.

        `config`: the result of `Job.arguments`. `facts`: numbers of ranks and weight syncs of the job. Raise
        WorkerMisuse if `config` is None or a mapping, such as the config of a whole job, which `rlplace.FSDPActor` and
        similar classes take.
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
        """Raise NotResident if the residency is below `needs`.

        `method`: name of the method that needs the memory, for the error.
        """
        if self.residency < needs:
            raise not_resident(
                self.context.owner, method, has=self.residency, needs=needs
            )

    def close(self) -> None:
        self._of_plan.close()
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
    """Return the error for a message that does not belong to the expected iteration, step, group or row.

    `owner`: name of the receiver. `error`: name of one of the texts of this error's code. `got`: description of the
    message. `expected`: description of the expected message. `facts`: further values for the text.
    """
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
