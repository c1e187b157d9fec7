"""Wrappers that change nothing, and that are put between an environment and the wrappers around it.

`OwnRewards` records the environment's own rewards, and `RewardsBelow` those that a user's wrapper may change.
`InnerCheck` checks observations before a wrapper reads them::

    NormalizeObservation          expects observations in the space of the environment below
    └─ InnerCheck               refuses an observation that is not in that space
           └─ the user's environment

Without the check, a wrapper would turn a wrong observation into one that is valid in the wrapper's own space.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
from gymnasium import wrappers

from rlplace.envs.entries import Reader, Unfit
from rlplace.envs.gymnasium_results import Results
from rlplace.envs.observations import encoding_of

_Wrapper = gymnasium.Wrapper[Any, Any, Any, Any]
_STEP = "step()"
_RESET = "reset()"
_VALUES_OF_STEP = 5
# Wrappers of Gymnasium that do not change observations
_PASSING = (
    wrappers.Autoreset,
    wrappers.HumanRendering,
    wrappers.NormalizeReward,
    wrappers.OrderEnforcing,
    wrappers.PassiveEnvChecker,
    wrappers.RecordEpisodeStatistics,
    wrappers.RecordVideo,
    wrappers.RenderCollection,
    wrappers.TimeLimit,
)
# Wrappers of Gymnasium that may correct an invalid observation, or that leave out parts of it
_MENDING = (
    wrappers.AddRenderObservation,
    wrappers.FilterObservation,
    wrappers.TransformObservation,
)


class Layer(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that changes nothing. Reading and writing an attribute goes to the environment below.

    So a user's wrapper can use `self.env` as if the layer were not there.
    """

    # Attributes of the layer itself
    _OWN: ClassVar[frozenset[str]] = frozenset(
        ("env", "_action_space", "_observation_space", "_metadata", "_cached_spec")
    )

    def __getattr__(self, name: str) -> Any:
        # `copy` looks up methods before the attribute `env` exists
        if name in self._OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.env, name, value)

    def reset(self, *args: Any, **options: Any) -> Any:
        """Reset the environment with the arguments that the layer gets."""
        return self.env.reset(*args, **options)


class _RecordedRewards(Layer):
    """A layer that records the rewards of the environment below, whether its episode goes on, and its resets."""

    _OWN = Layer._OWN | {"_rewards", "_goes_on", "_resets"}

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._rewards: list[Any] = []
        self._goes_on = False
        self._resets = 0

    @property
    def goes_on(self) -> bool:
        """Whether the last call was a step that did not end the episode of the environment below."""
        return self._goes_on

    @property
    def resets(self) -> int:
        """The number of resets of the environment below."""
        return self._resets

    def reset(self, *args: Any, **options: Any) -> Any:
        """Reset the environment with the arguments that the layer gets."""
        self._resets += 1
        self._goes_on = False
        return super().reset(*args, **options)

    def step(self, action: Any) -> Any:
        """Step the environment, and record the reward."""
        result = self.env.step(action)
        self._rewards.append(result[1])
        # Terminated and truncated; the old interface has one value
        self._goes_on = not any(map(_is_true, result[2:-1]))
        return result

    def take(self) -> list[Any]:
        """Return the rewards since the last call. They are several if an outer wrapper makes several steps at once."""
        rewards = self._rewards
        self._rewards = []
        return rewards


class OwnRewards(_RecordedRewards):
    """A layer that records the environment's own rewards, below all wrappers that change rewards."""


class RewardsBelow(_RecordedRewards):
    """A layer that records the rewards below a user's wrapper with its own `step`, whose rewards count as own ones."""

    _OWN = _RecordedRewards._OWN | {"_wrapper"}

    def __init__(self, env: gymnasium.Env[Any, Any], wrapper: str) -> None:
        """`wrapper`: name of the wrapper outside."""
        super().__init__(env)
        self._wrapper = wrapper

    @property
    def wrapper(self) -> str:
        """Name of the wrapper outside."""
        return self._wrapper


class InnerCheck(Layer):
    """A layer that checks the results of an environment before a wrapper reads them."""

    _OWN = Layer._OWN | {"_results", "_read", "_wrapper"}

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        *,
        results: Results,
        read: Reader,
        wrapper: str | None,
    ) -> None:
        """`read`: reads an observation of `env`.

        `wrapper`: name of the wrapper outside, if it may correct invalid observations: then an invalid observation only
        leads to a remark. None: an invalid observation raises SimulatorError.
        """
        super().__init__(env)
        self._results = results
        self._read = read
        self._wrapper = wrapper

    def reset(self, *args: Any, **options: Any) -> Any:
        """Reset the environment, and check the first observation. Raises SimulatorError."""
        made = self.env.reset(*args, **options)
        if self._wrapper is None:
            self._check(self._results.opening(made), _RESET)
        elif isinstance(made, tuple) and len(made) == 2:
            self._check(made[0], _RESET)
        return made

    def step(self, action: Any) -> Any:
        """Step the environment, and check the observation. Raises SimulatorError."""
        made: Any = self.env.step(action)
        if isinstance(made, tuple) and len(made) == _VALUES_OF_STEP:
            self._check(made[0], _STEP)
        elif self._wrapper is None:
            # Convert the four values of the old interface to the five that wrappers expect
            made = (*self._results.values(made), made[3])
            self._check(made[0], _STEP)
        return made

    def _check(self, shown: Any, method: str) -> None:
        """Raise SimulatorError or add a remark if an observation is not in its space.

        `shown`: the observation. `method`: the method that returned it.
        """
        try:
            self._read(shown)
        except Unfit as unfit:
            if self._wrapper is None:
                raise self._results.refused(unfit, method) from None
            expected = unfit.facts.get("expected")
            # Add only one remark, even if every observation is invalid
            self._results.remark_of_kind(
                "below-wrapper",
                unfit.got,
                method=method,
                expected=expected,
                wrapper=self._wrapper,
            )


def check_below_wrappers(env: gymnasium.Env[Any, Any], results: Results) -> None:
    """Insert an `InnerCheck` below each wrapper that reads observations from code outside Gymnasium.

    Gymnasium's wrappers expect observations in the declared space, so an invalid observation raises SimulatorError. A
    user's wrapper may correct observations, so an invalid observation leads to one remark. `results`: makes the errors
    and collects the remarks.
    """
    reading = [wrapper for wrapper in wrappers_of(env) if not _passes(wrapper)]
    # Each wrapper reads the observations of the next one; the last wrapper reads those of the environment
    for wrapper, read in itertools.zip_longest(reading, reading[1:]):
        if read is not None and _is_certain(read):
            continue
        encoding = encoding_of(wrapper.env.observation_space)
        if encoding is None or _converts(wrapper):
            continue
        mending = None
        if not _is_certain(wrapper):
            mending = type(wrapper).__name__
        wrapper.env = InnerCheck(
            wrapper.env, results=results, read=encoding.read, wrapper=mending
        )


def with_own_rewards(
    env: gymnasium.Env[Any, Any], *, outside: bool
) -> gymnasium.Env[Any, Any]:
    """Return `env` with a layer `OwnRewards`, if wrappers may change its rewards.

    The layer is below all wrappers in `env` that only change rewards, such as NormalizeReward. A wrapper with its own
    `step` may be a part of the task, so its rewards count; a layer `RewardsBelow` shows whether it changes them.
    `outside`: whether wrappers will be put around `env`.
    """
    changing = [wrapper for wrapper in wrappers_of(env) if _changes_rewards(wrapper)]
    counted = changing[-1].env if changing else env
    stepping = [wrapper for wrapper in wrappers_of(counted) if _steps_itself(wrapper)]
    if stepping:
        innermost = stepping[-1]
        innermost.env = RewardsBelow(innermost.env, type(innermost).__name__)
    if changing:
        changing[-1].env = OwnRewards(changing[-1].env)
        return env
    return OwnRewards(env) if outside else env


def own_rewards(env: gymnasium.Env[Any, Any]) -> OwnRewards | None:
    """Return the layer in `env` that records the environment's own rewards; None if there is none."""
    for wrapper in wrappers_of(env):
        if isinstance(wrapper, OwnRewards):
            return wrapper
    return None


def rewards_below(env: gymnasium.Env[Any, Any]) -> RewardsBelow | None:
    """Return the layer in `env` below a user's wrapper with its own `step`; None if there is none."""
    for wrapper in wrappers_of(env):
        if isinstance(wrapper, RewardsBelow):
            return wrapper
    return None


def wrappers_of(env: gymnasium.Env[Any, Any]) -> Iterator[_Wrapper]:
    """Yield each wrapper around an environment, the outermost one first."""
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper) and "env" in vars(layer):
        yield layer
        layer = layer.env


def _is_true(ended: Any) -> bool:
    """Return whether a flag that says that an episode has ended is true. Anything else counts as true."""
    try:
        return bool(ended)
    except (TypeError, ValueError, RuntimeError):
        return True


def _changes_rewards(wrapper: _Wrapper) -> bool:
    """Return whether a wrapper changes rewards and nothing else."""
    kind = type(wrapper)
    if isinstance(wrapper, wrappers.NormalizeReward):
        return kind.step is wrappers.NormalizeReward.step
    of_rewards = isinstance(wrapper, gymnasium.RewardWrapper)
    return of_rewards and kind.step is gymnasium.RewardWrapper.step


def _steps_itself(wrapper: _Wrapper) -> bool:
    """Return whether a wrapper is the user's and has a `step` of its own, which may change rewards."""
    kind = type(wrapper)
    if kind.__module__.startswith(("gymnasium.", "rlplace.envs.")):
        return False
    inherited = (
        gymnasium.Wrapper.step,
        gymnasium.ActionWrapper.step,
        gymnasium.ObservationWrapper.step,
    )
    return kind.step not in inherited


def _passes(wrapper: _Wrapper) -> bool:
    """Return whether a wrapper leaves the observations of the environment below unchanged."""
    kind = type(wrapper)
    if isinstance(wrapper, Layer) or kind in _PASSING:
        return True
    steps = (gymnasium.ActionWrapper.step, gymnasium.RewardWrapper.step)
    return kind.step in steps and kind.reset is gymnasium.Wrapper.reset


def _is_certain(layer: gymnasium.Env[Any, Any]) -> bool:
    """Return whether `layer` is a wrapper of Gymnasium whose observations are always in its declared space."""
    kind = type(layer)
    return kind.__module__.startswith("gymnasium.wrappers.") and kind not in _MENDING


def _converts(wrapper: _Wrapper) -> bool:
    """Return whether a wrapper converts arrays of another library, such as tensors on an accelerator."""
    return any(base.__name__ == "ArrayConversion" for base in type(wrapper).__mro__)
