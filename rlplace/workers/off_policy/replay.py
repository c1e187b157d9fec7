"""Replay of the off-policy job: each rank keeps the last steps of its rows on its host, and draws samples of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlplace.metrics import Metric, Metrics
from rlplace.workers.off_policy.arguments import (
    BATCHES,
    PRIORITIES,
    TRANSITIONS,
    Arrivals,
    OffPolicyArguments,
)
from rlplace.workers.off_policy.pieces import rows_of, shared_rows
from rlplace.workers.worker import Worker

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlplace.algo.replay import ReplayMemory, Steps

_DRAWS = 2  # number of this module's random numbers among those of a run


class OffPolicyReplay(Worker):
    """Owns a replay memory. The thread that writes a checkpoint reads it; new steps wait until the files are whole."""

    imports: ClassVar[tuple[str, ...]] = ("rlplace.algo.replay",)
    uses_accelerators: ClassVar[bool] = False

    config: OffPolicyArguments

    def setup(self) -> None:
        import numpy as np

        from rlplace.algo.replay import ReplayMemory
        from rlplace.envs.contract import DiscreteActions
        from rlplace.workers.saving import FilesBehind

        given = self.config
        spaces = given.spaces
        blocks = given.blocks
        self._pieces = given.pieces
        self._rows = given.rows("replay", self.rank)
        # Which rows come from which rollout rank
        self._sources = []
        for rank in range(given.ranks["rollout"]):
            shared = shared_rows(given.rows("rollout", rank), self._rows)
            if shared:
                self._sources.append(shared)
        discrete = isinstance(spaces.actions, DiscreteActions)
        prioritised = blocks.replay.prioritised
        new_memory = functools.partial(
            ReplayMemory,
            observation_shape=spaces.observation_shape,
            observation_dtype=spaces.observation_dtype,
            action_shape=() if discrete else spaces.actions.shape,  # type: ignore[union-attr]
            action_dtype=np.int64 if discrete else np.float32,
        )
        self._memory = new_memory(
            slots=blocks.kept_steps // blocks.env.total_num_envs,
            rows=len(self._rows),
            exponent=blocks.replay.priority_exponent if prioritised else None,
            correction=blocks.replay.priority_correction,
        )
        # This rank's share of the demonstrations: a memory that never changes
        self._shown: ReplayMemory | None = None
        if blocks.replay.demonstrations is not None:
            from rlplace.envs.recorded import read_demonstrations

            steps = read_demonstrations(blocks.replay.demonstrations, spaces)
            count = len(steps.rewards)
            first = count * self.rank // self.world_size
            last = count * (self.rank + 1) // self.world_size
            self._shown = new_memory(slots=last - first, rows=1)
            self._shown.add(steps.between(first, last))
        self._behind = FilesBehind(self.context)
        self.context.opened.callback(self._behind.close)
        # The last checkpoint, and the slots that had been written then
        self._saved: tuple[Path, int] | None = None

    # ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def serve(self, iteration: int) -> Metrics:
        """Take the steps of each piece, and draw the samples of the updates that follow it. Return metrics."""
        # A checkpoint is written from the memory itself
        with self.timer("save"):
            self._behind.wait()
        pieces = self._pieces
        self._arrived = Arrivals()
        drawn: list[NDArray[Any]] = []
        for piece in range(pieces.count):
            self.context.check_cancelled("serve")
            if pieces.acts:
                with self.timer("wait"):
                    steps = self._taken(piece)
                self._memory.add(steps)
            if pieces.updates_after(iteration, piece):
                if drawn:
                    self._change_priorities(drawn)
                with self.timer("draw"):
                    drawn = self._draw(iteration, piece)
        if drawn:
            self._change_priorities(drawn)
        found = {"steps": Metric(len(self._memory), "sum")}
        size = self._memory.nbytes
        if self._shown is not None:
            size += self._shown.nbytes
            found["demonstrations"] = Metric(len(self._shown), "sum")
        return found | {"bytes": Metric(size, "sum")}

    def _taken(self, piece: int) -> Steps:
        """Wait for the steps of a piece from all rollout ranks, and return those of all rows of this rank."""
        from rlplace.algo.replay import Steps, joined

        wanted = [(piece, rows.start) for rows in self._sources]
        parts = self._arrived.take(self.channel(TRANSITIONS), self.rank, wanted)
        return joined([Steps(**arrays, begins=begins) for arrays, begins in parts])

    def _draw(self, iteration: int, piece: int) -> list[NDArray[Any]]:
        """Put the samples of all updates of a piece. Return the numbers of the steps for each actor rank, if needed."""
        import numpy as np

        given = self.config
        algorithm = given.blocks.algorithm
        number = self._pieces.number(iteration, piece)
        random = np.random.default_rng([given.seed, _DRAWS, number, self.rank])
        updates = self._pieces.updates
        each = given.batch_of_each
        numbers: list[NDArray[Any]] = []
        for actor in range(given.ranks["actor"]):
            drawn = (algorithm.n_step, algorithm.gamma)
            own = each
            parts = []
            if self._shown is not None:
                shown = int(given.blocks.demonstrated(each))
                own -= shown
                batch = _sampled(self._shown, updates, shown, random, *drawn)
                parts.append(batch)
            if own:
                batch = _sampled(self._memory, updates, own, random, *drawn)
                if "steps" in batch:
                    numbers.append(batch.pop("steps").ravel())
                parts.append(batch)
            split = {
                name: np.concatenate([part[name] for part in parts], axis=1)
                for name in parts[0]
            }
            item = ((piece, self.rank), split)
            self.channel(BATCHES).put(item, key=str(actor))
        return numbers

    def _change_priorities(self, numbers: list[NDArray[Any]]) -> None:
        """Wait for the errors of the samples that were drawn last, and set their priorities.

        `numbers`: the numbers of the steps of each actor rank's samples.
        """
        channel = self.channel(PRIORITIES)
        errors = dict(channel.get(key=str(self.rank)) for _ in numbers)
        for actor, steps in enumerate(numbers):
            self._memory.change_priorities(steps, errors[actor])

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _name(self) -> str:
        return _name_of(self.rank)

    def write_state(self, folder: str) -> Metrics:
        """Write the memory into `folder` in the background, a file for each segment of it."""
        into = Path(folder)
        before = self._saved
        self._behind.start(into, lambda: self._memory.write(into, self._name, before))
        # A checkpoint loses the ending of its folder once it is whole
        whole = into.parent.with_name(into.parent.name.removesuffix(".part"))
        self._saved = (whole / into.name, self._memory.written)
        return {}

    def read_state(self, folder: str) -> Metrics:
        """Load the memory from `folder`. Another number of ranks may have written it.

        Raise ConfigError if files are damaged or missing.
        """
        from rlplace.algo.replay import HEAD, SavedRows
        from rlplace.workers.saving import unreadable_state

        self._behind.wait()
        where = Path(folder)
        ranks = len(list(where.glob(f"memory_*_{HEAD}.npz")))
        total = self.config.blocks.env.total_num_envs
        parts = []
        for rank in range(ranks):
            rows = rows_of(rank, ranks, total)
            shared = shared_rows(rows, self._rows)
            if shared:
                own = slice(shared.start - rows.start, shared.stop - rows.start)
                name = _name_of(rank)
                parts.append(SavedRows(name=name, count=len(rows), rows=own))
        try:
            self._memory.read(where, parts)
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise unreadable_state(
                self.component, where / f"{self._name}_{HEAD}.npz", error
            ) from error
        # Files of other ranks have other rows
        self._saved = None
        if ranks == self.world_size:
            self._saved = (where, self._memory.written)
        return {}


def _name_of(rank: int) -> str:
    """Return how the names of a rank's files begin."""
    return f"memory_{rank:05}"


def _sampled(
    memory: ReplayMemory,
    updates: int,
    each: int,
    random: np.random.Generator,
    n_step: int,
    gamma: float,
) -> dict[str, NDArray[Any]]:
    """Return samples of several updates: name -> array [updates, samples of each, ...]."""
    batch = memory.sample(updates * each, random, n_step=n_step, gamma=gamma)
    return {
        name: array.reshape(updates, each, *array.shape[1:])
        for name, array in batch.items()
    }
