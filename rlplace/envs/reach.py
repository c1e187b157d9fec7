"""A small task of vision, language and action: a picture of coloured squares, and an instruction which one to reach.

::

    image         [pixels, pixels, 3] bytes: a square of each colour at a random place, and the hand in white
    instruction   text, such as "reach the red square"; the colour is drawn for each episode
    state         [2] the place of the hand, from 0 to 1

An action is a move of the hand in both directions, from -1 to 1. The reward is 1 where the hand reaches the named
square, which ends the episode, and else 0: the return of an episode is its success.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Text
from numpy.typing import NDArray

# Colours by name, as red, green and blue
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
}
# Instructions; each is used with every colour
SENTENCES = ("reach the {} square", "go to {}")
_HAND = (255, 255, 255)
# Lengths as parts of the side of the picture: the longest move, a square, the hand, the distance that is near
_MOVE = 0.2
_SQUARE = 0.16
_HAND_SIZE = 0.1
_NEAR = 0.1
# Least distance between the places of squares and hand at the start
_APART = 0.25
_LETTERS = "abcdefghijklmnopqrstuvwxyz "

Shown = dict[str, Any]


class Reach(gymnasium.Env[Shown, NDArray[np.float32]]):
    """The hand has to reach the square that the instruction names.

    `pixels`: side of the picture. `colours`: number of squares, from 1 to 3. `steps`: the longest episode.
    """

    def __init__(
        self,
        pixels: int = 32,
        colours: int = 3,
        steps: int = 10,
        render_mode: str | None = None,
    ) -> None:
        if not 1 <= colours <= len(COLOURS) or pixels < 16 or steps < 1:
            raise ValueError(
                f"pixels {pixels} (16 or more), colours {colours} (1 to {len(COLOURS)}), steps {steps} (1 or more)"
            )
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 4}
        self.render_mode = render_mode
        self._pixels = pixels
        self._colours = list(COLOURS.values())[:colours]
        self._steps = steps
        self._sentences = [
            sentence.format(colour)
            for sentence in SENTENCES
            for colour in list(COLOURS)[:colours]
        ]
        longest = max(map(len, self._sentences))
        self.observation_space = Dict(
            {
                "image": Box(0, 255, (pixels, pixels, 3), np.uint8),
                "instruction": Text(longest, charset=_LETTERS),
                "state": Box(0, 1, (2,), np.float32),
            }
        )
        self.action_space = Box(-1, 1, (2,), np.float32)
        # Places of the hand and of the squares, [1 + colours, 2]; the number of the instruction; steps so far
        self._places = np.zeros((1 + colours, 2))
        self._instruction = 0
        self._taken = 0

    @property
    def distance(self) -> float:
        """The distance from the hand to the square that the instruction names; 1 is the side of the picture."""
        target = self._places[1 + self._instruction % len(self._colours)]
        return float(np.linalg.norm(self._places[0] - target))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Shown, dict[str, Any]]:
        """Place squares and hand at random, and draw an instruction."""
        super().reset(seed=seed)
        self._instruction = int(self.np_random.integers(len(self._sentences)))
        self._taken = 0
        margin = _SQUARE / 2
        count = len(self._places)
        apart = 0.0
        while apart < _APART:
            self._places = self.np_random.uniform(margin, 1 - margin, (count, 2))
            between = self._places[:, None] - self._places[None]
            distances = np.linalg.norm(between, axis=-1) + 2 * np.eye(count)
            apart = float(distances.min())
        return self._seen(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[Shown, float, bool, bool, dict[str, Any]]:
        """Move the hand. The reward is 1 where it reaches its square, else 0."""
        move = _MOVE * np.clip(np.asarray(action, np.float64), -1, 1)
        self._places[0] = np.clip(self._places[0] + move, 0, 1)
        self._taken += 1
        reached = self.distance < _NEAR
        cut = not reached and self._taken >= self._steps
        return self._seen(), float(reached), reached, cut, {}

    def render(self) -> Any:
        """Return the picture that the policy sees."""
        return self._picture()

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the state of the episode."""
        return {
            "places": self._places.copy(),
            "instruction": self._instruction,
            "taken": self._taken,
        }

    def restore_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on with the episode of `state`, which `checkpoint_state` has returned."""
        self._places = state["places"].copy()
        self._instruction = int(state["instruction"])
        self._taken = int(state["taken"])

    def _seen(self) -> Shown:
        return {
            "image": self._picture(),
            "instruction": self._sentences[self._instruction],
            "state": self._places[0].astype(np.float32),
        }

    def _picture(self) -> NDArray[np.uint8]:
        picture = np.zeros((self._pixels, self._pixels, 3), np.uint8)
        for place, colour in zip(self._places[1:], self._colours, strict=True):
            self._draw(picture, place, _SQUARE, colour)
        self._draw(picture, self._places[0], _HAND_SIZE, _HAND)
        return picture

    def _draw(
        self,
        picture: NDArray[np.uint8],
        place: NDArray[np.float64],
        size: float,
        colour: tuple[int, int, int],
    ) -> None:
        """Draw a square. `place`: its middle, as (x, y). `size`: its side, as a part of the picture's side."""
        side = max(2, round(size * self._pixels))
        first = np.round(place * self._pixels - side / 2).astype(int)
        left, top = np.clip(first, 0, self._pixels - side)
        picture[top : top + side, left : left + side] = colour


class Nearer(gymnasium.Wrapper[Shown, NDArray[np.float32], Shown, NDArray[np.float32]]):
    """A wrapper of `Reach` that also rewards by how much nearer the hand has come: sparse rewards are learned slowly.

    The environment's own reward, from which `env/return` is made, stays the success. `weight`: of the way that the hand
    has come nearer, with the side of the picture as the unit.
    """

    def __init__(
        self, env: gymnasium.Env[Shown, NDArray[np.float32]], weight: float = 1.0
    ) -> None:
        super().__init__(env)
        self._weight = weight

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[Shown, float, bool, bool, dict[str, Any]]:
        """Move the hand. The reward is that of the environment, and how much nearer its square is now."""
        task: Any = self.env.unwrapped
        before = task.distance
        seen, reward, ended, cut, info = self.env.step(action)
        nearer = self._weight * (before - task.distance)
        return seen, float(reward) + nearer, ended, cut, info
