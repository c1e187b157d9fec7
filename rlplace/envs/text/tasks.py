"""Shipped tasks that need no library: arithmetic in one turn, a number to be guessed in several."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlplace.envs.text.contract import OneTurn, Split

_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_HELD_OUT = 10  # one problem in so many is never trained on
_GUESS_DIGITS = 30  # of a guess that are read; Python refuses to read thousands of them


class Arithmetic:
    """Sums, differences or products of two numbers of `digits` digits.

    Endless. Every tenth problem is held out, the same for all seeds.
    """

    rewards: ClassVar[Sequence[str]] = ("math_answer",)

    def __init__(
        self,
        *,
        seed: int,
        split: Split,
        digits: int = 1,
        operations: Sequence[str] = ("+",),
        template: str = "What is {problem}? Answer with the number only.",
    ) -> None:
        if digits < 1:
            raise ValueError(f"digits must be at least 1, got {digits}")
        unknown = [sign for sign in operations if sign not in _SIGNS]
        if unknown or not operations:
            raise ValueError(f"operations are of {', '.join(_SIGNS)}, got {', '.join(unknown) or 'none'}")
        if "{problem}" not in template:
            raise ValueError("template must have {problem} in it")
        self._seed, self._split = seed, split
        self._low, self._high = 0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1
        self._operations, self._template = tuple(operations), template

    @property
    def size(self) -> int | None:
        return None

    def episode(self, number: int) -> OneTurn:
        left, sign, right = self._problem(random.Random(f"{self._seed}/{self._split}/{number}"))
        problem = f"{left} {sign} {right}"
        answer = str(_SIGNS[sign](left, right))
        return OneTurn(prompt=self._template.replace("{problem}", problem), known={"answer": answer})

    def _problem(self, draw: random.Random) -> tuple[int, str, int]:
        """Draw until the problem belongs to the split; its split follows from the problem alone."""
        while True:
            left, right = draw.randint(self._low, self._high), draw.randint(self._low, self._high)
            sign = draw.choice(self._operations)
            held_out = random.Random(f"{left}{sign}{right}").randrange(_HELD_OUT) == 0
            if held_out == (self._split == "held_out"):
                return left, sign, right


class GuessNumber:
    """A secret of 1..`highest` and `guesses` tries, each answered by higher or lower.

    `env.max_turns` should be at least `guesses`.
    """

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
        guess = int(numbers[-1][:_GUESS_DIGITS]) if numbers else None
        self._found = guess == self._secret
        if self._found or self._used == self._guesses:
            return None
        if guess is None:
            return "That is no number. Answer with one number only."
        return "Higher." if guess < self._secret else "Lower."

    def facts(self) -> Mapping[str, Any]:
        left = 1 - (self._used - 1) / (2 * self._guesses)
        return {"answer": str(self._secret), "score": left if self._found else 0.0}
