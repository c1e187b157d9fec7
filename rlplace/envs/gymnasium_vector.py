"""Steps a vector of Gymnasium environments in one short loop, with time limit and autoreset in the same step."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.contract import StepResult
from rlplace.envs.entries import Unfit
from rlplace.envs.given_actions import GivenActions
from rlplace.envs.gymnasium_results import (
    Bounds,
    Ends,
    Results,
    close_all,
    flag,
    own_return,
    reward_of,
    shares_memory,
)
from rlplace.envs.gymnasium_state import (
    freeze_statistics,
    restore,
    reward_discounts,
    state_of,
    statistics_of,
)
from rlplace.envs.kept_numbers import KEPT, KeptNumbers
from rlplace.envs.layers import (
    OwnRewards,
    RewardsBelow,
    check_below_wrappers,
    own_rewards,
    rewards_below,
)
from rlplace.envs.observations import dark_image, encoding_of
from rlplace.envs.owned import SharedObjects, disown, own
from rlplace.envs.precision import Precision
from rlplace.envs.random_numbers import RandomNumbers

if TYPE_CHECKING:
    import gymnasium

# Pictures in a second, for environments that do not say
_FRAMES_PER_S = 30.0
_NOTHING = np.empty(0)
# Names that libraries give the last observation, where an environment begins its next episode by itself
_FINAL = ("final_obs", "final_observation", "terminal_observation")
# Steps from one comparison of the observations with their bounds to the next
_LOOK_EVERY = 64


class GymnasiumVector:
    """A simulator that owns several environments and steps them one after the other.

    For cheap simulators this is faster than a process for each.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        *,
        max_episode_steps: int | None,
        name: str | None = None,
    ) -> None:
        """Take environments of one kind.

        `max_episode_steps`: None: no time limit. `name`: of the environments, for errors; None: that of their class.
        """
        self._envs = list(envs)
        self._results = Results(name or type(envs[0].unwrapped).__name__)
        try:
            own(envs)
        except Unfit as unfit:
            raise self._results.refused(unfit, "the constructor") from None
        for env in envs:
            check_below_wrappers(env, self._results)
        self._steps = [env.step for env in envs]
        self._innermost = [env.unwrapped for env in envs]
        # Numbers in the user's wrappers, and whether an evaluation has fixed some of them
        self._numbers = [KeptNumbers(env) for env in envs]
        self._has_fixed = False
        # Whether an evaluation lacks the numbers of the training. If the numbers change, a remark is added
        self._lacks_numbers = False
        # Returns are of the environments' own rewards, learning is by those of their wrappers; None: they are the same
        self._own_rewards = [each for env in envs if (each := own_rewards(env))] or None
        # Rewards below a user's wrapper whose rewards count, until it has changed one; None: nothing is compared
        below = [layer for env in envs if (layer := rewards_below(env))]
        self._below: list[RewardsBelow] | None = below or None
        # For each row, the layer below its wrappers: whether the environment goes on where a wrapper ends an episode
        self._layers: Sequence[OwnRewards | RewardsBelow] = self._own_rewards or below
        encoding = encoding_of(envs[0].observation_space)
        assert encoding is not None, "describe has refused it"
        brightest = dark_image(envs[0].observation_space)
        if brightest is not None:
            scaled = f"{brightest / 255:.2g}"
            self._results.remark(
                "dark-image", f"bytes up to {brightest}", scaled=scaled
            )
        # Observations of a step: [B, *O]
        self._shape = (len(envs), *encoding.whole.shape)
        self._dtype = np.dtype(encoding.whole.dtype)
        self._encode = encoding.encode
        self._read = encoding.read
        # Bounds of the observations' numbers, and the step of the next comparison with them
        self._bounds_seen = Bounds(encoding.low, encoding.high)
        self._looks_at = 0
        # Finds different numbers that are equal as float32, in a few steps
        self._precision = Precision(encoding)
        # Type of the latest observations: others of the same type and shape need no other check
        self._kind = self._dtype
        # Whether environments share the memory of their observations, so that each has to be copied at once; None: not
        # known before the first step
        self._shares: bool | None = None
        self._uncopied: list[Any] = []
        self._limit = sys.maxsize
        if max_episode_steps is not None:
            self._limit = max_episode_steps
        # Returns of the episodes in progress, and the step at which each began
        self._returns = [0.0] * len(envs)
        self._begins = [0] * len(envs)
        # Steps of this vector so far
        self._clock = 0
        self._given = GivenActions(envs[0].action_space)
        # Each environment is reset with a seed, and later without
        self._results.require_reset(envs[0])
        self._results.look_for_mask_methods(envs[0])
        self._results.require_equal_spaces(envs)
        self._ends = Ends()
        # Objects that environments share, and the step of the next look at them
        self._shared = SharedObjects(envs)
        self._compares_at = 1
        # Compares the random numbers of environments after their first resets; None: not yet, or no longer
        self._random: RandomNumbers | None = None

    @property
    def remarks(self) -> Sequence[str]:
        """Texts about results of the environments that were accepted and are unusual, each once."""
        return self._results.remarks

    def reset(self, seeds: Sequence[int]) -> NDArray[Any]:
        """Begin an episode in every environment, and return the first observations [B, *O]. Row i gets seeds[i]."""
        observations = np.empty(self._shape, self._dtype)
        for row, (env, seed) in enumerate(zip(self._envs, seeds, strict=True)):
            observations[row] = self._first(env, seed)
        if len(set(seeds[:2])) == len(seeds[:2]):
            self._random = RandomNumbers(self._envs)
        self._returns = [0.0] * len(self._envs)
        self._begins = [self._clock] * len(self._envs)
        if self._clock >= self._looks_at:
            self._look(observations)
        return observations

    def restart(self, rows: Sequence[int]) -> NDArray[Any]:
        """Begin a new episode in the environments `rows`, and return the first observations [len(rows), *O]."""
        for row in rows:
            self._returns[row] = 0.0
            self._begins[row] = self._clock
        firsts = [self._first(self._envs[row]) for row in rows]
        return np.array(firsts, self._dtype)

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Step all rows with the actions [B, *A], and return the result.

        A row in which the episode ends begins a new episode in the same step. Raises SimulatorError for a result that
        is not in the spaces of the environment.
        """
        # The hot loop of a run: local names, Python numbers, one array for all rows
        terminations = np.zeros(len(self._envs), np.bool_)
        truncations = np.zeros(len(self._envs), np.bool_)
        shown = []
        rewards: list[float] = []
        finals = []
        episode_returns: list[float] = []
        episode_lengths: list[int] = []
        returns = self._returns
        begins = self._begins
        array = np.ndarray
        self._clock += 1
        clock = self._clock
        limit = self._limit
        if self._has_fixed:
            for kept in self._numbers:
                kept.put_back_fixed()
        # Whether all rows are checked: in the first step, or where an episode may be at its time limit
        due = clock == 1 or min(begins) <= clock - limit
        own = self._own_rewards
        below = self._below
        # Observations are read one by one if they are no arrays, or if others may write into these arrays
        read = self._encode
        if read is None and self._shares is not False:
            read = self._copied
        # The numbers of each row before conversion to float32; collected in a few steps only
        exact: list[Any] = []
        if clock >= self._precision.looks_at:
            read = self._kept(exact, read)
        try:
            for row, (step, action) in enumerate(
                zip(self._steps, self._given.of(actions), strict=True)
            ):
                if own is not None:
                    # A wrapper may have taken steps to begin the episode
                    own[row].take()
                if below is not None:
                    below[row].take()
                made = step(action)
                try:
                    observation, reward, terminated, truncated, _ = made
                except (TypeError, ValueError):
                    values = self._results.values(made)
                    observation, reward, terminated, truncated = values
                if read is not None:
                    observation = read(observation)
                try:
                    number: Any = reward
                    if type(reward) is not float:
                        single = type(reward) is array
                        number = reward_of(reward) if single else float(reward)
                    ends = terminated or truncated or due
                except (TypeError, ValueError, RuntimeError):
                    number = reward_of(reward)
                    ends = True
                rewards.append(number)
                counted = number
                if own is not None:
                    counted = own_return(own[row].take(), number)
                returns[row] += counted
                if below is not None:
                    self._compare(below[row], counted)
                # Most steps end here: the episode goes on
                if not ends:
                    shown.append(observation)
                    continue
                length = clock - begins[row]
                terminated = flag(terminated)
                if terminated or flag(truncated) or length >= limit:
                    # Terminated counts even at the time limit: there is no later value to estimate
                    if terminated:
                        terminations[row] = True
                    else:
                        truncations[row] = True
                        # A copy: `reset` may reuse its array
                        final = self._final(observation, made[-1])
                        finals.append(np.array(final, self._dtype))
                    self._results.ended(self._ends, length, terminated=terminated)
                    self._results.look_at_end(made[-1], terminated=terminated)
                    self._results.look_at_simulation(self._innermost[row])
                    episode_returns.append(returns[row])
                    episode_lengths.append(length)
                    returns[row] = 0.0
                    begins[row] = clock
                    observation = self._next_first(row)
                shown.append(observation)
            if self._shares is None:
                self._shares = shares_memory(self._uncopied)
            self._uncopied.clear()
            observations = self._joined(shown)
        except Unfit as unfit:
            raise self._results.refused(unfit, "step()") from None
        if finals:
            final_observations = np.array(finals)
        else:
            final_observations = np.empty((0, *self._shape[1:]), self._dtype)
        if clock >= self._looks_at:
            self._look(observations)
        if clock == self._compares_at:
            self._compare_shared()
        if exact:
            self._results.lost(self._precision.add(clock, exact))
        return StepResult(
            observations=observations,
            rewards=np.array(rewards, np.float32),
            terminated=terminations,
            truncated=truncations,
            final_observations=final_observations,
            episode_returns=episode_returns,
            episode_lengths=episode_lengths,
        )

    def row_states(self) -> list[Mapping[str, NDArray[Any]]]:
        """Return the state of each row, including the return and the length of its unfinished episode."""
        states: list[Mapping[str, NDArray[Any]]] = []
        for env, kept, total, begin in zip(
            self._envs, self._numbers, self._returns, self._begins, strict=True
        ):
            counted = {
                "return": np.array(total),
                "length": np.array(self._clock - begin),
            }
            states.append({**state_of(env), **kept.state(), **counted})
        return states

    def restore(
        self, states: Sequence[Mapping[str, NDArray[Any]]]
    ) -> Mapping[int, NDArray[Any]]:
        """Restore the state of each row. A row that cannot be restored begins a new episode.

        Return row -> first observation, for the rows that began a new episode.
        """
        begun: dict[int, NDArray[Any]] = {}
        # The random numbers of a checkpoint do not follow from the seeds of this process
        self._random = None
        for row, (env, state) in enumerate(zip(self._envs, states, strict=True)):
            self._returns[row] = 0.0
            self._begins[row] = self._clock
            self._results.add_numbers(self._numbers[row].restore(state))
            if restore(env, state):
                self._returns[row] = float(state["return"])
                self._begins[row] = self._clock - int(state["length"])
            else:
                begun[row] = np.array(self._first(env), self._dtype)
        return begun

    def take_statistics(self, states: Sequence[Mapping[str, NDArray[Any]]]) -> bool:
        """Give the wrappers of each row the statistics of a row of the training, and keep these from changing.

        `states`: what `row_states` returned for the rows of the training; row i gets those of row i, or begins again
        with the first one. Return whether `states` has all these statistics.
        """
        rows = zip(self._numbers, itertools.cycle(states or [{}]), strict=False)
        for kept, state in rows:
            self._results.add_numbers(kept.fix(state))
        self._lacks_numbers = not any(
            name.startswith(KEPT) for each in states for name in each
        )
        self._has_fixed = any(kept.has_fixed for kept in self._numbers)
        if not states:
            return False
        shipped = zip(self._envs, itertools.cycle(states), strict=False)
        return all(freeze_statistics(env, state) for env, state in shipped)

    def remark_on_kept_steps(self) -> None:
        """Add a remark for each wrapper of the user whose numbers have changed since the first reset.

        If the wrapper normalizes with them, steps in a replay memory were normalized with earlier numbers.
        """
        for wrapper in self._numbers[0].changed_wrappers():
            self._results.remark("kept-steps", wrapper)

    @property
    def statistics(self) -> frozenset[str]:
        """Names in `row_states` of the statistics with which wrappers normalize. A policy needs these statistics."""
        return statistics_of(self._envs[0])

    @property
    def reward_discounts(self) -> frozenset[float]:
        """The discounts of wrappers that scale rewards by discounted returns."""
        return reward_discounts(self._envs[0])

    @property
    def frames_per_s(self) -> float:
        """The number of pictures for one second of simulated time, as the first environment declares it."""
        return float(self._envs[0].metadata.get("render_fps") or _FRAMES_PER_S)

    def frame(self) -> NDArray[np.uint8]:
        """Return a picture of the first row, [height, width, 3].

        Raises ModuleNotFoundError if a library for drawing is missing.
        """
        from gymnasium.error import DependencyNotInstalled

        try:
            return np.asarray(self._envs[0].render())
        except DependencyNotInstalled as error:
            raise ModuleNotFoundError(str(error).splitlines()[0]) from error

    def _compare(self, below: RewardsBelow, counted: float) -> None:
        """Add a remark if a user's wrapper has changed the reward of a step. Then no further step is compared.

        `below`: the rewards of the environment inside the wrapper. `counted`: the reward that counts for the return.
        """
        rewards = below.take()
        inner = own_return(rewards, counted)
        if not rewards or math.isclose(inner, counted, rel_tol=1e-5, abs_tol=1e-8):
            return
        self._below = None
        got = f"{below.wrapper}: {counted:g} for {inner:g}"
        self._results.remark_of_kind("changed-reward", got)

    def _compare_shared(self) -> None:
        """Add a remark if steps have changed an object that environments share. It is compared twice."""
        self._compares_at = _LOOK_EVERY
        changed = self._shared.changed()
        if changed is not None:
            self._results.remark_of_kind("shared-object", changed)

    def _next_first(self, row: int) -> NDArray[Any]:
        """Reset the environment of a row whose episode has ended, and return its first observation.

        Add a remark if the episode of the environment within the wrappers goes on: wrappers have ended a part of it.
        """
        layer = None
        if self._layers and self._layers[row].goes_on:
            layer = self._layers[row]
        resets = 0 if layer is None else layer.resets
        first = self._first(self._envs[row])
        if layer is not None and layer.resets == resets:
            self._results.remark_of_kind("wrapper-lives", "an episode went on")
        return first

    def _first(
        self, env: gymnasium.Env[Any, Any], seed: int | None = None
    ) -> NDArray[Any]:
        """Reset an environment, and return its first observation as one array. Raises SimulatorError.

        `seed`: None: the environment goes on with its random numbers.
        """
        shown = self._begun(env, seed)
        try:
            first = self._read(shown)
        except Unfit as unfit:
            raise self._results.refused(unfit, "reset()") from None
        # A copy where another environment may write into the same array
        if self._shares is False:
            return first
        return np.array(first)

    def _begun(self, env: gymnasium.Env[Any, Any], seed: int | None) -> Any:
        """Reset an environment, and return its first observation as it is. Raises SimulatorError for another result.

        The first later resets show whether random numbers follow from the seeds; a remark says if they do not.
        """
        watched = self._random
        if watched is None or seed is not None or env is not self._envs[0]:
            return self._results.first(env, seed)
        before = watched.before_later()
        shown = self._results.first(env)
        for how, generator in watched.after_later(before):
            self._results.remark_of_kind(how, generator)
        if not watched.more:
            self._random = None
        return shown

    def _copied(self, shown: Any) -> NDArray[Any]:
        """Return an observation that is a single array, as a new array. Raises Unfit."""
        self._uncopied.append(shown)
        return np.array(self._read(shown))

    def _kept(
        self, exact: list[Any], read: Callable[[Any], Any] | None
    ) -> Callable[[Any], Any]:
        """Return a function that reads an observation like `read`, and appends its exact numbers to `exact`.

        `read`: None if observations need no conversion.
        """

        def keep(shown: Any) -> Any:
            exact.append(self._precision.values_of(shown))
            return shown if read is None else read(shown)

        return keep

    def _alike(self, shown: Any) -> Any:
        """Return an observation of a step as one array. Raises Unfit."""
        if self._encode is not None:
            return shown
        return self._read(shown)

    def _final(self, shown: Any, info: Any) -> Any:
        """Return the last observation of an episode that was truncated, as one array. Raises Unfit.

        An environment may begin its next episode in the same step. Then it returns the first observation of that one,
        and the last of the old one is in its `info`. What is there and is no observation is passed over.

        `shown`: the observation of the step. `info`: what the step returned with it.
        """
        last = self._alike(shown)
        if isinstance(info, Mapping):
            for name in _FINAL:
                with contextlib.suppress(Unfit):
                    if info.get(name) is not None:
                        last = self._read(info[name])
        return last

    def _joined(self, shown: list[Any]) -> NDArray[Any]:
        """Return the observations of all rows as a new array [B, *O].

        One comparison of shape and type checks all rows. Only if it fails, each row is read by itself. Raises Unfit.
        """
        try:
            joined = np.array(shown)
        except (TypeError, ValueError, RuntimeError):
            # Rows of different shapes, or tensors on an accelerator
            joined = _NOTHING
        if joined.shape != self._shape or joined.dtype is not self._kind:
            joined = np.array([self._alike(each) for each in shown])
            self._kind = joined.dtype
        if joined.dtype is self._dtype:
            return joined
        return joined.astype(self._dtype)

    def _look(self, observations: NDArray[Any]) -> None:
        """Add a remark if numbers of the observations are outside of the bounds that the space declares.

        The first observations and the first step are compared, then a step in 64: in each step it would take time. The
        first remark is the last one.
        """
        if self._lacks_numbers and self._clock:
            self._results.add_numbers(self._numbers[0].remarks_of_changed())
            self._lacks_numbers = False
        outside = self._bounds_seen.outside(observations)
        self._looks_at = self._clock + _LOOK_EVERY
        if self._clock == 0:
            self._looks_at = 1
        if outside is not None:
            number, low, high = outside
            self._looks_at = 1 if self._lacks_numbers else sys.maxsize
            self._results.remark_of_kind(
                "outside", f"{number:g}", low=f"{low:g}", high=f"{high:g}"
            )

    def close(self) -> None:
        """Close all environments."""
        disown(self._envs)
        close_all(self._envs, self._results.name)
