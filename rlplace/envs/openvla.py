"""Actions of OpenVLA and OpenVLA-OFT: choices among bins, and what a robot gets for them.

::

    choice c of 256 ▶ middle of bin min(c, 254) of 255 between -1 and 1 ▶ between low and high of the data set

The bins, and `norm_stats` with their keys, are those of `prismatic/extern/hf/modeling_prismatic.py` and
`prismatic/vla/constants.py` in moojink/openvla-oft (Kim et al. 2025, arXiv:2502.19645). Choice c is the token c + 1
from the end of the vocabulary of Llama 2. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box, MultiDiscrete
from numpy.typing import NDArray

from rlplace.errors import did_you_mean, suggestion
from rlplace.json_text import parsed_object

# File with the statistics of a fine-tuned checkpoint; it replaces those of config.json
STATISTICS = "dataset_statistics.json"
# Keys of the lowest and highest actions, by kind of normalisation
_ENDS: Mapping[str, tuple[str, str]] = {
    "quantiles": ("q01", "q99"),
    "extremes": ("min", "max"),
}
# OpenVLA-OFT adds it to the width, so that no width is 0
_LEAST_WIDTH = 1e-8
# How far, as a part of the simulator's bounds, the ends of statistics may be outside of these bounds
_TOLERATED = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActionStatistics:
    """The range of each of A elements of an action in a data set.

    `low`, `high`: [A]. `mask`: [A], false for elements that are not normalised, such as a gripper.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mask: NDArray[np.bool_]

    def action(self, normalized: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return actions [..., A] for numbers from -1 to 1, [..., A]."""
        width = self.high - self.low + _LEAST_WIDTH
        scaled = 0.5 * (normalized + 1) * width + self.low
        return np.where(self.mask, scaled, normalized)


def action_statistics(
    folder: Path, unnorm_key: str | None, normalization: str
) -> ActionStatistics:
    """Return the statistics of actions that a checkpoint has for one data set.

    `unnorm_key`: name of the data set; None: the only one. `normalization`: "quantiles" or "extremes". Raises OSError
    if the folder has no config.json, and ValueError with the reason if the statistics cannot be used.
    """
    stored = all_statistics(folder)
    if not stored:
        raise ValueError(
            f"{folder} has no statistics of actions: neither {STATISTICS} nor norm_stats in config.json"
        )
    if unnorm_key is None:
        if len(stored) > 1:
            raise ValueError(
                f"{folder} has statistics of several data sets: name one as unnorm_key, of {', '.join(stored)}"
            )
        (unnorm_key,) = stored
    if unnorm_key not in stored:
        near = suggestion(did_you_mean(unnorm_key, stored))
        raise ValueError(
            f"{folder} has no statistics {unnorm_key}{near}; there are {', '.join(stored)}"
        )
    lowest, highest = _ENDS[normalization]
    try:
        found = stored[unnorm_key]["action"]
        low = np.asarray(found[lowest], np.float64)
        high = np.asarray(found[highest], np.float64)
        mask = np.asarray(found.get("mask", np.ones(low.shape)), np.bool_)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the statistics {unnorm_key} have no numbers {lowest} and {highest} of actions"
        ) from error
    if not low.shape == high.shape == mask.shape or low.ndim != 1:
        raise ValueError(
            f"the statistics {unnorm_key} have {lowest}, {highest} and mask of other lengths"
        )
    if not np.isfinite([low, high]).all() or (high < low).any():
        raise ValueError(
            f"the statistics {unnorm_key} have a {highest} that is no number above {lowest}"
        )
    return ActionStatistics(low=low, high=high, mask=mask)


def all_statistics(folder: Path) -> Mapping[str, Any]:
    """Return name of a data set -> its statistics, of a checkpoint. Raises OSError and ValueError."""
    own = folder / STATISTICS
    if own.exists():
        return parsed_object(own.read_bytes())
    content = parsed_object((folder / "config.json").read_bytes())
    return content.get("norm_stats") or {}


def middles(bins: int) -> NDArray[np.float64]:
    """Return what each of `bins` choices is between -1 and 1.

    OpenVLA puts `bins` edges between -1 and 1, so there are `bins` - 1 bins; the last two choices are the same bin.
    """
    edges = np.linspace(-1, 1, bins)
    between = (edges[:-1] + edges[1:]) / 2
    return np.append(between, between[-1])


class OpenVlaActions(
    gymnasium.ActionWrapper[Any, NDArray[np.int64], NDArray[np.float32]]
):
    """A wrapper that takes choices of OpenVLA's action tokens, and gives the simulator the action that they mean.

    `folder`: of the checkpoint, whose statistics are read. `unnorm_key`: name of the data set in the statistics; None:
    the only one. `normalization`: "quantiles" (q01 and q99: LIBERO, BridgeData) or "extremes" (min and max: ALOHA).
    `gripper`: what happens to the last element, from 0 (closed) to 1 (open): "as_is"; "libero": 1 closes and -1 opens;
    "bridge": -1 closes and 1 opens. `clip`: whether statistics may be outside of the simulator's bounds. Raises OSError
    and ValueError.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, NDArray[np.float32]],
        folder: str,
        unnorm_key: str | None = None,
        normalization: Literal["quantiles", "extremes"] = "quantiles",
        gripper: Literal["as_is", "libero", "bridge"] = "as_is",
        bins: int = 256,
        clip: bool = False,
    ) -> None:
        super().__init__(env)
        if normalization not in _ENDS:
            raise ValueError(f"normalization is one of {', '.join(_ENDS)}")
        if gripper not in ("as_is", "libero", "bridge"):
            raise ValueError("gripper is one of as_is, libero, bridge")
        if bins < 2:
            raise ValueError("bins: an action needs two or more")
        space = env.action_space
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise ValueError(
                f"the actions of the simulator are no row of numbers: {space}"
            )
        self._statistics = action_statistics(Path(folder), unnorm_key, normalization)
        elements = len(self._statistics.low)
        if space.shape != (elements,):
            raise ValueError(
                f"the statistics have {elements} elements of an action, and the simulator has {space.shape[0]}: they "
                "are of another robot"
            )
        self._middles = middles(bins)
        self._gripper = gripper
        self._low = space.low
        self._high = space.high
        if not clip:
            self._check_range()
        self.action_space = MultiDiscrete([bins] * elements)

    def _check_range(self) -> None:
        """Raise ValueError if actions of the statistics are outside of the simulator's bounds."""
        ends = np.stack([self._meant(np.full(len(self._low), end)) for end in (-1, 1)])
        room = _TOLERATED * (self._high.astype(np.float64) - self._low)
        outside = (ends.min(axis=0) < self._low - room) | (
            ends.max(axis=0) > self._high + room
        )
        if outside.any():
            at = int(outside.argmax())
            low, high = sorted(ends[:, at].tolist())
            raise ValueError(
                f"element {at} of an action goes from {low:.3g} to {high:.3g} by the statistics, and the simulator "
                f"takes {self._low[at]:.3g} to {self._high[at]:.3g}: they are of another robot, or in other units; "
                "with clip: true, actions are clipped"
            )

    def action(self, action: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the action of the robot, [elements], for one choice of each element."""
        meant = self._meant(self._middles[np.asarray(action, np.int64)])
        return np.clip(meant, self._low, self._high).astype(np.float32)

    def _meant(self, normalized: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the action for numbers from -1 to 1, [elements]."""
        meant = self._statistics.action(normalized)
        if self._gripper == "libero":
            meant[-1] = -np.sign(2 * meant[-1] - 1)
        elif self._gripper == "bridge":
            meant[-1] = 1.0 if meant[-1] > 0.5 else -1.0
        return meant
