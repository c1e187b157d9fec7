"""Finds environments whose random numbers do not follow from the seeds that they get at their first reset.

The generators of an environment are compared, not its observations: an environment that begins each episode in the same
state may do so by design, and then draws nothing. A generator counts only if a later reset finds it used, or replaces
it::

    reset(seed=3), reset(seed=8)      two environments       equal states afterwards: both draw the same numbers
    reset()                           a later episode        the state after an earlier reset: it was seeded anew
    a seed of 128 bits                                       the operating system has drawn it: no run can repeat it
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np

from rlplace.envs.layers import wrappers_of

# Seeds of a run are smaller; those of the operating system have 128 bits, and one in 2^64 of them is smaller too
_DRAWN_BY_SYSTEM = 1 << 64
# Later resets that are compared: the first may have been the only one with the seed that it was given
_LATER = 3
_OF_PROCESS = {"numpy.random": np.random, "random": random}


class RandomRemark(NamedTuple):
    """A remark about a generator of random numbers.

    `how`: "same-numbers": environments or episodes with different seeds draw the same numbers. "unseeded-numbers": the
    operating system has seeded the generator, so the same seed of a run gives other episodes. `generator`: its name.
    """

    how: Literal["same-numbers", "unseeded-numbers"]
    generator: str


class RandomNumbers:
    """Compares the random generators of the environments of one vector after their resets.

    `more`: whether later resets are still to be compared.
    """

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
        """Take the generators after the first reset of all environments, each with another seed."""
        self._env = envs[0]
        self._resets = 0
        self.more = True
        # Name -> the generator after the last reset of the first environment, and its states after all resets
        self._last: dict[str, Any] = {}
        self._states: dict[str, set[Any]] = {}
        self._note()
        # Names of the generators that two environments have in the same state
        self._equal: set[str] = set()
        for name, generator in _generators(envs[1]) if len(envs) > 1 else ():
            # Environments may share a generator
            shared = generator is self._last.get(name)
            if not shared and _state(generator) in self._states.get(name, ()):
                self._equal.add(name)

    def before_later(self) -> dict[str, Any]:
        """Return the states of the first environment's generators: it is about to begin another episode."""
        return {name: _state(each) for name, each in _all_generators(self._env)}

    def after_later(self, before: dict[str, Any]) -> list[RandomRemark]:
        """Return what is certain after the first environment has begun another episode, without a seed.

        `before`: what `before_later` returned.
        """
        found: list[RandomRemark] = []
        for name, generator in _all_generators(self._env):
            if name not in self._last:
                continue
            state = _state(generator)
            replaced = generator is not self._last[name]
            untouched = not replaced and state == before.get(name)
            if untouched and state in self._states[name]:
                # Not used so far
                continue
            if state in self._states[name] or name in self._equal:
                found.append(RandomRemark("same-numbers", name))
            elif _seed_of(generator) >= _DRAWN_BY_SYSTEM:
                found.append(RandomRemark("unseeded-numbers", name))
        self._note()
        self._resets += 1
        self.more = self._resets < _LATER
        return found

    def _note(self) -> None:
        for name, generator in _all_generators(self._env):
            self._last[name] = generator
            self._states.setdefault(name, set()).add(_state(generator))


def _all_generators(env: gymnasium.Env[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, generator) for the generators of the environment, and for those of the process."""
    yield from _generators(env)
    yield from _OF_PROCESS.items()


def _generators(env: gymnasium.Env[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, generator) for each generator that is an attribute of the environment or of one of its wrappers."""
    # An environment of PettingZoo may have no `unwrapped`
    for layer in (*wrappers_of(env), getattr(env, "unwrapped", env)):
        for attribute, value in getattr(layer, "__dict__", {}).items():
            kinds = (np.random.Generator, np.random.RandomState, random.Random)
            if isinstance(value, kinds):
                yield f"{type(layer).__name__}.{attribute.removeprefix('_')}", value


def _state(generator: Any) -> str:
    """Return the state of a generator, as a text that can be compared."""
    if isinstance(generator, np.random.Generator):
        return _text(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState) or generator is np.random:
        return _text(generator.get_state(legacy=False))
    return repr(generator.getstate())


def _text(state: Any) -> str:
    """Return the state of a bit generator, whose arrays may be long, as a text."""
    if isinstance(state, dict):
        return repr({name: _text(value) for name, value in state.items()})
    if isinstance(state, np.ndarray):
        return state.tobytes().hex()
    return repr(state)


def _seed_of(generator: Any) -> int:
    """Return the seed of a generator of NumPy; 0 if it is not known."""
    bits = getattr(generator, "bit_generator", None)
    entropy = getattr(getattr(bits, "seed_seq", None), "entropy", 0)
    return entropy if isinstance(entropy, int) else 0
