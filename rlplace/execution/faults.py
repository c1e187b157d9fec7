"""Faults of a run: which workers can be replaced, how often, and what was lost. Also the faults of `summary.json`.

::

    a call fails, or is late ──▶ all groups cancel calls ──▶ lost ranks restart on their slots, channels are emptied
        ├─ no state is lost ──▶ every rank drops its part of the iteration, which starts again at sync
        └─ a training rank was lost, or weights may have changed ──▶ all load the newest checkpoint ──▶ sync

Without a checkpoint, all ranks that would load from it restart, and the run starts from the beginning.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

from rlplace.config.blocks.engine import FaultsConfig
from rlplace.errors import (
    AcceleratorOutOfMemory,
    ChannelError,
    ClusterError,
    DivergedError,
    NotSent,
    ProblemsError,
    WorkerError,
    WorkerTimeout,
)
from rlplace.placement.language.slots import Slot, owner_of
from rlplace.units import counted, plural
from rlplace.workers.launch.cluster import Cluster, Lost
from rlplace.workers.launch.group import (
    GIVE_UP_S,
    WorkerGroup,
    first_failure_s,
    gave_up,
)

_HOUR_S = 3600.0
# failures at one place after which its ranks move; all but the first happen while ranks restart there
_TRIES = 3
# Errors that another try would only repeat: wrong or too large settings, a policy that has diverged, values that
# cannot be sent.
_FINAL = (ProblemsError, AcceleratorOutOfMemory, DivergedError, NotSent)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A failure of workers from which the run has recovered.

    `at_s`: seconds from the time when the workers were ready to the fault. `iteration`: counted from 0. `what`: the
    failed rank and method, or the method that was late. `why`: the first line of the error. `replaced`: names of the
    restarted ranks. `moved`: texts about restarted ranks that have moved to other accelerators. `redone_s`: seconds of
    lost work, in this iteration and in iterations since the checkpoint. `recovery_s`: seconds until the run could
    continue. `went_back`: whether the run has returned to its newest checkpoint, or to its start.
    """

    at_s: float
    iteration: int
    stage: str
    what: str
    why: str
    replaced: tuple[str, ...]
    moved: tuple[str, ...] = ()
    redone_s: float
    recovery_s: float
    went_back: bool = False

    def __str__(self) -> str:
        again = f"restarted {', '.join(self.replaced)}; " if self.replaced else ""
        again += f"moved {', '.join(self.moved)}; " if self.moved else ""
        seconds = f"recovery took {self.recovery_s:.1f} s, {self.redone_s:.1f} s of work are done again"
        # Iterations are shown from 1, as in the table of a run.
        shown = self.iteration + 1
        return f"fault in {self.stage} of iteration {shown}: {self.what}: {self.why}; {again}{seconds}"


class StateLost(Exception):
    """Raised if a training component has lost its state, so that the run has to load its newest checkpoint.

    The lost workers have been replaced before this error is raised.
    """


class History:
    """The faults of a run, and the time since the run's workers were ready for the first time.

    The loss of a node ends all workers of a run, and new workers continue. They use the same History.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        # Monotonic times of the recoveries within the last hour.
        self.recent: deque[float] = deque()
        # Monotonic time when the workers were ready for the first time.
        self.ready_s: float | None = None
        # Seconds of the iterations that an earlier command had done by then.
        self.trained_s = 0.0
        # Faults that ended all workers and are not recovered yet. Their `redone_s` counts all training time before the
        # fault.
        self._lost: list[Fault] = []

    @property
    def since_ready_s(self) -> float:
        if self.ready_s is None:
            return 0.0
        return time.monotonic() - self.ready_s

    def admits(self, most: int) -> bool:
        """Return whether one more recovery is allowed. If it is, count this recovery.

        `most`: number of recoveries that are allowed within an hour.
        """
        now = time.monotonic()
        while self.recent and now - self.recent[0] > _HOUR_S:
            self.recent.popleft()
        if len(self.recent) < most:
            self.recent.append(now)
            return True
        return False

    def lose(self, fault: Fault) -> None:
        """Record a fault that has ended all workers.

        `fault`: its `redone_s` has to be the whole training time before the fault, in seconds.
        """
        self._lost.append(fault)

    def ready(self, trained_s: float) -> list[Fault]:
        """Note that all workers are ready. Return the faults that were noted by `lose` since the last call.

        In the returned faults, the seconds of lost work and of recovery are filled in. The first call starts the clock.
        `trained_s`: training seconds up to the checkpoint that the workers have loaded.
        """
        if self.ready_s is None:
            self.ready_s = time.monotonic()
            self.trained_s = trained_s
        outlasted = [
            dataclasses.replace(fault, redone_s=max(0.0, fault.redone_s - trained_s))
            for fault in _outlasted(self._lost, self.since_ready_s)
        ]
        self.faults.extend(outlasted)
        self._lost = []
        return outlasted


class Attempt:
    """Context manager around one attempt at work that may fail because a worker is lost.

    If the run recovers from a failure, the `with` block ends without an error, and `fault` is the fault. If it cannot
    recover, the error is raised. Without a failure, `fault` is None.
    """

    def __init__(
        self,
        recover: Callable[
            [Sequence[Fault], WorkerError | WorkerTimeout, float], Fault | None
        ],
        earlier: Sequence[Fault],
    ) -> None:
        """Prepare the attempt.

        `recover`: a function that is called after a failure with `earlier`, the error and the lost seconds. It returns
        the fault, or None to have the error raised. `earlier`: faults of earlier attempts at this work.
        """
        self.fault: Fault | None = None
        self.metrics = fault_metrics(earlier)
        self._recover = recover
        self._earlier = tuple(earlier)
        self._began_s = time.perf_counter()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, WorkerError | WorkerTimeout):
            return False
        lost_s = time.perf_counter() - self._began_s
        self.fault = self._recover(self._earlier, error, lost_s)
        return self.fault is not None


class Recovery:
    """Replaces lost workers after a failure, and adds each fault to the history.

    If new workers would fail in the same way, the error is raised. The constructor sets the worker groups to survive
    failures. All methods have to be called in the thread of the loop.
    """

    def __init__(
        self,
        cluster: Cluster,
        groups: Mapping[str, WorkerGroup],
        config: FaultsConfig,
        history: History,
        *,
        tell: Callable[[str], None],
        patience_s: float,
        replaceable: Collection[str],
        kept: Collection[str] = (),
        joined: Collection[str] = (),
        without_state: Callable[[Collection[str]], Collection[str]] = lambda lost: (),
    ) -> None:
        """Set the worker groups to survive failures.

        `tell`: a function that is called with a line of text for each fault. `patience_s`: after a failure, seconds
        until running calls of training components have to end. `replaceable`: components with ranks that can restart
        without loading state. `kept`: components out of `replaceable` that restart only if the run returns to a
        checkpoint. `joined`: components out of `replaceable` with ranks that all restart together. `without_state`:
        takes the components with lost ranks, and returns the components that have no state in a checkpoint.
        """
        assert history.ready_s is not None, "it counts from there on"
        self.faults = history.faults
        self._history = history
        self._began = history.ready_s
        self._cluster = cluster
        self._groups = groups
        self._most = config.restarts
        self._tell = tell
        self._replaced = set(replaceable) - set(kept)
        self._joined = set(joined)
        self._without_state = without_state
        # The last of `faults`, for which the run is returning to a checkpoint now.
        self._going_back = list[Fault]()
        # Training ranks have restarted and have not loaded their state yet.
        self.state_lost = False
        # Iteration and place of the last fault, to detect that it repeats. Error texts are left out, since they may
        # differ.
        self._before: tuple[int, str] | None = None
        for name, group in groups.items():
            if name in replaceable:
                group.outlast = "give up"
                group.grace_s = GIVE_UP_S
            else:
                group.outlast = "end the call"
                group.in_vain = self._in_vain
                group.patience_s = patience_s

    def _in_vain(self) -> bool:
        return any(
            group.lost()
            for name, group in self._groups.items()
            if name not in self._replaced
        )

    def recover(
        self,
        error: WorkerError | WorkerTimeout,
        *,
        iteration: int,
        stage: str,
        redone_s: float,
        make_room: Callable[[Lost], None] = lambda lost: None,
        back: bool = False,
    ) -> Fault:
        """Replace the workers that were lost when `error` was raised, and return the fault.

        Raises `error` if the run cannot recover. `iteration`, `stage`: where the error happened. `redone_s`: seconds of
        work that has to be done again. `make_room`: called with the ranks that restart; has to offload the other
        components from the accelerators of these ranks. `back`: True if the run has to return to its newest checkpoint
        even if no state was lost. If `went_back` of the returned fault is set, the caller has to load the checkpoint
        and then call the method `went_back`.
        """
        began = first_failure_s(self._groups.values())
        came = time.monotonic()
        late = isinstance(error, WorkerTimeout)
        for group in self._groups.values():
            # A late call does not end by itself.
            if late and group.at_work:
                group.cancel("a worker is late", patience_s=0.0)
        lost, moved, back = self._restart(error, iteration, back, make_room)
        replaced = tuple(owner_of(name, rank) for name, rank in sorted(lost))
        if isinstance(error, WorkerTimeout):
            what, why = error.problem.key, error.problem.what
        else:
            what, why = (
                f"{owner_of(error.component, error.rank)} in {error.method}",
                error.what,
            )
        if lost and (late or gave_up(error)):
            what, why = f"{', '.join(replaced)} stood still", f"{what}: {why}"
        fault = Fault(
            at_s=began - self._began,
            iteration=iteration,
            stage=stage,
            what=what,
            why=why.partition("\n")[0],
            replaced=replaced,
            moved=tuple(f"{slot.owner} to {_accelerators(slot)}" for slot in moved),
            redone_s=max(0.0, redone_s - (came - began)),
            recovery_s=time.monotonic() - began,
            went_back=back,
        )
        self.faults.append(fault)
        if back:
            self._going_back.append(fault)
        else:
            self._tell(str(fault))
        return fault

    def lose_state(self, error: WorkerError | WorkerTimeout, iteration: int) -> None:
        """Record that state was lost with a worker, which `error` names and which was replaced already.

        The run has to return to a checkpoint: the caller then has to call `went_back`. `iteration`: index of the
        iteration that would come next.
        """
        what, _, why = str(error).partition("\n")[0].partition(": ")
        fault = Fault(
            at_s=time.monotonic() - self._began,
            iteration=iteration,
            stage="change",
            what=what,
            why=why,
            replaced=(),
            redone_s=0.0,
            recovery_s=0.0,
            went_back=True,
        )
        self.faults.append(fault)
        self._going_back.append(fault)

    def went_back(self, redone_s: float) -> list[Fault]:
        """Complete and return the faults that made the run return to a checkpoint.

        Call this method when all ranks have loaded the checkpoint. `redone_s`: seconds of the iterations since the
        checkpoint; they are added to the first of the returned faults.
        """
        whole = _outlasted(self._going_back, time.monotonic() - self._began)
        whole[0] = dataclasses.replace(whole[0], redone_s=whole[0].redone_s + redone_s)
        self.faults[-len(whole) :] = whole
        self._going_back = []
        self.state_lost = False
        for fault in whole:
            self._tell(str(fault))
        return whole

    def _restart(
        self,
        error: WorkerError | WorkerTimeout,
        iteration: int,
        back: bool,
        make_room: Callable[[Lost], None],
    ) -> tuple[set[tuple[str, int]], list[Slot], bool]:
        """Restart lost ranks. Ranks that are lost during the restart are restarted as well.

        Return the restarted ranks as (component, rank), the new slots of moved ranks, and whether the run has to return
        to a checkpoint. After _TRIES failures on the same accelerators, the ranks there move to other accelerators.
        `error`: the failure that began the recovery. `back`: True if the run has to return to a checkpoint even if no
        state was lost. `make_room`: called with the ranks that restart; has to offload other components from their
        accelerators. Raises the last error if no further try is allowed, or if there are no other accelerators.
        """
        found = set[tuple[str, int]]()
        moved = dict[str, Slot]()
        failures = Counter[str]()
        # Ranks that were started but not set up, because other components could not make room.
        waiting: Lost = {}

        def room(lost: Lost) -> None:
            nonlocal waiting
            make_room(lost)
            waiting = {}

        while True:
            # Wait until no call is running, then check that another try is allowed.
            for group in self._groups.values():
                # Calls of this group may have started before the failure of another rank was known.
                if group.at_work:
                    group.cancel(str(error).partition("\n")[0])
                group.wait_wound_down()
            self._cluster.check(idle=True)
            if self._cluster.lost_nodes():
                raise error
            self._check(error, iteration, failures)
            failures[_place(error)] += 1
            # After _TRIES failures at one place, move its ranks.
            if failures[_place(error)] == _TRIES:
                moved |= self._move(error)
            gone = {
                name: {*group.lost(), *waiting.get(name, ())}
                for name, group in self._groups.items()
            }
            for slot in moved.values():
                # A moved rank that is not on its new slot yet counts as lost.
                if self._groups[slot.component].slots[slot.rank] != slot:
                    gone[slot.component].add(slot.rank)
            lost = self._cluster.with_peers(gone)
            # If a rank with state is lost, restart every component that no checkpoint can restore.
            if back := back or not lost.keys() <= self._replaced:
                self.state_lost = True
                # Ranks lost in an earlier round count as well.
                writers = {
                    *lost,
                    *(name for name, _ in found),
                }
                anew = {
                    *self._without_state(writers),
                    *(self._joined if self._joined & lost.keys() else ()),
                }
                whole = {name: range(self._groups[name].world_size) for name in anew}
                lost = self._cluster.with_peers({**lost, **whole})
            found |= {(name, rank) for name, ranks in lost.items() for rank in ranks}
            waiting = lost
            # Restart. If that fails too, the loop handles the new error.
            try:
                self._cluster.restart(lost, room)
                return found, [*moved.values()], back
            except (WorkerError, WorkerTimeout) as another:
                error = another
            except (ChannelError, ClusterError) as refusal:
                raise noted(
                    error, f"its workers could not be replaced: {refusal}"
                ) from refusal

    def _move(self, error: WorkerError | WorkerTimeout) -> dict[str, Slot]:
        """Assign other accelerators to the ranks on the accelerators at which `error` happened.

        Return name of each moved rank -> its new slot. Raises `error` if there are no other accelerators.
        """
        if isinstance(error, WorkerTimeout):
            raise noted(error, f"{_TRIES} times now")
        slots = self._cluster.move(error.component, error.rank)
        if not slots:
            raise noted(
                error,
                f"{_TRIES} times there, and there is no other accelerator to move to",
            )
        # On other accelerators the same try may succeed.
        self._before = None
        return {slot.owner: slot for slot in slots}

    def _check(
        self,
        error: WorkerError | WorkerTimeout,
        iteration: int,
        failures: Collection[str],
    ) -> None:
        """Raise `error` if a further try would fail in the same way, or if there were too many restarts in an hour.

        `failures`: the places (see `_place`) of earlier failures in this recovery; empty for its first failure.
        """
        cause = error.cause if isinstance(error, WorkerError) else error
        # Non-finite numbers are handled by faults.on_poison.
        if isinstance(cause, _FINAL) or getattr(cause, "code", "").endswith(
            "-not-finite"
        ):
            raise error
        if not failures:
            before = self._before
            self._before = None
            if cause is not None:
                where = (
                    f"{error.component}.{error.method}"
                    if isinstance(error, WorkerError)
                    else error.problem.key
                )
                self._before = (
                    iteration,
                    f"{type(cause).__name__} {getattr(cause, 'code', '')} in {where}",
                )
                if before == self._before:
                    raise noted(
                        error,
                        f"the same again after iteration {iteration + 1} was begun anew",
                    ) from cause
        if _place(error) not in failures and not self._history.admits(self._most):
            many = counted(self._most, "restart")
            raise noted(
                error, f"after {many} within an hour; faults.restarts: {self._most}"
            ) from cause


def _outlasted(faults: Sequence[Fault], now_s: float) -> list[Fault]:
    """Return copies of the faults in which `recovery_s` is the time from each fault to the next fault.

    For the last fault, `recovery_s` is the time to `now_s`, in seconds since the workers were ready.
    """
    ends = [*(fault.at_s for fault in faults[1:]), now_s]
    return [
        dataclasses.replace(f, recovery_s=end - f.at_s)
        for f, end in zip(faults, ends, strict=False)
    ]


def _place(error: WorkerError | WorkerTimeout) -> str:
    """Return a text for the place at which an error happened.

    The text names the accelerators of the failed rank, or the rank if it has no accelerators. For a timeout, the text
    names the call that was late.
    """
    if isinstance(error, WorkerTimeout):
        return error.problem.key
    if error.accelerators:
        return str(error.accelerators)
    return owner_of(error.component, error.rank)


def _accelerators(slot: Slot) -> str:
    return f"{plural(len(slot.accelerators), 'accelerator')} {','.join(map(str, slot.accelerators))}"


def noted(error: WorkerError | WorkerTimeout, note: str) -> WorkerError | WorkerTimeout:
    """Return a copy of the error with `note` as the last line of its text."""
    if isinstance(error, WorkerError):
        return dataclasses.replace(error, what=f"{error.what}\n  {note}")
    problem = error.problem
    return WorkerTimeout(
        dataclasses.replace(problem, why="\n".join(filter(None, [problem.why, note])))
    )


def fault_metrics(faults: Sequence[Fault]) -> dict[str, float]:
    """Return metrics of the faults: how many, seconds of recovery, seconds of repeated work. Empty without faults."""
    if not faults:
        return {}
    return {
        "faults/restarts": float(len(faults)),
        "faults/recovery_s": sum(fault.recovery_s for fault in faults),
        "faults/redone_s": sum(fault.redone_s for fault in faults),
    }


def faults_of(history: History, *, train_s: float) -> dict[str, Any]:
    """Return the block `faults` of summary.json for the faults of a run.

    `train_s`: seconds of all iterations of the run. Attempts that failed and were repeated are not included.
    """
    faults = history.faults
    # Iterations are counted from 1, as in metrics.jsonl.
    events = [
        dataclasses.asdict(fault) | {"iteration": fault.iteration + 1}
        for fault in faults
    ]
    ready_s = history.since_ready_s
    return {
        "events": events,
        "recovery_s": sum(fault.recovery_s for fault in faults),
        "redone_s": sum(fault.redone_s for fault in faults),
        "effective_share": (train_s - history.trained_s) / ready_s if ready_s else 0.0,
    }
