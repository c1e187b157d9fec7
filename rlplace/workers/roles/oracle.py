"""How an env rank gets actions: from rollout ranks through channels, or from the rollout rank in its own process by a
call.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from rlplace.trajectory import ActionChunk, Observation
from rlplace.workers.arguments import ACTIONS, OBSERVATIONS
from rlplace.workers.lending import Lent
from rlplace.workers.worker import WorkerContext, cancelled, out_of_step

if TYPE_CHECKING:
    from rlplace.workers.roles.env import Recording, StageGroup


class Decided(Protocol):
    """The policy's decisions for B rows: actions, log-probabilities, values, policy version and recurrent memory.

    `ActionChunk` and `Decision` implement this protocol.
    """

    @property
    def actions(self) -> NDArray[Any]: ...

    @property
    def logprobs(self) -> NDArray[Any]: ...

    @property
    def values(self) -> NDArray[Any]: ...

    @property
    def version(self) -> int: ...

    @property
    def memory(self) -> NDArray[Any] | None: ...


# (step, first global row, observations [B, *O]) -> decision
Decide = Callable[[int, int, NDArray[Any]], Decided]


class Oracle(abc.ABC):
    """Gets the policy's decisions on the observations of a stage group, one step at a time."""

    @abc.abstractmethod
    def opened(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager inside which all steps of one iteration are made."""

    @abc.abstractmethod
    def ask(self, group: StageGroup, step: int) -> None:
        """Request actions for the current observations of all rows of the group.

        `step`: number of the step in the iteration.
        """

    @abc.abstractmethod
    def answer(self, group: StageGroup, step: int, recording: Recording) -> None:
        """Wait for the decisions that `ask` requested for this group and step, and write them into `recording`."""


class ChannelOracle(Oracle):
    """Requests decisions from rollout ranks through channels.

    The rollout ranks decide for one stage group while the env rank simulates another.
    """

    def __init__(self, context: WorkerContext, cuts: Mapping[int, slice]) -> None:
        """`cuts`: for each rollout rank, the rows of a stage group on which that rank decides. `context`: of the env
        rank.
        """
        self._context = context
        self._cuts = cuts

    def opened(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def ask(self, group: StageGroup, step: int) -> None:
        for rank, rows in self._cuts.items():
            observation = Observation(
                env_rank=self._context.rank,
                stage_group=group.index,
                step=step,
                first_row=group.first_row + rows.start,
                observations=group.observations[rows],
            )
            self._context.channels[OBSERVATIONS].put(
                observation, key=str(rank), weight=observation.weight
            )

    def answer(self, group: StageGroup, step: int, recording: Recording) -> None:
        """Wait for the decisions of all rollout ranks on this group and step, in any order, and write them into
        `recording`.
        """
        due = {
            group.first_row + rows.start: rows.stop - rows.start
            for rows in self._cuts.values()
        }
        while due:
            chunk: ActionChunk = self._context.channels[ACTIONS].get(
                key=f"{self._context.rank}/{group.index}"
            )
            rows = due.pop(chunk.first_row, None)
            if (
                rows != len(chunk.actions)
                or chunk.step != step
                or chunk.stage_group != group.index
            ):
                raise out_of_step(
                    self._context.owner,
                    "answer",
                    got=_place(chunk.stage_group, chunk.step, chunk.first_row),
                    expected=_place(
                        group.index,
                        step,
                        *due,
                        *([] if rows is None else [chunk.first_row]),
                    ),
                )
            start = group.columns.start + chunk.first_row - group.first_row
            recording.decision(step, slice(start, start + len(chunk.actions)), chunk)


class DirectOracle(Oracle):
    """Calls the policy of the rollout rank in the same process, without channels, in the thread of the env rank."""

    def __init__(self, context: WorkerContext, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._decide: Decide | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Borrow the rollout rank's policy for the duration of the `with` block.

        Raises ChannelBroken if the policy failed; the rollout rank then raises the original error.
        """
        context = self._context
        lending = context.lending
        process = context.slot.process
        borrowed = lending.borrow(
            process,
            owner=context.owner,
            timeout_s=self._timeout_s,
            check=lambda: context.check_cancelled("run"),
        )
        try:
            with borrowed as self._decide:
                yield
        except Lent as lent:
            raise cancelled(context.owner, "run") from lent.__cause__
        finally:
            self._decide = None

    def ask(self, group: StageGroup, step: int) -> None:
        """Do nothing, because `answer` calls the policy."""

    def answer(self, group: StageGroup, step: int, recording: Recording) -> None:
        assert self._decide is not None, "opened comes first"
        try:
            decided = self._decide(step, group.first_row, group.observations)
        except BaseException as error:
            raise Lent from error
        recording.decision(step, group.columns, decided)


def _place(stage_group: int, step: int, *first_rows: int) -> str:
    return f"stage group {stage_group}, step {step}, rows from {' or '.join(map(str, sorted(first_rows))) or 'none'}"
