"""Contracts of simulators, as an env worker uses them, and of adapters to simulator libraries.

Letters: B rows of one simulator, O observation shape, A action shape, K truncated rows, N episodes ended in the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:  # the planner asks adapters about ids; it needs no numpy for that
    import numpy as np
    from numpy.typing import NDArray

    from rlplace.config.schema import SimulatorEnvConfig
    from rlplace.errors import Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteActions:
    """A choice of 0..n-1, int64."""

    n: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MultiDiscreteActions:
    """For each element i of the action a choice of 0..n[i]-1, int64."""

    n: tuple[int, ...]  # flattened
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousActions:
    """A float32 vector; the simulator gets it clipped to [low, high], the learner sees it unclipped."""

    shape: tuple[int, ...]
    low: tuple[float, ...]  # flattened, one bound per element
    high: tuple[float, ...]


Actions = DiscreteActions | MultiDiscreteActions | ContinuousActions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One entry of observations that are a Dict or a Tuple."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "uint8"] = "float32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    """Observations and actions of every env of a job. An observation is one array, whatever the simulator shows.

    Entries of a Dict or a Tuple follow each other in a row of numbers. Where one of them is an image, it is a row of
    bytes, in which float32 numbers come before images::

        position [3] float32, speed [1] float32                      [4] float32
        position [3] float32, camera [64, 64, 3] uint8               [12 + 12288] uint8

    An observation for a policy with memory is such a row too, which begins with what the policy remembers::

        memory [64] float32, position [3] float32                    [67] float32
    """

    observation_shape: tuple[int, ...]
    actions: Actions
    # uint8: an image, or a row of bytes
    observation_dtype: Literal["float32", "uint8"] = "float32"
    # In their order within a row; none: the observation is an array by itself
    parts: tuple[Part, ...] = ()
    # float32 numbers that the policy remembers; the parts do not name them
    memory: int = 0
    # Actions decided at once; more than one are the first axis of `actions`
    chunk: int = 1

    @property
    def numbers(self) -> int:
        """How many float32 numbers an observation begins with, those of the memory first."""
        if self.parts:
            return self.memory + sum(
                part.size for part in self.parts if part.dtype == "float32"
            )
        if self.observation_dtype == "float32":
            return math.prod(self.observation_shape)
        return 0

    def numbers_in(self, observations: NDArray[Any]) -> NDArray[Any]:
        """Return the float32 numbers [B, ...] of observations [B, *O]; of images alone, none."""
        if self.observation_dtype == "float32":
            return observations
        import numpy as np

        rows = observations.reshape(
            len(observations), math.prod(self.observation_shape)
        )[:, : 4 * self.numbers]
        return np.ascontiguousarray(rows).view(np.float32)

    @property
    def entries(self) -> tuple[Part, ...]:
        """The parts; of an observation that is an array by itself, this one under no name."""
        whole = Part(
            name="", shape=self.observation_shape, dtype=self.observation_dtype
        )
        return self.parts or (whole,)

    @property
    def shown(self) -> Spaces:
        """The same of the simulator alone, without a memory."""
        if not self.memory:
            return self
        if [part.name for part in self.parts] == [""]:
            (whole,) = self.parts
            shape = whole.shape
            dtype = whole.dtype
            return dataclasses.replace(
                self,
                observation_shape=shape,
                observation_dtype=dtype,
                parts=(),
                memory=0,
            )
        (size,), each = (
            self.observation_shape,
            4 if self.observation_dtype == "uint8" else 1,
        )
        return dataclasses.replace(
            self, observation_shape=(size - each * self.memory,), memory=0
        )

    def remembering(self, memory: int) -> Spaces:
        """The same with so many numbers of a memory before what the simulator shows."""
        if not memory:
            return self
        pictures = sum(part.size for part in self.entries if part.dtype == "uint8")
        floats = memory + sum(
            part.size for part in self.entries if part.dtype == "float32"
        )
        return dataclasses.replace(
            self,
            observation_shape=(4 * floats + pictures if pictures else floats,),
            observation_dtype="uint8" if pictures else "float32",
            parts=self.entries,
            memory=memory,
        )

    def chunked(self, chunk: int) -> Spaces:
        """The same with so many actions decided at once."""
        taken = self.actions
        if chunk == 1:
            return self
        actions: Actions
        if isinstance(taken, DiscreteActions):
            actions = MultiDiscreteActions(n=(taken.n,) * chunk, shape=(chunk,))
        elif isinstance(taken, MultiDiscreteActions):
            actions = MultiDiscreteActions(
                n=taken.n * chunk, shape=(chunk, *taken.shape)
            )
        else:
            shape = (chunk, *taken.shape)
            actions = ContinuousActions(
                shape=shape, low=taken.low * chunk, high=taken.high * chunk
            )
        return dataclasses.replace(self, actions=actions, chunk=chunk)

    @property
    def images(self) -> tuple[Part, ...]:
        """The entries that are images: those of bytes; where there are none, the arrays of two axes and more."""
        arrays = [entry for entry in self.entries if len(entry.shape) > 1]
        return tuple([entry for entry in arrays if entry.dtype == "uint8"] or arrays)


def image_size(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return C, H and W of an image [H, W], [H, W, C] or [C, H, W]; of a stack of these, T x C are channels."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    stack, (first, middle, last) = math.prod(shape[:-3]), shape[-3:]
    if channels_last(shape[-3:]):
        return (stack * last, first, middle)
    return (stack * first, middle, last)


def channels_last(shape: Sequence[int]) -> bool:
    """Whether an image is [H, W, C]: of a square one, C is the axis that differs; else the shorter, or the last."""
    first, middle, last = shape
    if first != last and middle in (first, last):
        return first == middle
    return last <= first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step of B rows, in new arrays. Where an episode ended, `observations` has the first of the next."""

    observations: NDArray[Any]  # [B, *O], after autoreset
    rewards: NDArray[np.float32]  # [B]
    terminated: NDArray[np.bool_]  # [B]
    truncated: NDArray[np.bool_]  # [B], never where terminated
    # [K, *O], last observation of truncated rows, in row order
    final_observations: NDArray[Any]
    episode_returns: Sequence[float]  # N, undiscounted
    episode_lengths: Sequence[int]  # N, steps


class Simulator(Protocol):
    """A vector of B environments. Used by one thread."""

    def reset(self, seeds: Sequence[int]) -> NDArray[Any]:
        """Begin all episodes; return [B, *O]. All randomness of row i, later episodes too, comes from seeds[i]."""
        ...

    def restart(self, rows: Sequence[int]) -> NDArray[Any]:
        """End the episodes of these rows uncounted and begin others; return [len(rows), *O]. For poisoned rows only."""
        ...

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Step by `actions` [B, *A] as sampled; the simulator clips them to its bounds."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Restorable(Protocol):
    """A simulator that can go on in another process, from a checkpoint. One that is not begins all episodes anew."""

    def row_states(self) -> list[Mapping[str, NDArray[Any]]]:
        """Return for each row all that its next steps follow from: numbers or texts, no objects, in new arrays."""
        ...

    def restore(
        self, states: Sequence[Mapping[str, NDArray[Any]]]
    ) -> Mapping[int, NDArray[Any]]:
        """Go on, after `reset`, from what `row_states` returned of each row, in whatever simulators they were.

        Return the first observations of rows that cannot, and began an episode instead.
        """
        ...


@runtime_checkable
class Rendering(Protocol):
    """A simulator that draws what it simulates, if its `env.kwargs` have render_mode: rgb_array."""

    @property
    def frames_per_s(self) -> float: ...

    def frame(self) -> NDArray[np.uint8]:
        """Return a picture of the first row, [height, width, 3]."""
        ...


class Adapter(Protocol):
    """One simulator library. Stateless; a class whose instances need no arguments."""

    def check(self, config: SimulatorEnvConfig) -> Sequence[Problem]:
        """Report what is wrong without building a simulator. Fast; nothing when the library is missing."""
        ...

    def describe(self, config: SimulatorEnvConfig) -> Spaces:
        """Return the shapes, by building one simulator. Raises ConfigError."""
        ...

    def make(self, config: SimulatorEnvConfig, rows: int) -> Simulator: ...
