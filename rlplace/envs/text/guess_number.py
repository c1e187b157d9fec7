"""A number to be guessed in several turns, each answered by higher or lower: the smallest task with a conversation."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlplace.envs.text.contract import Split

_DIGITS = 30  # of a guess that are read; Python refuses to read thousands of them


class GuessNumber:
    """A secret of 1..`highest` and `guesses` tries; `env.max_turns` should be at least as many."""

    rewards: ClassVar[Sequence[str]] = ("score",)

    def __init__(self, *, seed: int, split: Split, highest: int = 15, guesses: int = 4) -> None:
        if highest < 1 or guesses < 1:
            raise ValueError(f"highest and guesses must be at least 1, got {highest} and {guesses}")
        self._name, self._highest, self._guesses = f"{seed}/{split}", highest, guesses

    @property
    def size(self) -> int | None:
        return None

    def episode(self, number: int) -> Guessing:
        secret = random.Random(f"{self._name}/{number}").randint(1, self._highest)
        return Guessing(secret, self._highest, self._guesses)


class Guessing:
    """One secret. Its score is 1 if it was found, and then a little less for every guess but the first."""

    def __init__(self, secret: int, highest: int, guesses: int) -> None:
        self._secret, self._guesses, self._used, self._found = secret, guesses, 0, False
        self.prompt = (
            f"I think of a number from 1 to {highest}. You have {guesses} guesses. "
            "After each I say whether mine is higher or lower. Answer with one number only."
        )

    def reply(self, answer: str) -> str | None:
        self._used += 1
        numbers = re.findall(r"\d+", answer)
        guess = int(numbers[-1][:_DIGITS]) if numbers else None
        self._found = guess == self._secret
        if self._found or self._used == self._guesses:
            return None
        if guess is None:
            return "That is no number. Answer with one number only."
        return "Higher." if guess < self._secret else "Lower."

    def facts(self) -> Mapping[str, Any]:
        left = 1 - (self._used - 1) / (2 * self._guesses)
        return {"answer": str(self._secret), "score": left if self._found else 0.0}
