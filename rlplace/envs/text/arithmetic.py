"""Sums, differences and products of numbers with given digits: endless, checkable, and easy to make harder."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from typing import ClassVar

from rlplace.envs.text.contract import OneTurn, Split

_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_HELD_OUT = 10  # one problem in so many is never trained on


class Arithmetic:
    """Two numbers of `digits` digits and one of `operations`. Every tenth problem is held out, for all seeds alike."""

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
        """Draws until the problem belongs to the split: which one does follows from the problem alone."""
        while True:
            left, right = draw.randint(self._low, self._high), draw.randint(self._low, self._high)
            sign = draw.choice(self._operations)
            held_out = random.Random(f"{left}{sign}{right}").randrange(_HELD_OUT) == 0
            if held_out == (self._split == "held_out"):
                return left, sign, right
