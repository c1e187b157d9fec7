"""Checks what Gymnasium environments return from `reset` and `step`, and what they take.

A result whose meaning is certain is accepted: an array of one number as a reward, the four values of the old interface
as a step. Anything else raises SimulatorError, which names environment, method, what was expected and what came.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils.step_api_compatibility import (
    convert_to_terminated_truncated_step_api,
)
from numpy.typing import NDArray

from rlplace.codes import problem
from rlplace.envs.entries import Unfit, in_words, is_image
from rlplace.errors import SimulatorError

if TYPE_CHECKING:
    import gymnasium

    from rlplace.envs.kept_numbers import NumbersRemark
    from rlplace.envs.precision import EqualPair

_LOG = logging.getLogger(__name__)
_KEY = "env.id"
_STEP = "step()"
_RESET = "reset()"
# Names under which environments give a mask, or a list, of the actions that are allowed
_MASKS = (
    "action_mask",
    "action_masks",
    "available_actions",
    "avail_actions",
    "legal_actions",
    "valid_actions",
    "valid_action_mask",
)
# Name under which the old interface says that a time limit has ended an episode
_TRUNCATED = "TimeLimit.truncated"
# Methods of environments, and of their wrappers, that return such a mask
_MASK_METHODS = ("action_masks", "get_action_mask", "valid_action_mask")
# What MuJoCo found to be huge or nan -> name of that warning
_SET_BACK = {
    "positions": "mjWARN_BADQPOS",
    "velocities": "mjWARN_BADQVEL",
    "accelerations": "mjWARN_BADQACC",
}
# Numbers may leave their bounds by as much: rounding to float32
_SHARE = 1e-3
_LEAST = 1e-6
# Episodes that are compared: an end by chance or by skill does not always come in the same step
_ENDS = 20
# Shortest episode that a time limit may end where others are shorter: games on small boards end by design
_LONG = 20
# Share of the episodes that a time limit ends
_SHARE_OF_ENDS = 0.2


class Results:
    """Reads the results of the environments of one vector.

    `name`: the environment's name for errors. `remarks`: texts about results that are accepted and unusual.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.remarks: list[str] = []
        # Kinds of remarks that were added, and that are not added again
        self._kinds: set[str] = set()

    def remark(self, error: str, got: str, **facts: Any) -> None:
        """Add a remark and write it into the log, once. `error`: name of its texts. `got`: the value in words."""
        found = problem(
            "environment-interface",
            _KEY,
            got,
            error=error,
            environment=self.name,
            **facts,
        )
        text = f"{_KEY}: {found.what}: {got}; {found.fix}"
        if text not in self.remarks:
            self.remarks.append(text)
            _LOG.warning("%s", text)

    def remark_of_kind(self, error: str, got: str, **facts: Any) -> None:
        """Add a remark as `remark` does, but only one for each `error`, whatever its values are."""
        if error not in self._kinds:
            self._kinds.add(error)
            self.remark(error, got, **facts)

    def add_numbers(self, remarks: Sequence[NumbersRemark]) -> None:
        """Add the remarks about wrappers whose numbers start again or continue to change."""
        for wrapper, how in remarks:
            self.remark(how, wrapper)

    def lost(self, lost: EqualPair | None) -> None:
        """Add a remark about two different values that are equal as float32. `lost`: the values; None: no remark."""
        if lost is None:
            return
        first, second = (f"{number:.12g}" for number in (lost.first, lost.second))
        self.remark_of_kind(
            "float32", f"{first} and {second}", offset=first, place=f"shown{lost.place}"
        )

    def ended(self, ends: Ends, length: int, *, terminated: bool) -> None:
        """Add a remark if the environment terminates all episodes after the same number of steps, or many after a most.

        `ends`: the episodes before. `length`, `terminated`: of the episode that has ended.
        """
        ends.add(length, terminated=terminated)
        if ends.constant is not None:
            self.remark_of_kind("same-length", f"{ends.constant} steps")
        if ends.longest is not None:
            self.remark_of_kind("longest-length", f"{ends.longest} steps")

    def refused(self, unfit: Unfit, method: str) -> SimulatorError:
        """Return the error that a value does not fit. `method`: the method of the environment that returned it."""
        return SimulatorError(
            problem(
                "environment-interface",
                _KEY,
                unfit.got,
                error=unfit.error,
                environment=self.name,
                method=method,
                **unfit.facts,
            )
        )

    def first(self, env: gymnasium.Env[Any, Any], seed: int | None = None) -> Any:
        """Reset an environment, and return its observation as it is. Raises SimulatorError for another result.

        `seed`: None: the environment goes on with its random numbers. Otherwise spaces are seeded as well: `reset` does
        not do that, and an environment may draw from `self.action_space.sample()`.
        """
        if seed is not None:
            seed_spaces(env, seed)
        made: Any = env.reset() if seed is None else env.reset(seed=seed)
        return self.opening(made)

    def opening(self, made: Any) -> Any:
        """Return the observation of `made`, which `reset` has returned. Raises SimulatorError for another result."""
        # What nearly all return needs no closer look
        if type(made) is tuple and len(made) == 2 and type(made[1]) is dict:
            self._look_for_masks(made)
            return made[0]
        pair = isinstance(made, tuple | list) and len(made) == 2
        if not pair or not (made[1] is None or isinstance(made[1], Mapping)):
            unfit = Unfit("reset", in_words(made))
            raise self.refused(unfit, _RESET)
        return made[0]

    def _look_for_masks(self, made: tuple[Any, ...]) -> None:
        """Add a remark if an observation or an info, the results of `reset`, has a mask of actions: none is applied.

        Environments of several agents have an observation and an info for each agent.
        """
        for place, result in zip(("observation", "info"), made, strict=True):
            if not isinstance(result, Mapping):
                continue
            inner = [each for each in result.values() if isinstance(each, Mapping)]
            for each in (result, *inner):
                mask = next((name for name in _MASKS if name in each), None)
                if mask is not None:
                    self.remark_of_kind("mask", f"{mask} in its {place}")

    def look_for_mask_methods(self, env: gymnasium.Env[Any, Any]) -> None:
        """Add a remark if an environment, or a wrapper of it, has a method that returns a mask of actions."""
        for layer in _layers(env):
            for name in _MASK_METHODS:
                if callable(getattr(type(layer), name, None)):
                    self.remark_of_kind("mask", f"a method {name}()")

    def look_at_end(self, info: Any, *, terminated: bool) -> None:
        """Add a remark if an episode is terminated, and its `info` says that a time limit has ended it.

        `info`: of the last step. Environments of the old interface say it there, and Gymnasium by `truncated`.
        """
        if terminated and type(info) is dict and info.get(_TRUNCATED) is True:
            self.remark_of_kind("limit-in-info", f"terminated, and info {_TRUNCATED}")

    def look_at_simulation(self, env: Any) -> None:
        """Add a remark if MuJoCo has set its simulation back to the start within the episode that has ended.

        MuJoCo does so if positions, velocities or accelerations are not finite or huge, and counts it as a warning. Its
        next observations are finite. `env`: the innermost environment, before its reset.
        """
        warnings = getattr(getattr(env, "data", None), "warning", None)
        # Those of mujoco_py are counted otherwise
        if warnings is None or type(env.data).__module__.split(".")[0] != "mujoco":
            return
        kinds = sys.modules["mujoco"].mjtWarning
        for what, kind in _SET_BACK.items():
            count = int(warnings[getattr(kinds, kind)].number)
            if count:
                self.remark_of_kind("set-back", f"{what}, {count} times")

    def values(self, made: Any) -> tuple[Any, Any, Any, Any]:
        """Return (observation, reward, terminated, truncated) of a step that did not return five values.

        Four values of the old interface are accepted: the third says whether the episode has ended, and the fourth, a
        mapping, whether a time limit has ended it. Raises SimulatorError for anything else.
        """
        old = isinstance(made, tuple | list) and len(made) == 4
        if not old or not isinstance(made[3], dict) or not _is_flag(made[2]):
            raise self.refused(Unfit("step", in_words(made)), _STEP)
        self.remark("old-step", "observation, reward, done, info")
        shown, reward, done, info = made
        values: Any = (shown, reward, flag(done), dict(info))
        four = convert_to_terminated_truncated_step_api(values)[:4]
        return four

    def require_reset(self, env: gymnasium.Env[Any, Any]) -> None:
        """Raise SimulatorError unless `reset` of an environment and its wrappers can be called as it is called here.

        It is called with the argument `seed` at first, and without arguments for later episodes.
        """
        for layer in _layers(env):
            if not hasattr(layer, "reset"):
                return
            try:
                signature = inspect.signature(layer.reset)
            except (TypeError, ValueError):
                # Code that is not Python has no signature
                return
            self._require_call(layer, signature, {"seed": 0})
            self._require_call(layer, signature, {})

    def require_equal_spaces(self, envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
        """Raise SimulatorError unless all environments take the same actions, and show observations of one form.

        The bounds of observations may differ: nothing depends on them.
        """
        first = envs[0]
        for env in envs[1:]:
            pairs = [(env.action_space, first.action_space)]
            if _form_of(env.observation_space) != _form_of(first.observation_space):
                pairs.append((env.observation_space, first.observation_space))
            for found, expected in pairs:
                if found != expected:
                    unfit = Unfit("unequal", str(found), expected=str(expected))
                    raise self.refused(unfit, "the constructor")

    def _require_call(
        self, layer: object, signature: inspect.Signature, given: Mapping[str, int]
    ) -> None:
        """Raise SimulatorError unless `reset`, with this signature, takes the arguments `given` and needs no others."""
        try:
            signature.bind(**given)
        except TypeError:
            got = f"{type(layer).__name__}.reset{signature}"
            raise self.refused(Unfit("reset-arguments", got), _RESET) from None


def _layers(env: gymnasium.Env[Any, Any]) -> Iterator[Any]:
    """Yield an environment, the object that is its attribute `env`, and so on, each of them once.

    Any object may be this attribute, also the environment itself.
    """
    seen: set[int] = set()
    layer: Any = env
    while layer is not None and id(layer) not in seen:
        seen.add(id(layer))
        yield layer
        layer = getattr(layer, "__dict__", {}).get("env")


def seed_spaces(env: Any, seed: int) -> None:
    """Seed the spaces of an environment, of the objects around it, and of the agents of PettingZoo."""
    for layer in _layers(env):
        agents = getattr(layer, "possible_agents", None)
        for name in ("action_space", "observation_space"):
            found = getattr(layer, name, None)
            each = [found]
            if callable(found):
                each = [found(agent) for agent in agents or ()]
            for space in each:
                if isinstance(space, spaces.Space):
                    space.seed(seed)


def _form_of(space: gymnasium.Space[Any]) -> object:
    """Return what two spaces of observations must have in common: of a Box its shape, and whether it is an image."""
    if isinstance(space, spaces.Dict):
        return {key: _form_of(entry) for key, entry in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [_form_of(entry) for entry in space.spaces]
    if isinstance(space, spaces.Box):
        return (space.shape, is_image(space))
    return space


def reward_of(reward: Any) -> float:
    """Return a reward as a number: a number, a text of one, or an array of one number. Raises Unfit for another."""
    number = reward
    if isinstance(reward, np.ndarray | list | tuple):
        number = _single(reward)
    try:
        return float(number)
    except (TypeError, ValueError, RuntimeError):
        raise Unfit("reward", in_words(reward), expected="one number") from None


def own_return(rewards: Sequence[Any], learned: float) -> float:
    """Return the sum of an environment's own rewards. `learned`: what wrappers have made of them.

    It is returned for rewards of several numbers, of which a wrapper makes one: there is no other return.
    """
    try:
        return sum(map(reward_of, rewards))
    except Unfit:
        return learned


def flag(ended: Any) -> bool:
    """Return whether an episode has ended, from `terminated` or `truncated` of a step. None means that it goes on.

    Raises Unfit for anything but a bool, 0, 1 or an array of one of them.
    """
    if ended is True or ended is False:
        return bool(ended)
    if ended is None:
        return False
    if isinstance(ended, bool | np.bool_):
        return bool(ended)
    number = _single(ended)
    if number is None or number not in (0, 1):
        raise Unfit("ended", in_words(ended), expected="a bool")
    return bool(number)


def _is_flag(ended: Any) -> bool:
    """Return whether `flag` accepts a value, except None."""
    return ended is not None and _single(ended) in (0, 1)


def _single(value: Any) -> Any:
    """Return the number in an array, a list or a tuple of one number; None if it is not one number."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    if array.size != 1 or array.dtype.kind not in "biuf":
        return None
    return array.reshape(-1)[0].item()


class Ends:
    """Compares the lengths of terminated episodes, until one is truncated: that environment tells its time limits.

    `constant`: the length that the first 20 episodes have in common; None: not known yet, or there is none. `longest`:
    the greatest length so far, if many episodes have it and none is longer; None: there is no such length. Such an end
    comes from a limit: ends by chance or by skill have other lengths, and the longest episode is the only one.
    """

    def __init__(self) -> None:
        self.constant: int | None = None
        self.longest: int | None = None
        self._is_over = False
        # Whether all lengths so far are the same
        self._alike = True
        self._greatest = 0
        # Episodes so far, and those with the greatest length
        self._count = 0
        self._equal = 0

    def add(self, length: int, *, terminated: bool) -> None:
        """Add the length of an episode. `terminated`: whether the episode terminated; False: it was truncated."""
        if self._is_over:
            return
        # An episode of one step ends by design
        if not terminated or length == 1:
            self._is_over = True
            return
        self._count += 1
        self._alike = self._alike and self._greatest in (0, length)
        if length > self._greatest:
            self._greatest = length
            self._equal = 0
        if length == self._greatest:
            self._equal += 1
        if self._equal < _ENDS:
            return
        if self._alike:
            self.constant = length
            self._is_over = True
        elif length >= _LONG and self._equal >= _SHARE_OF_ENDS * self._count:
            self.longest = self._greatest
            self._is_over = True


class Bounds:
    """The bounds that a space declares for the numbers of its observations.

    `low`, `high`: the bounds of the float32 numbers of an observation.
    """

    def __init__(self, low: NDArray[np.float32], high: NDArray[np.float32]) -> None:
        self._low = low
        self._high = high
        # Rounding is allowed
        with np.errstate(over="ignore", invalid="ignore"):
            self._least = low - (_SHARE * np.abs(low) + _LEAST)
            self._most = high + (_SHARE * np.abs(high) + _LEAST)
        self._any = bool(np.isfinite(low).any() or np.isfinite(high).any())

    def outside(self, observations: NDArray[Any]) -> tuple[float, float, float] | None:
        """Return (number, lower bound, upper bound) of a number outside of its bounds; None if all are within.

        `observations`: [B, ...], float32 numbers, or bytes that begin with these numbers.
        """
        if not self._any:
            return None
        numbers = observations.reshape(len(observations), -1)
        if numbers.dtype == np.uint8:
            numbers = np.ascontiguousarray(numbers[:, : 4 * len(self._low)])
            numbers = numbers.view(np.float32)
        found = np.argwhere((numbers < self._least) | (numbers > self._most))
        if not len(found):
            return None
        row, at = found[0]
        return float(numbers[row, at]), float(self._low[at]), float(self._high[at])


def shares_memory(shown: Sequence[Any]) -> bool:
    """Return whether two of the observations may be in the same memory, as far as they are arrays."""
    places = sorted(
        (each.__array_interface__["data"][0], each.nbytes)
        for each in shown
        if isinstance(each, np.ndarray)
    )
    return any(after[0] < before[0] + before[1] for before, after in pairwise(places))


def close_all(envs: Sequence[gymnasium.Env[Any, Any]], name: str) -> None:
    """Close environments. An error of `close` is written into the log: their work is done.

    `name`: the environments' name for the log.
    """
    for env in envs:
        try:
            env.close()
        except Exception as error:  # noqa: BLE001  # whatever the user's environment raises when it is closed
            reason = f"{type(error).__name__}: {error}"
            found = problem(
                "environment-interface", _KEY, reason, error="close", environment=name
            )
            _LOG.warning("%s: %s: %s; %s", _KEY, found.what, reason, found.fix)
