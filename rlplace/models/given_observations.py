"""Checks observations that a trained policy is given outside of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.codes import config_error
from rlplace.envs.contract import Spaces


def given_observations(observations: ArrayLike, spaces: Spaces) -> NDArray[Any]:
    """Return one observation [*O], or N observations [N, *O], as an array of the dtype of the simulator.

    `spaces`: those of the simulator on which the policy was trained. Raises ConfigError, which is a ValueError, for
    observations of another shape, for values that are not numbers or not finite, and for floating-point numbers if the
    policy was trained on bytes.
    """
    shown = np.asarray(observations)
    shape = spaces.observation_shape
    single = len(shape)
    tail = shown.shape[shown.ndim - single :]
    if tail != shape or shown.ndim not in (single, single + 1):
        raise config_error(
            "observation-shape",
            "observations",
            str(list(shown.shape)),
            error="shape",
            shape=list(shape),
        )
    dtype = spaces.observation_dtype
    # Kinds of NumPy: bool, int, unsigned, float
    kinds = "biu" if dtype == "uint8" else "biuf"
    if shown.dtype.kind not in kinds:
        raise config_error(
            "observation-shape",
            "observations",
            str(shown.dtype),
            error="bytes" if dtype == "uint8" else "numbers",
            dtype=dtype,
        )
    if shown.dtype.kind == "f" and not np.isfinite(shown).all():
        wrong = shown[~np.isfinite(shown)]
        raise config_error(
            "observation-shape", "observations", f"{wrong[0]}", error="finite"
        )
    return shown.astype(dtype, copy=False)
