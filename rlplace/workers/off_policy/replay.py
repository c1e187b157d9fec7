"""Replay of the off-policy job: each rank keeps the last steps of its rows on its host, and draws samples of them."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlplace.codes import config_error
from rlplace.metrics import Metric, Metrics
from rlplace.workers.off_policy.arguments import (
    BATCHES,
    PRIORITIES,
    TRANSITIONS,
    OffPolicyArguments,
)
from rlplace.workers.off_policy.pieces import shared_rows
from rlplace.workers.worker import Worker

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlplace.algo.replay import ReplayMemory, Steps

_DRAWS = 2  # number of this module's random numbers among those of a run
_HEAD = "head"


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
            slots=blocks.replay.capacity // blocks.env.total_num_envs,
            rows=len(self._rows),
            exponent=blocks.replay.priority_exponent if prioritised else None,
            correction=blocks.replay.priority_correction,
        )
        # This rank's share of the demonstrations: a memory that never changes
        self._shown: ReplayMemory | None = None
        if blocks.replay.demonstrations is not None:
            from rlplace.workers.off_policy.demonstrations import read_demonstrations

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
        self._early: dict[tuple[int, int], Any] = {}
        drawn: list[NDArray[Any]] = []
        for piece in range(pieces.count):
            self.context.check_cancelled("serve")
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
        size = self._memory.nbytes
        if self._shown is not None:
            size += self._shown.nbytes
        return {
            "steps": Metric(len(self._memory), "sum"),
            "bytes": Metric(size, "sum"),
        }

    def _taken(self, piece: int) -> Steps:
        """Wait for the steps of a piece from all rollout ranks, and return those of all rows of this rank."""
        import numpy as np

        from rlplace.algo.replay import Steps

        channel = self.channel(TRANSITIONS)
        wanted = [(piece, rows.start) for rows in self._sources]
        # Another rank may be a piece ahead
        while not all(key in self._early for key in wanted):
            number, first, arrays, begins = channel.get(key=str(self.rank))
            self._early[number, first] = (arrays, begins)
        parts = [self._early.pop(key) for key in wanted]
        if len(parts) == 1:
            arrays, begins = parts[0]
            return Steps(**arrays, begins=begins)
        joined = {
            name: np.concatenate([arrays[name] for arrays, _ in parts], axis=1)
            for name in parts[0][0]
        }
        return Steps(**joined, begins=np.concatenate([begins for _, begins in parts]))

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
                shown = int(given.blocks.replay.demonstrated(each))
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
            self.channel(BATCHES).put((piece, self.rank, split), key=str(actor))
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

    def _file(self, part: object) -> str:
        return f"memory_{self.rank:05}_{part}.npz"

    def write_state(self, folder: str) -> Metrics:
        """Write the memory into `folder` in the background, a file for each segment of it.

        A segment without new steps becomes a second name of its file in the checkpoint before.
        """
        into = Path(folder)
        before = self._saved
        memory = self._memory

        def write() -> list[str]:
            names = []
            for segment in memory.segments():
                name = self._file(segment.start)
                names.append(name)
                same = before and not memory.changed_since(segment, before[1])
                if not (before and same and _linked(before[0] / name, into / name)):
                    memory.write_segment(segment, into / name)
            memory.write_head(into / self._file(_HEAD))
            return [*names, self._file(_HEAD)]

        self._behind.start(into, write)
        # A checkpoint loses the ending of its folder once it is whole
        whole = into.parent.with_name(into.parent.name.removesuffix(".part"))
        self._saved = (whole / into.name, memory.written)
        return {}

    def read_state(self, folder: str) -> Metrics:
        """Load the memory from `folder`.

        Raise ConfigError if another number of ranks wrote it, or if files are damaged.
        """
        from rlplace.workers.saving import unreadable_state

        self._behind.wait()
        where = Path(folder)
        heads = sorted(where.glob(f"memory_*_{_HEAD}.npz"))
        if len(heads) != self.world_size:
            raise config_error(
                "other-ranks",
                "resume",
                f"{self.world_size} ranks",
                component=self.component,
                saved=len(heads),
                world_size=self.world_size,
                kind=type(self).__name__,
            )
        segments = {}
        for file in where.glob(f"memory_{self.rank:05}_*.npz"):
            part = file.stem.rpartition("_")[2]
            if part != _HEAD:
                segments[int(part)] = file
        head = where / self._file(_HEAD)
        try:
            self._memory.read(head, segments)
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise unreadable_state(self.component, head, error) from error
        self._saved = (where, self._memory.written)
        return {}


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


def _linked(file: Path, name: Path) -> bool:
    """Give a file a second name; return whether that was possible."""
    try:
        os.link(file, name)
    except OSError:
        return False
    return True
