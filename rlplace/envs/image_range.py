"""Check observations that a policy takes as they are: it divides bytes by 255, and may not scale other numbers.

In images, numbers from 0 to 1 are right. Whole numbers up to 255 were converted from bytes, but not divided by 255.
Numbers up to 1/255 were divided twice. Elsewhere, numbers that are mostly above 100 are too large for a network, such
as the bytes of a game's memory, prices, or positions in pixels.
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
# Fewest axes of an image with channels
_AXES_OF_COLOURS = 3
# Rows and columns of the smallest picture; a smaller array is a table of numbers
_SMALLEST = 8
# Whole numbers above this one are bytes, and not kinds of fields on a board
_BYTES = 32
_BRIGHTEST = 255
_ROUNDING = 1e-6
# Numbers of a vector that a network can take as they are
_LARGEST = 100.0
# Rows of all looks that are compared at least
_ROWS = 24

_BY_POLICY = "algorithm.normalize_observations=true"
_BY_WRAPPER = (
    "divide them in the environment, or in a wrapper such as "
    "gymnasium.wrappers.RescaleObservation"
)


class ImageRange:
    """Compares observations of a simulator with the range that a policy expects.

    The first image that is not black decides. A number outside of images is large if it is so in most rows so far.

    `remark`: the text that says what is wrong, and how to correct it; None: nothing so far. `flattened`: a text that
    says that the policy takes the numbers of an image in one row; None: it does not.
    """

    def __init__(
        self,
        simulator: str,
        spaces: Spaces,
        *,
        normalizes: bool,
        can_normalize: bool,
        flattens: bool = False,
    ) -> None:
        """`simulator`: its name. `spaces`: those of the policy. `normalizes`: whether the policy normalises numbers.

        `can_normalize`: whether policies of this job normalise if the config asks for it. `flattens`: whether the
        policy takes all numbers in one row, as an MLP does.
        """
        self.remark: str | None = None
        self.flattened: str | None = None
        if flattens:
            self.flattened = _flattened(simulator, spaces)
        self._simulator = simulator
        self._spaces = spaces
        # Whether a picture that is not black is still to come
        self._waits = not normalizes and spaces.observation_dtype == "float32"
        # Whether numbers outside of images are compared
        self._compares = self._waits
        # Name of an entry -> (how often each of its numbers was large, rows)
        self._large: dict[str, tuple[Any, int]] = {}
        self._normalize = _BY_WRAPPER
        if can_normalize:
            self._normalize = _BY_POLICY

    def look(self, observations: NDArray[Any]) -> None:
        """Compare the images in the observations [B, *O] of B rows. After the first that is not black, do nothing."""
        if not (self._waits or self._compares):
            return
        rows = observations.reshape(len(observations), -1)
        first = self._spaces.memory
        for part in self._spaces.entries:
            numbers = rows[:, first : first + part.size]
            first += part.size
            if not _is_picture(part.shape):
                self._compare_size(part.name, numbers)
            elif self._waits and numbers.any():
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
        if error is not None:
            self._say(error, f"its images {name}".strip(), brightest)

    def _compare_size(self, name: str, numbers: NDArray[Any]) -> None:
        """Compare numbers outside of images, [B, n]: which of them were large in most rows of the looks so far."""
        if not (self._compares and len(numbers)):
            return
        large, rows = self._large.get(name, (0, 0))
        large = large + (np.abs(numbers) > _LARGEST).sum(axis=0)
        rows += len(numbers)
        self._large[name] = (large, rows)
        # A few rows may have outliers, such as forces
        if rows < _ROWS or not (2 * large >= rows).any():
            return
        self._compares = False
        self._say("large", f"its observations {name}".strip(), _LARGEST)

    def _say(self, error: str, what: str, largest: float) -> None:
        found = problem(
            "image-range",
            "env.id",
            error=error,
            simulator=self._simulator,
            image=what,
            brightest=f"{largest:.3g}",
            normalize=self._normalize,
        )
        if self.remark is None:
            self.remark = found.remark()


def _flattened(simulator: str, spaces: Spaces) -> str | None:
    """Return a text that says which image of float32 numbers an MLP would get in one row; None without an image.

    Only an array with channels counts: one of two axes may be a table.
    """
    for part in spaces.entries:
        if len(part.shape) < _AXES_OF_COLOURS or part.dtype != "float32":
            continue
        if not _is_picture(part.shape):
            continue
        found = problem(
            "image-range",
            "actor.model.kind",
            error="flattened",
            simulator=simulator,
            image=f"its images {part.name}".strip(),
            shape=list(part.shape),
        )
        return found.remark()
    return None


def _is_picture(shape: tuple[int, ...]) -> bool:
    sides = sorted(shape)[-2:]
    return len(shape) in _AXES and min(sides) >= _SMALLEST
