"""The state of a Gymnasium environment in the middle of an episode, as named arrays, and back.

Restored are MuJoCo's and classic control's, to the bit, and environments of your own with two methods::

    def checkpoint_state(self) -> dict[str, NumPy array or number]: ...
    def restore_state(self, state: dict[str, NumPy array]) -> None: ...      # after a reset

Their random numbers (`self.np_random`) are restored in any case. A wrapper that has a state needs these methods too,
for itself and all that it wraps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import gymnasium

_RANDOM = "random"
_OWN = "own."
# Of MuJoCo: rewards take what these were before a step, and they lag behind the
# positions
_DERIVED = (
    "xpos",
    "xipos",
)


def state_of(env: gymnasium.Env[Any, Any]) -> dict[str, NDArray[Any]]:
    """Return what its next steps follow from; where it is not known, its random numbers alone."""
    layer = _teller(env)
    state = dict[str, NDArray[Any]]()
    bits = env.unwrapped.np_random.bit_generator
    if isinstance(bits, np.random.PCG64):  # as Gymnasium makes it
        state[_RANDOM] = np.array(json.dumps(bits.state))
    if hasattr(layer, "checkpoint_state"):
        state |= {
            _OWN + name: np.array(value)
            for name, value in layer.checkpoint_state().items()
        }
    elif _shipped(layer, "mujoco"):
        import mujoco

        model = layer.model
        data = layer.data
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        whole = np.empty(mujoco.mj_stateSize(model, kind))
        mujoco.mj_getState(model, data, whole, kind)
        state |= {
            "mujoco": whole,
            **{name: getattr(data, name).copy() for name in _DERIVED},
        }
    elif _shipped(layer, "classic_control"):
        state["classic_control"] = np.array(layer.state)
    return state


def restore(env: gymnasium.Env[Any, Any], state: Mapping[str, NDArray[Any]]) -> bool:
    """Bring the environment, after a reset, to a state of `state_of`; False where all but its random numbers lacks."""
    layer = _teller(env)
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

        mujoco.mj_setState(
            layer.model,
            layer.data,
            state["mujoco"],
            mujoco.mjtState.mjSTATE_INTEGRATION,
        )
        for name in _DERIVED:
            getattr(layer.data, name)[:] = state[name]
    elif _shipped(layer, "classic_control") and "classic_control" in state:
        layer.state = state["classic_control"].copy()
    else:
        return False
    return True


def _teller(env: gymnasium.Env[Any, Any]) -> Any:
    """Return the outermost layer that may have a state."""
    from gymnasium import wrappers

    from rlplace.envs.wrappers import Shown

    stateless = (
        Shown,
        wrappers.OrderEnforcing,
        wrappers.PassiveEnvChecker,
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
    """Tell whether Gymnasium itself has this class: of a class of somebody else, not all of the state is known."""
    return type(layer).__module__.startswith(f"gymnasium.envs.{library}.")
