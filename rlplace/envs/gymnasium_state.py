"""Save and restore the state of a Gymnasium environment in the middle of an episode, as named arrays.

MuJoCo and classic control are restored bit for bit. So is a custom environment that has two methods::

    def checkpoint_state(self) -> dict[str, NumPy array or number]: ...
    def restore_state(self, state: dict[str, NumPy array]) -> None: ...      # after a reset

Three things are restored for every environment: random numbers (`self.np_random`), the statistics of Gymnasium's
`NormalizeObservation` and `NormalizeReward`, and the steps that `TimeLimit` has counted. A custom wrapper with a state
needs the two methods too. They then save and restore the wrapper and the environment inside it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import gymnasium

# Names of entries in a state: random numbers, and what custom environments return
_RANDOM = "random"
_OWN = "own."
_STATISTICS = "statistics."
_ELAPSED = "elapsed."
# Attribute of a wrapper of Gymnasium that has statistics -> the names of its further arrays
_NORMALIZING = {"obs_rms": (), "return_rms": ("discounted_reward",)}
# Positions that MuJoCo computes in a step. Rewards read the values of the step before
_DERIVED = ("xpos", "xipos")


def state_of(env: gymnasium.Env[Any, Any]) -> dict[str, NDArray[Any]]:
    """Return the state that determines the next steps of an environment, name -> array.

    If the environment cannot give its state, return only the state of its random numbers.
    """
    # Gymnasium's own generator is a PCG64
    layer = _stateful_layer(env)
    state = dict[str, NDArray[Any]]()
    bits = env.unwrapped.np_random.bit_generator
    if isinstance(bits, np.random.PCG64):
        state[_RANDOM] = np.array(json.dumps(bits.state))
    for name, value in _statistics_of(env).items():
        state[_STATISTICS + name] = value
    for number, limit in enumerate(_time_limits(env)):
        state[f"{_ELAPSED}{number}"] = np.array(limit._elapsed_steps or 0)
    # The state of the simulation: by the custom method, or of a library known here
    if hasattr(layer, "checkpoint_state"):
        for name, value in layer.checkpoint_state().items():
            state[_OWN + name] = np.array(value)
    elif _shipped(layer, "mujoco"):
        import mujoco

        model = layer.model
        data = layer.data
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        whole = np.empty(mujoco.mj_stateSize(model, kind))
        mujoco.mj_getState(model, data, whole, kind)
        state["mujoco"] = whole
        for name in _DERIVED:
            state[name] = getattr(data, name).copy()
    elif _shipped(layer, "classic_control"):
        state["classic_control"] = np.array(layer.state)
    return state


def restore(env: gymnasium.Env[Any, Any], state: Mapping[str, NDArray[Any]]) -> bool:
    """Put an environment into a state that `state_of` returned. The environment has to be reset before.

    Return True if the episode was restored, False if only the random numbers were.
    """
    layer = _stateful_layer(env)
    _set_statistics(env, state)
    if _RANDOM in state:
        env.unwrapped.np_random.bit_generator.state = json.loads(state[_RANDOM].item())
    own = {
        name.removeprefix(_OWN): value
        for name, value in state.items()
        if name.startswith(_OWN)
    }
    if own and hasattr(layer, "restore_state"):
        layer.restore_state(own)
    elif _shipped(layer, "mujoco") and "mujoco" in state:
        import mujoco

        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_setState(layer.model, layer.data, state["mujoco"], kind)
        for name in _DERIVED:
            getattr(layer.data, name)[:] = state[name]
    elif _shipped(layer, "classic_control") and "classic_control" in state:
        layer.state = state["classic_control"].copy()
    else:
        return False
    # An older checkpoint has no steps of `TimeLimit`; the steps of the episode take their place
    for number, limit in enumerate(_time_limits(env)):
        elapsed = state.get(f"{_ELAPSED}{number}", state.get("length", 0))
        limit._elapsed_steps = int(elapsed)
    return True


# ── statistics of wrappers ───────────────────────────────────────────────────────────────────────────────────────────


def statistics_of(env: gymnasium.Env[Any, Any]) -> frozenset[str]:
    """Return the names in a state of the statistics of Gymnasium's normalizing wrappers around `env`."""
    return frozenset(_STATISTICS + name for name in _statistics_of(env))


def freeze_statistics(
    env: gymnasium.Env[Any, Any], state: Mapping[str, NDArray[Any]]
) -> bool:
    """Set the statistics of the wrappers of `env` to those in `state`, and stop their updates.

    Return whether `state` has all the statistics. If it has not, nothing is changed.
    """
    if not statistics_of(env) <= state.keys():
        return False
    for wrapper, _, _ in _normalizing(env):
        wrapper.update_running_mean = False
    _set_statistics(env, state)
    return True


def reward_discounts(env: gymnasium.Env[Any, Any]) -> frozenset[float]:
    """Return the discounts of the wrappers around `env` that normalize rewards by discounted returns."""
    found = set()
    for wrapper, attribute, _ in _normalizing(env):
        if attribute == "return_rms":
            found.add(float(wrapper.gamma))
    return frozenset(found)


def _normalizing(env: gymnasium.Env[Any, Any]) -> Iterator[tuple[Any, str, str]]:
    """Yield (wrapper, attribute, name in a state) for the statistics of each normalizing wrapper of Gymnasium.

    The outermost wrapper comes first. The name consists of the attribute and a number among attributes with the same
    name. So statistics of observations and of rewards cannot be exchanged.
    """
    found = Counter[str]()
    layer: Any = env
    while hasattr(layer, "env"):
        if _has_statistics(type(layer)):
            for attribute in _NORMALIZING:
                if attribute in vars(layer):
                    yield layer, attribute, f"{attribute}.{found[attribute]}."
                    found[attribute] += 1
        layer = layer.env


def _has_statistics(kind: type) -> bool:
    """Return whether a class is a normalizing wrapper of Gymnasium, or derived from one."""
    return any(
        base.__module__.startswith("gymnasium.wrappers.")
        and "update_running_mean" in vars(base)
        for base in kind.__mro__
    )


def _statistics_of(env: gymnasium.Env[Any, Any]) -> dict[str, NDArray[Any]]:
    """Return the statistics of all wrappers as arrays by name."""
    found: dict[str, NDArray[Any]] = {}
    for wrapper, attribute, name in _normalizing(env):
        running = getattr(wrapper, attribute)
        for number in ("mean", "var", "count"):
            found[name + number] = np.array(getattr(running, number))
        for further in _NORMALIZING[attribute]:
            found[name + further] = np.array(getattr(wrapper, further))
    return found


def _set_statistics(
    env: gymnasium.Env[Any, Any], state: Mapping[str, NDArray[Any]]
) -> None:
    """Set the statistics of each wrapper to those in `state`, if `state` has them."""
    for wrapper, attribute, name in _normalizing(env):
        name = _STATISTICS + name
        if f"{name}mean" not in state:
            continue
        running = getattr(wrapper, attribute)
        running.mean = state[f"{name}mean"].copy()
        running.var = state[f"{name}var"].copy()
        running.count = float(state[f"{name}count"])
        for further in _NORMALIZING[attribute]:
            setattr(wrapper, further, state[name + further].copy())


# ── time limits ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _time_limits(env: gymnasium.Env[Any, Any]) -> Iterator[Any]:
    """Yield each `TimeLimit` wrapper of Gymnasium around `env`, the outermost first."""
    from gymnasium.wrappers import TimeLimit

    layer: Any = env
    while hasattr(layer, "env"):
        if type(layer) is TimeLimit:
            yield layer
        layer = layer.env


# ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _stateful_layer(env: gymnasium.Env[Any, Any]) -> Any:
    """Return the environment without its outer wrappers of Gymnasium and rlplace that need no saving here.

    These wrappers have no state, or only statistics and counted steps, which other functions save.
    """
    from gymnasium import wrappers

    from rlplace.envs.layers import Layer
    from rlplace.envs.reach import Nearer
    from rlplace.envs.wrappers import Shown

    stateless = (
        Layer,
        Nearer,
        Shown,
        wrappers.NormalizeObservation,
        wrappers.NormalizeReward,
        wrappers.OrderEnforcing,
        wrappers.PassiveEnvChecker,
        wrappers.TimeLimit,
        wrappers.TransformAction,
        wrappers.TransformObservation,
        wrappers.TransformReward,
    )
    while isinstance(env, stateless) and type(env).__module__.startswith(
        ("gymnasium.", "rlplace.envs.")
    ):
        env = env.env
    return env


def _shipped(layer: object, library: str) -> bool:
    """Return whether the class of `layer` is defined in Gymnasium itself. A user's subclass may have more state.

    `library`: name of a module of `gymnasium.envs`, such as "mujoco".
    """
    return type(layer).__module__.startswith(f"gymnasium.envs.{library}.")
