"""Demonstrations: steps of others in a file of NumPy arrays, which an off-policy job learns from beside its own.

::

    observations, next_observations    [N, *O]    as the simulator shows them
    actions                            [N, *A]    as the simulator takes them
    rewards, terminated, truncated     [N]        neighbouring steps follow each other, unless an episode ends between

Letters: N steps, O observation shape, A action shape.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.algo.replay import Steps
from rlplace.codes import config_error
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces

KEY = "replay.demonstrations"


def read_demonstrations(path: str, spaces: Spaces) -> Steps:
    """Return the steps of a file as those of one environment, with actions as the memory has them.

    Raises ConfigError if the file cannot be read, lacks an array, or has the spaces of another simulator.
    """
    arrays = _arrays(path)
    actions = spaces.actions
    shapes = {
        "observations": spaces.observation_shape,
        "next_observations": spaces.observation_shape,
        "actions": getattr(actions, "shape", ()),
        "rewards": (),
        "terminated": (),
        "truncated": (),
    }
    missing = [name for name in shapes if name not in arrays]
    if missing:
        raise config_error(
            "bad-demonstrations",
            KEY,
            path,
            error="missing",
            missing=", ".join(missing),
            names=", ".join(shapes),
        )
    count = len(np.atleast_1d(arrays["rewards"]))
    for name, shape in shapes.items():
        if arrays[name].shape != (count, *shape):
            raise config_error(
                "bad-demonstrations",
                KEY,
                f"{path}: {name} {list(arrays[name].shape)}",
                error="shape",
                name=name,
                expected=[count, *shape],
            )
        if not np.isfinite(arrays[name]).all():
            raise config_error(
                "bad-demonstrations", KEY, f"{path}: {name}", error="finite", name=name
            )
    return Steps(
        observations=arrays["observations"].astype(np.float32)[:, None],
        actions=_scaled(arrays["actions"], spaces, path)[:, None],
        rewards=arrays["rewards"].astype(np.float32)[:, None],
        terminated=arrays["terminated"].astype(np.bool_)[:, None],
        truncated=arrays["truncated"].astype(np.bool_)[:, None],
        next_observations=arrays["next_observations"].astype(np.float32)[:, None],
        begins=np.zeros(1, np.bool_),
    )


def require_sequence(path: str, steps: Steps) -> None:
    """Raise ConfigError if a step is followed by one of another place, though no episode ends between the two.

    Sums of several rewards would go on from one episode to another, or over a gap. `path`: the file of `steps`.
    """
    after = steps.next_observations[:-1, 0]
    following = steps.observations[1:, 0]
    ended = np.logical_or(steps.terminated, steps.truncated)[:-1, 0]
    alike = np.isclose(after, following, rtol=1e-4, atol=1e-5)
    follows = alike.reshape(len(after), -1).all(axis=1)
    broken = np.flatnonzero(~np.logical_or(follows, ended))
    if len(broken):
        raise config_error(
            "bad-demonstrations",
            KEY,
            f"{path}: {len(broken)} of {len(ended) + 1} steps, the first is {broken[0]}",
            error="gaps",
            step=int(broken[0]),
            following=int(broken[0]) + 1,
        )


def _arrays(path: str) -> dict[str, NDArray[Any]]:
    try:
        with np.load(Path(path).expanduser(), allow_pickle=False) as stored:
            return dict(stored)
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise config_error(
            "bad-demonstrations", KEY, path, error="unreadable", reason=str(error)
        ) from error


def _scaled(actions: NDArray[Any], spaces: Spaces, path: str) -> NDArray[Any]:
    """Return actions as the memory has them: choices, or elements of [-1, 1]. Raises ConfigError for others."""
    of = spaces.actions
    if isinstance(of, ContinuousActions):
        low = np.array(of.low, np.float32).reshape(of.shape)
        high = np.array(of.high, np.float32).reshape(of.shape)
        outside = (actions < low - 1e-4) | (actions > high + 1e-4)
        if outside.any():
            raise config_error(
                "bad-demonstrations",
                KEY,
                f"{path}: actions from {actions.min():g} to {actions.max():g}",
                error="bounds",
                low=f"{low.min():g}",
                high=f"{high.max():g}",
            )
        # An element whose bounds are equal has no choice: the policy's one counts for nothing
        span = np.where(high > low, high - low, np.inf)
        scaled = 2 * (actions - low) / span - 1
        return scaled.clip(-1.0, 1.0).astype(np.float32)
    assert isinstance(of, DiscreteActions), "a rule of the job has refused it"
    # The memory counts choices from 0, the simulator from its first one
    choices = actions.astype(np.int64) - of.first
    outside = choices.min() < 0 or choices.max() >= of.n
    if outside or (choices + of.first != actions).any():
        raise config_error(
            "bad-demonstrations",
            KEY,
            f"{path}: actions from {actions.min():g} to {actions.max():g}",
            error="bounds",
            low=of.first,
            high=of.first + of.n - 1,
        )
    return choices
