"""The contracts of simulators, which env workers use, and of adapters to simulator libraries.

Letters: B rows of a simulator, O observation shape, A action shape, K truncated rows, N episodes that ended in a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

# The planner asks adapters about ids and has no numpy
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlplace.config.blocks.simulator import SimulatorEnvConfig
    from rlplace.errors import Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteActions:
    """An action space in which an action is one int64 from 0 to n - 1.

    `first`: the first choice as the simulator itself counts it, such as -1 of Gymnasium's Discrete(3, start=-1).
    """

    n: int
    first: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MultiDiscreteActions:
    """An action space in which an action is an int64 array of shape `shape`; element i is from 0 to n[i] - 1.

    `n`: number of choices of each element of the flattened array. `first`: the first choice of each element as the
    simulator itself counts it; empty if all are 0.
    """

    n: tuple[int, ...]
    shape: tuple[int, ...]
    first: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousActions:
    """An action space in which an action is a float32 array of shape `shape`.

    `low`, `high`: bounds for each element of the flattened array. The simulator clips actions to these bounds; the
    learner does not.
    """

    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenoisedActions:
    """An action space in which a policy makes each action from noise, in several steps.

    An action of the policy is a float32 array of shape `shape`, a chain: the noise, and then the result of each step.
    The simulator takes the last result. `shape`: [1 + steps, *shape of the simulator's action]. `low`, `high`: bounds
    for each element of the simulator's flattened action.
    """

    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def taken(self) -> ContinuousActions:
        """The action space of the simulator."""
        return ContinuousActions(shape=self.shape[1:], low=self.low, high=self.high)


Actions = DiscreteActions | MultiDiscreteActions | ContinuousActions | DenoisedActions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One entry of an observation that is a Dict or a Tuple, such as a camera image.

    A text is a row of bytes: UTF-8, and zeros behind it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "uint8"] = "float32"

    @property
    def size(self) -> int:
        """The number of elements of the entry."""
        return math.prod(self.shape)

    @property
    def is_text(self) -> bool:
        """Whether the entry is a text; an image has two axes or more."""
        return self.dtype == "uint8" and len(self.shape) == 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    """The shapes and types of the observations and actions of a job. An observation is always one array.

    If a simulator's observation is a Dict or a Tuple, its entries are joined to one row of float32 numbers. If an entry
    is an image or a text, the row consists of bytes, with all float32 numbers before the images and texts::

        position [3] float32, speed [1] float32                      [4] float32
        position [3] float32, camera [64, 64, 3] uint8               [12 + 12288] uint8
        camera [64, 64, 3] uint8, instruction [20] uint8             [12288 + 20] uint8

    For a policy with memory, an observation is also such a row, and the policy's memory comes first::

        memory [64] float32, position [3] float32                    [67] float32

    `observation_dtype`: uint8 for an image or a row of bytes.
    `parts`: the entries in their order within a row; empty if the observation is a single array. Memory is not a part.
    `memory`: number of float32 values of the policy's memory.
    `chunk`: number of actions that are decided at once; if above 1, it is the first axis of `actions`.
    `normalized`: whether the simulator normalizes with running statistics, see `Normalizing`.
    `own_statistics`: whether a user's wrapper has running statistics, with which it normalizes.
    `together`: number of neighbouring rows that belong to one environment, such as its agents. The number of rows of a
    simulator is a multiple of it.
    """

    observation_shape: tuple[int, ...]
    actions: Actions
    observation_dtype: Literal["float32", "uint8"] = "float32"
    parts: tuple[Part, ...] = ()
    memory: int = 0
    chunk: int = 1
    normalized: bool = False
    own_statistics: bool = False
    together: int = 1

    @property
    def numbers(self) -> int:
        """How many float32 values an observation has at its beginning, including the policy's memory."""
        if self.parts:
            sizes = [part.size for part in self.parts if part.dtype == "float32"]
            return self.memory + sum(sizes)
        if self.observation_dtype == "float32":
            return math.prod(self.observation_shape)
        return 0

    def numbers_in(self, observations: NDArray[Any]) -> NDArray[Any]:
        """Return the float32 values [B, n] of the observations [B, *O], for B rows; n is 0 if there are only images.

        Observations that are single float32 arrays are returned unchanged.
        """
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
        """The parts of an observation. For a single array: one part, without a name."""
        whole = Part(
            name="", shape=self.observation_shape, dtype=self.observation_dtype
        )
        return self.parts or (whole,)

    @property
    def shown(self) -> Spaces:
        """The spaces as the simulator has them: without the policy's memory."""
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
        """Return the spaces for a policy with memory: `memory` float32 values come first in each observation."""
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
        """Return the spaces for a policy that decides `chunk` actions at once."""
        taken = self.actions
        if chunk == 1:
            return self
        # A chunk of choices is a choice for each action; continuous actions get another
        # axis
        actions: Actions
        if isinstance(taken, DiscreteActions):
            first = (taken.first,) * chunk if taken.first else ()
            actions = MultiDiscreteActions(
                n=(taken.n,) * chunk, shape=(chunk,), first=first
            )
        elif isinstance(taken, MultiDiscreteActions):
            actions = MultiDiscreteActions(
                n=taken.n * chunk,
                shape=(chunk, *taken.shape),
                first=taken.first * chunk,
            )
        else:
            assert isinstance(taken, ContinuousActions), "a chain has chunks already"
            shape = (chunk, *taken.shape)
            actions = ContinuousActions(
                shape=shape, low=taken.low * chunk, high=taken.high * chunk
            )
        return dataclasses.replace(self, actions=actions, chunk=chunk)

    def denoised(self, steps: int) -> Spaces:
        """Return the spaces for a policy that makes continuous actions from noise in `steps` steps.

        If the actions are not continuous, the spaces stay as they are.
        """
        taken = self.actions
        if not isinstance(taken, ContinuousActions):
            return self
        shape = (1 + steps, *taken.shape)
        actions = DenoisedActions(shape=shape, low=taken.low, high=taken.high)
        return dataclasses.replace(self, actions=actions)

    @property
    def taken_actions(self) -> Actions:
        """The actions that the simulator takes, or chunks of them."""
        if isinstance(self.actions, DenoisedActions):
            return self.actions.taken
        return self.actions

    def taken_of(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return the actions that the simulator takes, [..., *A]. `actions`: as the policy made them."""
        if not isinstance(self.actions, DenoisedActions):
            return actions
        # The last of each chain
        axis = actions.ndim - len(self.actions.shape)
        last: NDArray[Any] = actions.take(-1, axis)
        return last

    @property
    def texts(self) -> tuple[Part, ...]:
        """The parts that are texts."""
        return tuple(part for part in self.parts if part.is_text)

    @property
    def images(self) -> tuple[Part, ...]:
        """The parts that are images: parts of bytes. If there are none, all parts with two or more axes."""
        arrays = [entry for entry in self.entries if len(entry.shape) > 1]
        of_bytes = [entry for entry in arrays if entry.dtype == "uint8"]
        return tuple(of_bytes or arrays)


def image_size(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return channels, height and width (C, H, W) of an image of shape [H, W], [H, W, C] or [C, H, W].

    If there are axes before the last three, they are a stack of T images, which counts as one image with T * C
    channels.
    """
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    stack = math.prod(shape[:-3])
    first, middle, last = shape[-3:]
    if channels_last(shape[-3:]):
        return (stack * last, first, middle)
    return (stack * first, middle, last)


def channels_last(shape: Sequence[int]) -> bool:
    """Return whether an image with the three axes `shape` is [H, W, C]; if not, it is [C, H, W].

    If exactly two neighbouring axes are equal, they are H and W. Otherwise C is the shorter one of the first and the
    last axis; if these two are equal, C is the last axis.
    """
    first, middle, last = shape
    if first != last and middle in (first, last):
        return first == middle
    return last <= first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one step of B rows (environments), in new arrays. O is the shape of an observation.

    `observations`: [B, *O]; for a row in which an episode ended, the first observation of its next episode.
    `rewards`, `terminated`, `truncated`: [B]; a row that is terminated is not truncated.
    `final_observations`: [K, *O], the last observation of each of the K truncated rows.
    `episode_returns`, `episode_lengths`: [N], undiscounted return and number of steps of each of the N episodes that
    ended. An episode of 0 steps, of an agent that was absent, counts in no mean.
    """

    observations: NDArray[Any]
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_observations: NDArray[Any]
    episode_returns: Sequence[float]
    episode_lengths: Sequence[int]


class Simulator(Protocol):
    """B environments (rows) that step together. All methods are called by one thread.

    In the shapes of arrays, O is the shape of an observation and A the shape of an action.
    """

    def reset(self, seeds: Sequence[int]) -> NDArray[Any]:
        """Begin an episode in every row, and return the first observations [B, *O].

        `seeds`: one seed for each row. All random numbers of a row come from its seed, also in later episodes.
        """
        ...

    def restart(self, rows: Sequence[int]) -> NDArray[Any]:
        """Begin a new episode in the environments `rows`, and return the first observations [len(rows), *O].

        This is called for environments in which a number is not finite. Their unfinished episodes do not count.
        """
        ...

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Take one action for each row, and return the result of the step.

        `actions`: [B, *A], as the policy sampled them. The simulator clips them to its bounds.
        """
        ...

    def close(self) -> None:
        """Free everything the simulator holds."""
        ...


@runtime_checkable
class Restorable(Protocol):
    """A simulator that can save the state of its episodes and restore it in another process.

    After a resume from a checkpoint, its episodes go on. All other simulators begin new episodes.
    """

    def row_states(self) -> list[Mapping[str, NDArray[Any]]]:
        """Return for each row the state that determines its next steps, as new arrays of numbers or texts, by name."""
        ...

    def restore(
        self, states: Sequence[Mapping[str, NDArray[Any]]]
    ) -> Mapping[int, NDArray[Any]]:
        """Continue the episodes of `states`, one state from `row_states` for each row. To be called after `reset`.

        The states may come from several simulators. A row that cannot be restored begins a new episode; return row ->
        first observation for these rows.
        """
        ...


@runtime_checkable
class Normalizing(Restorable, Protocol):
    """A simulator that may normalize with running statistics over its episodes. The policy needs these statistics.

    `statistics`: the names of the statistics in `row_states`; empty if the simulator does not normalize.
    """

    @property
    def statistics(self) -> Collection[str]: ...

    def take_statistics(self, states: Sequence[Mapping[str, NDArray[Any]]]) -> bool:
        """Set the statistics of each row to those in `states`, states of rows of the training, and stop their updates.

        Return whether `states` has all the statistics. If there are fewer states than rows, states are used repeatedly.
        """
        ...


@runtime_checkable
class Wrapped(Protocol):
    """A simulator that may have wrappers of the user, with numbers that change with steps."""

    def remark_on_kept_steps(self) -> None:
        """Add a remark if such numbers have changed: steps that a memory keeps were observed with earlier ones."""
        ...


@runtime_checkable
class Discounting(Protocol):
    """A simulator whose wrappers may scale rewards by discounted returns.

    `reward_discounts`: the discounts per step of these wrappers; empty if there are none.
    """

    @property
    def reward_discounts(self) -> Collection[float]: ...


@runtime_checkable
class Remarking(Protocol):
    """A simulator that has something to say about its environments, which a run shows once.

    `remarks`: the texts so far. An example: observations are outside of the bounds of their space.
    """

    @property
    def remarks(self) -> Sequence[str]: ...


@runtime_checkable
class Rendering(Protocol):
    """A simulator that can draw pictures, if `env.kwargs` has `render_mode: rgb_array`."""

    @property
    def frames_per_s(self) -> float:
        """The number of pictures for one second of simulated time."""
        ...

    def frame(self) -> NDArray[np.uint8]:
        """Return a picture of the present state of the first row, [height, width, 3]."""
        ...


class Adapter(Protocol):
    """The adapter to one simulator library. An adapter has no state; its class is called without arguments."""

    def check(self, config: SimulatorEnvConfig) -> Sequence[Problem]:
        """Return all problems of the config that can be found without building a simulator.

        If the library is not installed, return an empty list. The check has to be fast, because the planner makes it
        too.
        """
        ...

    def describe(self, config: SimulatorEnvConfig) -> Spaces:
        """Build one environment, and return the spaces of its observations and actions.

        Raises ConfigError if the environment cannot be built or has spaces that are not supported.
        """
        ...

    def make(self, config: SimulatorEnvConfig, rows: int) -> Simulator:
        """Return a simulator with `rows` environments."""
        ...
