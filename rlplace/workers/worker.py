"""The Worker contract: one rank of a component, its arguments and place, its lifecycle, and errors of any worker.

::

    created ── setup ──▶ ready ◀── move(...) ──▶ offloaded
                           └───────── close ──────────┘──▶ closed
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlplace.comm.channel import Channel
from rlplace.errors import ChannelBroken, ChannelMisuse, NotResident, RewardError
from rlplace.metrics import Metrics
from rlplace.placement.language.slots import Slot
from rlplace.placement.schedule import Residency
from rlplace.workers.lending import Lending

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlplace.tokens import Scores
    from rlplace.workers.arguments import WorkerArguments
    from rlplace.workers.facts import JobFacts
    from rlplace.workers.launch.devices import Device
    from rlplace.workers.launch.group import GroupBuilder
    from rlplace.workers.weights import WeightEnds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one group join for collectives; port 0 for a class that does not need its own process.

    Rank 0 already listens there: `listen_fd` is its socket (rank 0 only), which belongs to the code that uses it.
    """

    host: str
    port: int
    listen_fd: int | None = None
    timeout_s: float = 120.0


@dataclasses.dataclass(slots=True, kw_only=True)
class WorkerContext:
    """A worker's place. Made by the launcher, owned by the worker's process."""

    slot: Slot
    world_size: int
    device: Device  # the memory of this slot's accelerators: accounted where emulated, real on a GPU
    rendezvous: Rendezvous
    channels: Mapping[str, Channel]  # already named for this rank
    folder: Path | None = (
        None  # of the job in this node's shared memory, gone when the job ends; None: all are threads
    )
    lending: Lending = dataclasses.field(
        default_factory=Lending
    )  # with the other workers of the process
    cancelled: threading.Event = dataclasses.field(
        default_factory=threading.Event
    )  # set when siblings failed
    facts: JobFacts | None = None  # of the job; None outside of one
    opened: contextlib.ExitStack = dataclasses.field(
        default_factory=contextlib.ExitStack
    )  # by the engine for this worker: closed after its `close`

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
        """Raise ChannelBroken where a sibling has failed or the run is ending."""
        if self.cancelled.is_set():
            raise cancelled(self.owner, method)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """What a change of residency did on one rank."""

    residency: Residency
    accelerator_bytes: (
        int  # held on each of the rank's accelerators after the move, measured
    )
    host_bytes: int  # offloaded copies held on the host after the move, measured


class Worker:
    """Base of all workers. A subclass adds methods; each is callable on the group by its name.

    `config` is whatever frozen value `create_group` was given. The constructor must be cheap: heavy imports belong in
    `setup`.
    """

    # True for a class that joins a process group: `context.rendezvous` is open, and no two ranks share a process.
    needs_own_process: ClassVar[bool] = False
    # Whether `setup` takes or gives back memory of accelerators: then those that share them are set up in turns.
    uses_accelerators: ClassVar[bool] = True
    # Modules that `setup` imports, for a process that imports them once for many workers.
    imports: ClassVar[tuple[str, ...]] = ()

    _module_of_weights: nn.Module | None = None
    _weight_ends: WeightEnds | None = None

    def __init__(self, config: Any, context: WorkerContext) -> None:
        self.config = config
        self.context = context

    @classmethod
    def create_group(
        cls, config: Any = None, facts: JobFacts | None = None
    ) -> GroupBuilder:
        """`create_group(config).launch(cluster, name=..., placement_strategy=...)` starts one process per slot.

        `facts`: of the job, the same for all of its groups; see `rlplace.workers.facts.facts_of`.
        """
        from rlplace.workers.launch.group import GroupBuilder

        return GroupBuilder(worker=cls, config=config, facts=facts)

    def setup(self) -> None:
        """Import, build and connect; ends with residency OFF. Collectives among the group's ranks are allowed."""

    def move(self, to: Residency) -> MoveReport:
        """Bring this rank's state on or off its accelerators. Moving to the present residency is allowed and free.

        Called by `Loop._move` as `placement.schedule.schedule_of` decided.
        """
        return MoveReport(residency=to, accelerator_bytes=0, host_bytes=0)

    def begin_again(self, iteration: int) -> Metrics:
        """Drop what this rank has of an iteration that is done anew, because a worker of any group had to be replaced.

        Called on all ranks, new ones too, while none is at work and all channels are empty.
        """
        if self._weight_ends is not None:
            self._weight_ends.begin_again()
        return {}

    # ── weights that go to another component, or come from one ───────────────────────────────────────────────────────

    def weights(self) -> Mapping[str, Tensor]:
        """Return the tensors that are sent to, or filled from, another component, by name.

        To be overridden, unless `weights_of` was called. They are the tensors themselves, not copies, and the same
        names in source and target. A source of several ranks has the same values on all of them, or DTensors, as FSDP
        does. A target gets the whole on each rank, in the dtype of its own tensors; of a DTensor, its part.
        """
        if self._module_of_weights is None:
            from rlplace.workers.weights import undeclared

            raise undeclared(self)
        from rlplace.comm.weights.named import tensors_of

        return tensors_of(self._module_of_weights)

    def weights_of(self, module: nn.Module) -> None:
        """Have `weights` return the parameters and buffers of a module; to be called once, in `setup`."""
        self._module_of_weights = module

    def weights_loaded(self, version: int) -> None:
        """Do what is due once the tensors of `weights` have the values of `version`; by default nothing."""

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
        """Raise WeightSyncError where the job has the engine send or fill weights that the class does not name."""
        component = self.context.slot.component
        facts = self.context.facts
        kind = type(self)
        by_engine = facts is not None and (
            (facts.syncs_from(component) and kind.push_weights is Worker.push_weights)
            or (facts.syncs_to(component) and kind.pull_weights is Worker.pull_weights)
        )
        unnamed = kind.weights is Worker.weights and self._module_of_weights is None
        if by_engine and unnamed:
            from rlplace.workers.weights import undeclared

            raise undeclared(self)

    def onload(self) -> MoveReport:
        return self.move(Residency.FULL)

    def offload(self) -> MoveReport:
        return self.move(Residency.OFF)

    def close(self) -> None:
        """Release everything. Called once, also after a failure; must not block."""


class RoleWorker(Worker):
    """Base of the workers of a run. Owns whatever it opened, and closes it in the end, the last first."""

    config: WorkerArguments

    def __init__(self, config: WorkerArguments, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._opened = contextlib.ExitStack()
        self.residency = Residency.OFF

    def move(self, to: Residency) -> MoveReport:
        self.residency = to
        return super().move(to)

    def _require(self, needs: Residency, method: str) -> None:
        """Raise NotResident below `needs`."""
        if self.residency < needs:
            raise not_resident(
                self.context.owner, method, has=self.residency, needs=needs
            )

    def close(self) -> None:
        self._opened.close()


def not_resident(
    owner: str, method: str, *, has: Residency, needs: Residency
) -> NotResident:
    return NotResident.about(
        "not-resident",
        owner,
        f"{method} was called while the worker is {has.word}",
        why=f"{method} needs residency {needs.word}; the schedule moves a component there on entry to its stage",
        fix=f"group.move(Residency.{needs.name}).wait() before group.{method}(...)",
    )


def cancelled(owner: str, method: str) -> ChannelBroken:
    why = "a sibling failed, or the run is ending"
    return ChannelBroken.about(
        code="cancelled", key=owner, what=f"{method} was cancelled", why=why
    )


def out_of_step(owner: str, what: str, *, got: str, expected: str) -> ChannelMisuse:
    """Describe a message of another step, stage group or row than the one that was due."""
    why = f"due was {expected}; nothing may be left from before"
    return ChannelMisuse.about("out-of-step", owner, what, got=got, why=why)


def score_not_finite(component: str, score: Scores) -> RewardError:
    computes = "compute" if component == "critic" else "dtype"
    return RewardError.about(
        "score-not-finite",
        component,
        f"its score of sample {score.sample} of group {score.group} is not a finite number",
        got=str(score.values[:8].tolist()) + (" ..." if len(score.values) > 8 else ""),
        why="nothing can be learned from nan or infinity; its weights are damaged, or overflow in its dtype",
        fix=f"{component}.{computes}=fp32        (or another model)",
    )
