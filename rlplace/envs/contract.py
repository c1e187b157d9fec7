"""The contracts of simulators, which env workers use, and of adapters to simulator libraries.

Letters: B rows of a simulator, O observation shape, A action shape, K truncated rows, N episodes that ended in a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

# The planner asks adapters about ids and has no numpy
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlplace.config.schema import SimulatorEnvConfig
    from rlplace.errors import Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteActions:
    """An action space: an action is one int64 of 0..n-1."""

    n: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MultiDiscreteActions:
    """An action space: an action is an int64 array, whose element i is one of 0..n[i]-1."""

    n: tuple[int, ...]  # choices of each element, flattened
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousActions:
    """An action space: an action is a float32 array. The simulator clips it to [low, high]; the learner does not."""

    shape: tuple[int, ...]
    low: tuple[float, ...]  # flattened, one bound per element
    high: tuple[float, ...]


Actions = DiscreteActions | MultiDiscreteActions | ContinuousActions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One entry of observations that are a Dict or a Tuple, such as a camera image."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "uint8"] = "float32"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    """The spaces (shapes and types) of the observations and actions of a job. An observation is always one array.

    If a simulator shows a Dict or a Tuple, its entries are joined in one row of numbers. If one of the entries is an
    image, the row consists of bytes, with all float32 numbers before the images::

        position [3] float32, speed [1] float32                      [4] float32
        position [3] float32, camera [64, 64, 3] uint8               [12 + 12288] uint8

    An observation for a policy with memory is such a row too; the policy's memory comes first::

        memory [64] float32, position [3] float32                    [67] float32
    """

    observation_shape: tuple[int, ...]
    actions: Actions
    # uint8: an image, or a row of bytes
    observation_dtype: Literal["float32", "uint8"] = "float32"
    # Entries in their order within a row; empty: the observation is a single array
    parts: tuple[Part, ...] = ()
    # float32 numbers of the policy's memory; they are not among the parts
    memory: int = 0
    # Actions decided at once; if more than one, they are the first axis of `actions`
    chunk: int = 1

    @property
    def numbers(self) -> int:
        """The number of float32 values at the beginning of an observation, including those of the policy's memory."""
        if self.parts:
            sizes = [part.size for part in self.parts if part.dtype == "float32"]
            return self.memory + sum(sizes)
        if self.observation_dtype == "float32":
            return math.prod(self.observation_shape)
        return 0

    def numbers_in(self, observations: NDArray[Any]) -> NDArray[Any]:
        """Return the float32 numbers [B, ...] of observations [B, *O]. With images only, the last axis is empty."""
        if self.observation_dtype == "float32":
            return observations
        import numpy as np

        # Bytes: 4 of them are a number
        size = math.prod(self.observation_shape)
        rows = observations.reshape(len(observations), size)
        numbers = np.ascontiguousarray(rows[:, : 4 * self.numbers])
        return numbers.view(np.float32)

    @property
    def entries(self) -> tuple[Part, ...]:
        """The parts of an observation; if it is a single array, one part without a name."""
        whole = Part(
            name="", shape=self.observation_shape, dtype=self.observation_dtype
        )
        return self.parts or (whole,)

    @property
    def shown(self) -> Spaces:
        """These spaces without the policy's memory, as the simulator shows them."""
        if not self.memory:
            return self
        # A single array gets its own shape back
        if [part.name for part in self.parts] == [""]:
            (whole,) = self.parts
            return dataclasses.replace(
                self,
                observation_shape=whole.shape,
                observation_dtype=whole.dtype,
                parts=(),
                memory=0,
            )
        # A row becomes shorter, by 4 bytes or by one number for each number remembered
        (size,) = self.observation_shape
        each = 4 if self.observation_dtype == "uint8" else 1
        shape = (size - each * self.memory,)
        return dataclasses.replace(self, observation_shape=shape, memory=0)

    def remembering(self, memory: int) -> Spaces:
        """Return these spaces with the policy's memory, `memory` float32 numbers, before each observation."""
        if not memory:
            return self
        # A row of float32 numbers, or of bytes if there are images
        pictures = 0
        floats = memory
        for part in self.entries:
            if part.dtype == "uint8":
                pictures += part.size
            else:
                floats += part.size
        with_memory = dataclasses.replace(self, parts=self.entries, memory=memory)
        if pictures:
            shape = (4 * floats + pictures,)
            return dataclasses.replace(
                with_memory, observation_shape=shape, observation_dtype="uint8"
            )
        return dataclasses.replace(
            with_memory, observation_shape=(floats,), observation_dtype="float32"
        )

    def chunked(self, chunk: int) -> Spaces:
        """Return these spaces for a policy that decides `chunk` actions at once."""
        taken = self.actions
        if chunk == 1:
            return self
        # A chunk of choices is a choice for each action; continuous actions get another
        # axis
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
        """The entries that are images: entries of bytes; if no entry has bytes, all arrays of two or more axes."""
        arrays = [entry for entry in self.entries if len(entry.shape) > 1]
        of_bytes = [entry for entry in arrays if entry.dtype == "uint8"]
        return tuple(of_bytes or arrays)


def image_size(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return channels, height and width (C, H, W) of an image of shape [H, W], [H, W, C] or [C, H, W].

    Axes before the last three are a stack of T images, which has T * C channels.
    """
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    stack = math.prod(shape[:-3])
    first, middle, last = shape[-3:]
    if channels_last(shape[-3:]):
        return (stack * last, first, middle)
    return (stack * first, middle, last)


def channels_last(shape: Sequence[int]) -> bool:
    """Return whether an image with three axes is [H, W, C] rather than [C, H, W].

    If exactly two neighbouring axes are equal, they are H and W. Otherwise C is the shorter of the first and the last
    axis; if these are equal, the last.
    """
    first, middle, last = shape
    if first != last and middle in (first, last):
        return first == middle
    return last <= first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one step of B rows, in new arrays.

    For a row whose episode ended, `observations` has the first observation of the next episode.
    """

    observations: NDArray[Any]  # [B, *O], after autoreset
    rewards: NDArray[np.float32]  # [B]
    terminated: NDArray[np.bool_]  # [B]
    truncated: NDArray[np.bool_]  # [B], false where terminated
    final_observations: NDArray[Any]  # [K, *O], last observations of truncated rows
    episode_returns: Sequence[float]  # [N], undiscounted
    episode_lengths: Sequence[int]  # [N], steps


class Simulator(Protocol):
    """B environments that step together, used by one thread."""

    def reset(self, seeds: Sequence[int]) -> NDArray[Any]:
        """Begin an episode in every row, and return the first observations [B, *O].

        All random numbers of row i, in later episodes too, come from seeds[i].
        """
        ...

    def restart(self, rows: Sequence[int]) -> NDArray[Any]:
        """Begin another episode in each of `rows`, and return the first observations [len(rows), *O].

        This is called for rows with numbers that are not finite. Their unfinished episodes do not count.
        """
        ...

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Take the actions [B, *A] as the policy sampled them, and return the result. The simulator clips them to its
        bounds.
        """
        ...

    def close(self) -> None:
        """Free everything the simulator holds."""
        ...


@runtime_checkable
class Restorable(Protocol):
    """A simulator whose episodes can go on from a checkpoint in another process. Other simulators begin all episodes
    anew.
    """

    def row_states(self) -> list[Mapping[str, NDArray[Any]]]:
        """Return for each row the state that determines its next steps, as new arrays of numbers or texts."""
        ...

    def restore(
        self, states: Sequence[Mapping[str, NDArray[Any]]]
    ) -> Mapping[int, NDArray[Any]]:
        """Continue from `states`, one for each row, as `row_states` returned them; call it after `reset`.

        The states may come from several simulators. Return, by row, the first observation of each row that could not be
        restored and began a new episode.
        """
        ...


@runtime_checkable
class Rendering(Protocol):
    """A simulator that draws pictures, if `env.kwargs` has render_mode: rgb_array."""

    @property
    def frames_per_s(self) -> float:
        """The number of pictures for a second of simulated time."""
        ...

    def frame(self) -> NDArray[np.uint8]:
        """Return a picture [height, width, 3] of the first row."""
        ...


class Adapter(Protocol):
    """The adapter to one simulator library. An adapter has no state, and its class takes no arguments."""

    def check(self, config: SimulatorEnvConfig) -> Sequence[Problem]:
        """Return all problems of the config that can be found without building a simulator.

        Return no problems if the library is missing.

        The check is fast, since the planner makes it too.
        """
        ...

    def describe(self, config: SimulatorEnvConfig) -> Spaces:
        """Build one environment, and return the spaces of its observations and actions. Raises ConfigError."""
        ...

    def make(self, config: SimulatorEnvConfig, rows: int) -> Simulator:
        """Return a simulator with `rows` environments."""
        ...
