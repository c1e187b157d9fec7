"""Units of SmolVLA: what the network reads of a robot and makes for it is normalised by statistics of its data set.

::

    state of the robot  [S] ▶ (state - mean) / deviation ▶ zeros behind it, [32] ▶ the network
    action of the robot [A] ◀ action * deviation + mean  ◀ the first A numbers, [32] ◀ the network

The statistics are those of the processors that lerobot (commit 7427f31) stores beside the weights:
`policy_preprocessor.json` names a file with `observation.state.mean`, and `policy_postprocessor.json` a file with
`action.mean`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from numpy.typing import NDArray

from rlplace.json_text import parsed_object

# Bytes of the length of a header
_LENGTH = 8
# lerobot adds it to deviations, so that none is 0
_LEAST = 1e-8
_STATE = "observation.state"
_ACTION = "action"
# File of the processors with the statistics, and the name of their step, of state and of actions
_PROCESSORS: Mapping[str, tuple[str, str]] = {
    _STATE: ("policy_preprocessor.json", "normalizer_processor"),
    _ACTION: ("policy_postprocessor.json", "unnormalizer_processor"),
}
# Kind of these numbers in normalization_mapping of config.json
_KINDS: Mapping[str, str] = {_STATE: "STATE", _ACTION: "ACTION"}

Shown = dict[str, Any]


class SmolVlaUnits(
    gymnasium.Wrapper[Shown, NDArray[np.float32], Shown, NDArray[np.float32]]
):
    """A wrapper that shows the robot's state as SmolVLA reads it, and takes actions as SmolVLA makes them.

    `folder`: of the checkpoint, whose statistics are read. `state`: name of the entry of observations with the robot's
    state. `clip`: whether means of the statistics may be outside of the simulator's bounds. Raises OSError and
    ValueError.
    """

    def __init__(
        self,
        env: gymnasium.Env[Shown, NDArray[np.float32]],
        folder: str,
        state: str = "state",
        clip: bool = False,
    ) -> None:
        super().__init__(env)
        seen = env.observation_space
        taken = env.action_space
        if not isinstance(seen, Dict) or state not in seen.spaces:
            raise ValueError(f"observations have no entry {state}: {seen}")
        of_state = seen.spaces[state]
        rows = [space for space in (of_state, taken) if isinstance(space, Box)]
        if [len(space.shape) for space in rows] != [1, 1]:
            raise ValueError(
                f"state and actions are no rows of numbers: {of_state}, {taken}"
            )
        settings = parsed_object((Path(folder) / "config.json").read_bytes())
        self._name = state
        self._state = _statistics(Path(folder), settings, _STATE)
        self._action = _statistics(Path(folder), settings, _ACTION)
        self._low = rows[1].low
        self._high = rows[1].high
        for what, space, numbers in (
            ("the state", rows[0], self._state),
            ("an action", rows[1], self._action),
        ):
            _check_robot(what, space, numbers[0], clip=clip)
        self._size = _size(settings, "max_state_dim", len(self._state[0]))
        width = _size(settings, "max_action_dim", len(self._action[0]))
        shown = Box(-np.inf, np.inf, (self._size,), np.float32)
        self.observation_space = Dict({**seen.spaces, state: shown})
        self.action_space = Box(-np.inf, np.inf, (width,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Shown, dict[str, Any]]:
        """Begin an episode."""
        seen, info = self.env.reset(seed=seed, options=options)
        return self._shown(seen), info

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[Shown, float, bool, bool, dict[str, Any]]:
        """Take an action as SmolVLA makes it, [max_action_dim]. The robot gets it within its bounds."""
        mean, deviation = self._action
        meant = np.asarray(action, np.float64)[: len(mean)] * deviation + mean
        taken = np.clip(meant, self._low, self._high).astype(np.float32)
        seen, reward, ended, cut, info = self.env.step(taken)
        return self._shown(seen), float(reward), ended, cut, info

    def _shown(self, seen: Shown) -> Shown:
        """Return an observation with the state as SmolVLA reads it, [max_state_dim]."""
        mean, deviation = self._state
        normalised = np.zeros(self._size, np.float32)
        given = np.asarray(seen[self._name], np.float64)
        normalised[: len(mean)] = (given - mean) / (deviation + _LEAST)
        return {**seen, self._name: normalised}


def _size(settings: Mapping[str, Any], key: str, least: int) -> int:
    """Return how many numbers the network has for state or actions, at least `least`. Raises ValueError."""
    found = settings.get(key, 32)
    if not isinstance(found, int) or found < least:
        raise ValueError(f"{key} in config.json is {found}, below {least}")
    return found


def _statistics(
    folder: Path, settings: Mapping[str, Any], name: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return means and deviations of the numbers `name`. Raises OSError and ValueError.

    `settings`: content of config.json.
    """
    kind = _KINDS[name]
    way = settings.get("normalization_mapping", {}).get(kind, "MEAN_STD")
    if way != "MEAN_STD":
        raise ValueError(f"{kind} is normalised by {way}, and not by MEAN_STD")
    file, step = _PROCESSORS[name]
    if not (folder / file).exists():
        raise ValueError(
            f"{folder} has no {file}: lerobot's migrate_policy_normalization.py writes it for checkpoints of earlier "
            "versions"
        )
    steps = parsed_object((folder / file).read_bytes()).get("steps", [])
    files = [
        each.get("state_file") for each in steps if each.get("registry_name") == step
    ]
    if len(files) != 1 or files[0] is None:
        raise ValueError(f"{file} has no statistics: its step {step} has no state_file")
    stored = _tensors(folder / files[0])
    found = []
    for number in ("mean", "std"):
        if f"{name}.{number}" not in stored:
            raise ValueError(f"{files[0]} has no {name}.{number}")
        found.append(stored[f"{name}.{number}"])
    mean, deviation = found
    if mean.shape != deviation.shape or not np.isfinite(found).all():
        raise ValueError(f"{files[0]}: {name} has no means and deviations")
    return mean, deviation


def _tensors(file: Path) -> dict[str, NDArray[np.float64]]:
    """Return name -> numbers of a file of safetensors, flat. Raises ValueError for other types than float32.

    The file has the bytes of a header (8 bytes, least first), a header as JSON, and the numbers.
    """
    content = file.read_bytes()
    size = int.from_bytes(content[:_LENGTH], "little")
    header = parsed_object(content[_LENGTH : _LENGTH + size])
    numbers = content[_LENGTH + size :]
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "F32":
            raise ValueError(f"{file.name}: {name} is {entry['dtype']}, not F32")
        first, last = entry["data_offsets"]
        stored = np.frombuffer(numbers[first:last], np.dtype("<f4"))
        found[name] = stored.astype(np.float64)
    return found


def _check_robot(
    what: str, space: Box, mean: NDArray[np.float64], *, clip: bool
) -> None:
    """Raise ValueError if statistics are of another robot: of another size, or with means outside of its bounds."""
    if space.shape != mean.shape:
        raise ValueError(
            f"the statistics have {len(mean)} numbers for {what}, and the simulator has {space.shape[0]}: they are of "
            "another robot"
        )
    outside = (mean < space.low) | (mean > space.high)
    if outside.any() and not clip:
        at = int(outside.argmax())
        raise ValueError(
            f"number {at} of {what} is {mean[at]:.3g} on average by the statistics, and the simulator has "
            f"{space.low[at]:.3g} to {space.high[at]:.3g}: they are of another robot, or in other units; with clip: "
            "true, this is not checked"
        )
