"""Check images whose numbers are not bytes: a policy divides bytes by 255, and does not scale other numbers.

Numbers from 0 to 1 are right. Whole numbers up to 255 were converted from bytes, but not divided by 255. Numbers up to
1/255 were divided twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.codes import problem

if TYPE_CHECKING:
    from rlplace.envs.contract import Spaces

# Axes of an image: height and width, and perhaps channels and a stack
_AXES = (2, 3, 4)
# Rows and columns of the smallest picture; a smaller array is a table of numbers
_SMALLEST = 8
# Whole numbers above this one are bytes, and not kinds of fields on a board
_BYTES = 32
_BRIGHTEST = 255
_ROUNDING = 1e-6


class ImageRange:
    """Compares images of a simulator with the range that a policy expects. The first image that is not black decides.

    `remark`: the text that says what is wrong, and how to correct it; None: nothing so far.
    """

    def __init__(self, simulator: str, spaces: Spaces, *, normalizes: bool) -> None:
        """`simulator`: its name. `spaces`: those of the policy. `normalizes`: whether the policy normalises images."""
        self.remark: str | None = None
        self._simulator = simulator
        self._spaces = spaces
        # Whether a picture that is not black is still to come
        self._waits = not normalizes and spaces.observation_dtype == "float32"

    def look(self, observations: NDArray[Any]) -> None:
        """Compare the images in the observations [B, *O] of B rows. After the first that is not black, do nothing."""
        if not self._waits:
            return
        rows = observations.reshape(len(observations), -1)
        first = self._spaces.memory
        for part in self._spaces.entries:
            numbers = rows[:, first : first + part.size]
            first += part.size
            if _is_picture(part.shape) and numbers.any():
                self._waits = False
                self._compare(part.name, numbers)

    def _compare(self, name: str, numbers: NDArray[Any]) -> None:
        brightest = float(numbers.max())
        if numbers.min() < 0 or self.remark is not None:
            return
        error = None
        whole = (numbers == np.trunc(numbers)).all()
        if whole and _BYTES < brightest <= _BRIGHTEST:
            error = "undivided"
        elif brightest <= 1 / _BRIGHTEST + _ROUNDING:
            error = "divided-twice"
        if error is None:
            return
        found = problem(
            "image-range",
            "env.id",
            error=error,
            simulator=self._simulator,
            image=f"its images {name}".strip(),
            brightest=f"{brightest:.3g}",
        )
        self.remark = f"{found.key}: {found.what}: {found.why}; {found.fix}"


def _is_picture(shape: tuple[int, ...]) -> bool:
    sides = sorted(shape)[-2:]
    return len(shape) in _AXES and min(sides) >= _SMALLEST
