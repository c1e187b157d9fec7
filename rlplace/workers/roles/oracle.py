"""How an env rank gets the policy's decisions: from rollout ranks through channels, or by calls in its own process.

A call goes to the rollout rank in the same process.
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
    """The policy's decisions for B rows: actions, log-probabilities, values, policy version and new recurrent memory.

    `memory`: [B, size of a memory]; None if the policy has no memory. `ActionChunk` and `Decision` implement this
    protocol.
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
    """Gets the policy's decisions for an env rank: for one stage group and one step at a time."""

    @abc.abstractmethod
    def opened(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager. All calls of `ask` and `answer` for one iteration are made inside its `with`
        block.
        """

    @abc.abstractmethod
    def ask(self, group: StageGroup, step: int) -> None:
        """Request decisions on the current observations of all rows of `group`.

        `step`: number of the step in the iteration, from 0.
        """

    @abc.abstractmethod
    def answer(self, group: StageGroup, step: int, recording: Recording) -> None:
        """Wait for the decisions that `ask` has requested for `group` and `step`, and write them into `recording`."""


class ChannelOracle(Oracle):
    """Requests decisions from rollout ranks through channels.

    While the rollout ranks decide for one stage group, the env rank can simulate another stage group.
    """

    def __init__(self, context: WorkerContext, cuts: Mapping[int, slice]) -> None:
        """Prepare the requests; nothing is sent yet.

        `context`: context of the env rank. `cuts`: rollout rank -> the rows of a stage group on which this rollout rank
        decides.
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
        """Wait until all rollout ranks have decided on `group` and `step`, and write their decisions into `recording`.

        The decisions may arrive in any order.
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
    """Calls the policy of the rollout rank in the same process directly, in the thread of the env rank, without
    channels.
    """

    def __init__(self, context: WorkerContext, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._decide: Decide | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Return a context manager that borrows the rollout rank's policy for the duration of its `with` block.

        Raises ChannelBroken if the policy fails in the block; the rollout rank then raises the original error.
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
        """Do nothing: `answer` calls the policy itself."""

    def answer(self, group: StageGroup, step: int, recording: Recording) -> None:
        assert self._decide is not None, "opened comes first"
        try:
            decided = self._decide(step, group.first_row, group.observations)
        except BaseException as error:
            raise Lent from error
        recording.decision(step, group.columns, decided)


def _place(stage_group: int, step: int, *first_rows: int) -> str:
    return f"stage group {stage_group}, step {step}, rows from {' or '.join(map(str, sorted(first_rows))) or 'none'}"
