"""The interface of the library TextArena that `rlplace.envs.text.tasks` uses, with three games of its names."""

from __future__ import annotations

import enum
import random
import types
from typing import Any


class Kind(enum.Enum):
    PROMPT = 1
    PLAYER_ACTION = 2
    GAME_MESSAGE = 4


class GuessTheNumber:
    """Says higher or lower; draws from the process's generator, as the library's games do."""

    def __init__(
        self, min_number: int = 1, max_number: int = 20, max_turns: int = 10
    ) -> None:
        self.numbers, self.turns = (min_number, max_number), max_turns
        self.said: list[tuple[int, str, Kind]] = []
        self.reward = 0.0

    def reset(self, num_players: int, seed: int | None = None) -> None:
        random.seed(seed)
        self.number = random.randint(*self.numbers)
        low, high = self.numbers
        self.said = [
            (
                -1,
                f"\nGuess the number between {low} and {high}, as [5]. {random.random()}",
                Kind.PROMPT,
            )
        ]

    def get_observation(self) -> tuple[int, list[tuple[int, str, Kind]]]:
        said, self.said = self.said, []
        return 0, said

    def step(self, answer: str) -> tuple[bool, dict[str, Any]]:
        self.turns -= 1
        guess = int(answer.strip("[]"))
        if guess == self.number or not self.turns:
            self.reward = float(guess == self.number)
            return True, {}
        hint = "higher" if guess < self.number else "lower"
        self.said += [
            (0, answer, Kind.PLAYER_ACTION),
            (-1, f"The target number is {hint}.", Kind.GAME_MESSAGE),
        ]
        return False, {}

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return {0: self.reward}, {}


class TicTacToe(GuessTheNumber):
    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == 2, (
            f"The number of players has to be 2, received {num_players}"
        )


class Wordless(GuessTheNumber):
    def __init__(self) -> None:
        raise LookupError("Resource 'words' not found")


REGISTRY = {
    "GuessTheNumber-v0-raw": GuessTheNumber,
    "GuessTheNumber-v0": GuessTheNumber,
    "TicTacToe-v0-raw": TicTacToe,
    "Wordless-v0-raw": Wordless,
}


def module() -> types.ModuleType:
    """What `import textarena` would give."""
    made = types.ModuleType("textarena")
    registration = types.SimpleNamespace(ENV_REGISTRY=REGISTRY)
    made.envs = types.SimpleNamespace(registration=registration)
    made.make = lambda name, **options: REGISTRY[name](**options)
    return made
