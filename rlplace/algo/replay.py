"""A replay memory: a ring of the last steps of each environment, with n-step samples, in NumPy arrays.

::

    slot      0      1      2    ...   slots - 1
    row 0   step   step   step          step        a row is an environment: neighbouring slots are its
    row 1   step   step   step          step        neighbouring steps, unless an episode ends between them
               ▲ the next step overwrites the oldest one

Letters: T steps, R rows, N samples, O observation shape, A action shape.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rlplace.algo.priorities import Priorities

Array = NDArray[Any]
# Slots of a file of a saved memory
SEGMENT_SLOTS = 1 << 14
# Last part of the name of the file without steps
HEAD = "head"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """T neighbouring steps of R environments.

    `observations`, `next_observations`: [T, R, *O]; after the end of an episode, `next_observations` has its last
    observation, and the next step's `observations` the first of the next episode. `actions`: [T, R, *A]. `rewards`,
    `terminated`, `truncated`: [T, R]. `begins`: [R], whether the first step starts a new sequence: it does not
    follow the last step that was added before, and that step ended no episode.
    """

    observations: Array
    actions: Array
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    next_observations: Array
    begins: NDArray[np.bool_]

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays of each step, by name: all but `begins`."""
        return {
            "observations": self.observations,
            "actions": self.actions,
            "rewards": self.rewards,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "next_observations": self.next_observations,
        }

    def between(self, first: int, last: int) -> Steps:
        """Return the steps from number `first` up to, but without, `last`."""
        arrays = {name: array[first:last] for name, array in self.arrays.items()}
        return Steps(**arrays, begins=self.begins)

    def of_rows(self, rows: slice) -> Steps:
        """Return the steps of some of the rows."""
        arrays = {name: array[:, rows] for name, array in self.arrays.items()}
        return Steps(**arrays, begins=self.begins[rows])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedRows:
    """Some of the rows of a saved memory. `name`: of its files. `count`: its rows. `rows`: those that are meant."""

    name: str
    count: int
    rows: slice


def joined(parts: Sequence[Steps]) -> Steps:
    """Return the rows of several parts of equally many steps, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    arrays = {
        name: np.concatenate([part.arrays[name] for part in parts], axis=1)
        for name in parts[0].arrays
    }
    return Steps(**arrays, begins=np.concatenate([part.begins for part in parts]))


Batch = dict[str, Array]


class ReplayMemory:
    """The last `slots` steps of each of `rows` environments. Owns the arrays, which have their full size at once.

    `exponent`: alpha of prioritised sampling; None: samples are uniform. `correction`: beta, the power of the weights
    that correct for it.
    """

    def __init__(
        self,
        *,
        slots: int,
        rows: int,
        observation_shape: tuple[int, ...],
        observation_dtype: DTypeLike,
        action_shape: tuple[int, ...],
        action_dtype: DTypeLike,
        exponent: float | None = None,
        correction: float = 0.4,
    ) -> None:
        self.slots = slots
        self.rows = rows
        shape = (slots, rows)
        seen = (*shape, *observation_shape)
        self._arrays: dict[str, Array] = {
            "observations": np.zeros(seen, observation_dtype),
            "actions": np.zeros((*shape, *action_shape), action_dtype),
            "rewards": np.zeros(shape, np.float32),
            "terminated": np.zeros(shape, np.bool_),
            "truncated": np.zeros(shape, np.bool_),
            "next_observations": np.zeros(seen, observation_dtype),
        }
        # Number of slots that were ever written; slot i of the job lies in slot i % slots of the ring
        self.written = 0
        self._correction = correction
        self._priorities: Priorities | None = None
        if exponent is not None:
            self._priorities = Priorities(slots * rows, exponent)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        size = sum(array.nbytes for array in self._arrays.values())
        if self._priorities is not None:
            size += self._priorities.nbytes
        return size

    def __len__(self) -> int:
        """Number of steps in the memory."""
        return min(self.written, self.slots) * self.rows

    def add(self, steps: Steps) -> None:
        """Add steps of all rows. If the memory is full, the new steps overwrite the oldest steps."""
        # A row that begins anew does not go on from its last step
        if self.written:
            last = (self.written - 1) % self.slots
            cut = steps.begins & ~self._arrays["terminated"][last]
            self._arrays["truncated"][last] |= cut
        count = len(steps.rewards)
        # Of more steps than the memory has slots, only the last ones stay
        kept = slice(max(0, count - self.slots), count)
        places = (self.written + np.arange(count)[kept]) % self.slots
        for name, array in steps.arrays.items():
            self._arrays[name][places] = array[kept]
        self.written += count
        if self._priorities is not None:
            new = places[:, None] * self.rows + np.arange(self.rows)
            self._priorities.add(np.sort(new.ravel()))

    def sample(
        self, count: int, random: np.random.Generator, *, n_step: int, gamma: float
    ) -> Batch:
        """Return `count` samples of n steps each, drawn with replacement: name -> array with N as first axis.

        `observations`, `actions`: of the first step. `rewards`: the discounted sum of up to n rewards, to the end of
        the episode or of the memory at most. `next_observations`: after these steps. `discounts`: gamma to the power
        of their number; 0 if the last of these steps terminated the episode. If the episode was truncated, the
        discount is not 0, because the value of the last observation counts. A prioritised memory adds `steps`, the
        numbers that `change_priorities` takes, and `weights`. They are comparable with those of other memories of as
        many steps; to be at most 1, they have to be divided by the greatest one of a batch.
        """
        oldest = max(0, self.written - self.slots)
        found: Batch = {}
        if self._priorities is None:
            slots = random.integers(oldest, self.written, count)
            rows = random.integers(0, self.rows, count)
        else:
            steps, chances = self._priorities.draw(count, random)
            # They come in the order of the memory, and are dealt to several updates
            dealt = random.permutation(count)
            steps = steps[dealt]
            chances = chances[dealt]
            places, rows = np.divmod(steps, self.rows)
            # From the place in the ring to the number of the slot
            slots = oldest + (places - oldest) % self.slots
            weights = (len(self) * chances) ** -self._correction
            found["weights"] = weights.astype(np.float32)
            found["steps"] = steps
        return found | self._n_steps(slots, rows, n_step, gamma)

    def _n_steps(
        self, slots: NDArray[np.int64], rows: NDArray[np.int64], n: int, gamma: float
    ) -> Batch:
        arrays = self._arrays
        count = len(slots)
        rewards = np.zeros(count, np.float32)
        discounts = np.ones(count, np.float32)
        last = slots
        going_on = np.ones(count, np.bool_)
        for step in range(n):
            at = slots + step
            # A sample ends with its episode, or with the newest step
            going_on = going_on & (at < self.written)
            place = at % self.slots
            rewards += going_on * discounts * arrays["rewards"][place, rows]
            discounts = np.where(going_on, discounts * np.float32(gamma), discounts)
            last = np.where(going_on, at, last)
            ended = arrays["terminated"][place, rows] | arrays["truncated"][place, rows]
            going_on = going_on & ~ended
        first = slots % self.slots
        end = last % self.slots
        terminated = arrays["terminated"][end, rows]
        return {
            "observations": arrays["observations"][first, rows],
            "actions": arrays["actions"][first, rows],
            "rewards": rewards,
            "discounts": np.where(terminated, np.float32(0), discounts),
            "next_observations": arrays["next_observations"][end, rows],
        }

    def change_priorities(self, steps: NDArray[np.int64], errors: Array) -> None:
        """Set the priorities of sampled steps by the errors of their values. Of equal steps, the last one counts."""
        assert self._priorities is not None, "samples are uniform"
        order = np.unique(steps[::-1], return_index=True)
        last = len(steps) - 1 - order[1]
        self._priorities.change(steps[last], errors[last])

    # ── on disk ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def segments(self) -> Iterator[range]:
        """Yield the ranges of slots of the ring that a saved memory has in one file each; empty slots have none."""
        filled = min(self.written, self.slots)
        for first in range(0, filled, SEGMENT_SLOTS):
            yield range(first, min(first + SEGMENT_SLOTS, filled))

    def changed_since(self, segment: range, written: int) -> bool:
        """Return whether a slot of `segment` may have changed since the number of written slots was `written`.

        The last slot of that time counts as changed, because the next `add` may mark it as the end of a sequence.
        """
        if self.written - written >= self.slots or not written:
            return True
        changed = {slot % self.slots for slot in range(written - 1, self.written)}
        return any(slot in changed for slot in segment)

    def write(
        self, folder: Path, name: str, before: tuple[Path, int] | None = None
    ) -> list[str]:
        """Write the memory into `folder`, flushed to disk: a file for each segment, and one for all else. Return their
        names, which begin with `name`. Raises OSError.

        A segment without new steps becomes a second name of its file in the folder of `before`. `before`: the folder of
        an earlier call, and what `written` was then; None: there is none.
        """
        names = []
        for segment in self.segments():
            file = f"{name}_{segment.start}.npz"
            names.append(file)
            same = before is not None and not self.changed_since(segment, before[1])
            if before is not None and same and _linked(before[0] / file, folder / file):
                continue
            arrays = self._arrays.items()
            part = {n: array[segment.start : segment.stop] for n, array in arrays}
            _write(folder / file, part)
        # All else: how many slots were written, and the priorities
        state: dict[str, Array] = {"written": np.array(self.written)}
        if self._priorities is not None:
            state |= self._priorities.state()
        head = f"{name}_{HEAD}.npz"
        _write(folder / head, state)
        return [*names, head]

    def read(self, folder: Path, parts: Sequence[SavedRows]) -> None:
        """Load rows that one or several memories have written. Raises OSError, ValueError, KeyError, EOFError.

        `parts`: in the order of the rows of this memory, which they fill.
        """
        written: set[int] = set()
        priorities = np.zeros((self.slots, self.rows))
        greatest = 0.0
        for rows, part in self._placed(parts):
            with np.load(
                folder / f"{part.name}_{HEAD}.npz", allow_pickle=False
            ) as stored:
                written.add(int(stored["written"]))
                if self._priorities is not None:
                    table = stored["priorities"].reshape(self.slots, part.count)
                    priorities[:, rows] = table[:, part.rows]
                    greatest = max(greatest, float(stored["greatest"]))
        if len(written) != 1:
            raise ValueError(f"its files have other numbers of steps: {written}")
        (self.written,) = written
        if self._priorities is not None:
            state = {"priorities": priorities.ravel(), "greatest": np.array(greatest)}
            self._priorities.load(state)
        for segment in self.segments():
            for rows, part in self._placed(parts):
                with np.load(
                    folder / f"{part.name}_{segment.start}.npz", allow_pickle=False
                ) as stored:
                    for name, array in self._arrays.items():
                        found = stored[name]
                        if found.shape[1] != part.count:
                            raise ValueError(
                                f"{part.name} has {found.shape[1]} rows, not {part.count}"
                            )
                        place = slice(segment.start, segment.stop)
                        array[place, rows] = found[:, part.rows]

    def _placed(self, parts: Sequence[SavedRows]) -> Iterator[tuple[slice, SavedRows]]:
        """Yield the rows of this memory that each part fills, with the part."""
        first = 0
        for part in parts:
            last = first + part.rows.stop - part.rows.start
            yield slice(first, last), part
            first = last


def _linked(file: Path, name: Path) -> bool:
    """Give a file a second name; return whether that was possible."""
    try:
        os.link(file, name)
    except OSError:
        return False
    return True


def _write(file: Path, arrays: Mapping[str, Array]) -> None:
    with open(file, "wb") as out:
        np.savez(out, allow_pickle=False, **arrays)
        out.flush()
        os.fsync(out.fileno())
