"""Which row of a finite set of prompts comes when: every epoch all of them, each time in another order."""

from __future__ import annotations

import random


class PromptOrder:
    """Follows from the size, the seed and the number alone, so every placement asks the same. Keeps one epoch."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._epoch, self._rows = -1, list(range(size))

    def row(self, number: int) -> int:
        """Of the prompt that is number `number` since the first iteration."""
        epoch, place = divmod(number, self._size)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, list(range(self._size))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._rows)
        return self._rows[place]
