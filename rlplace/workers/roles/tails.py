"""Tail batching: which prompts an iteration asks, and which ones are left for the round that waits for all.

With `short_rounds: 2` and 4 prompts in an iteration, prompts by their numbers in the run::

    round 0   asks 0-3 and 8, 10     ends when 4 of them are whole; the other 2 are left, answers and all
    round 1   asks 4-7 and 9, 11     the same
    round 2   asks the 4 that were left, and waits for them      learned so far: 0-11, each once

So the prompts of three rounds are those that three rounds without a tail would ask (RollPacker, arXiv 2509.21009).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from rlplace.workers.saving import unreadable_state


class Tails:
    """Knows what an env rank's groups were left with: prompts by the group of the long round that asks them."""

    def __init__(self, short_rounds: int, prompts: int, groups: range) -> None:
        """`prompts` of an iteration; `groups` of this rank."""
        self._short, self._prompts, self._groups = short_rounds, prompts, groups
        self.left: dict[int, int] = {}

    def asked(self, iteration: int) -> dict[int, int]:
        """Return the numbers of the prompts that an iteration asks, by places that stand for groups."""
        first = iteration * self._prompts
        own = {group: first + group for group in self._groups}
        if self._round(iteration) == self._short:
            return {group: self.left.get(group, number) for group, number in own.items()}
        last = first + (self._short - self._round(iteration)) * self._prompts
        return own | {self._prompts + group: last + group for group in self._early(iteration)}

    def more(self, iteration: int) -> int:
        """Return how many of them it does not wait for."""
        return len(self._early(iteration))

    def leave(self, iteration: int, numbers: list[int]) -> None:
        """Keep prompts for the next round that waits: as many as `more` said."""
        self.left |= dict(zip(self._early(iteration), numbers, strict=True))

    def _round(self, iteration: int) -> int:
        return iteration % (self._short + 1)

    def _early(self, iteration: int) -> list[int]:
        """List the groups of the long round whose prompts a short one asks."""
        return [group for group in self._groups if self._short and group % self._short == self._round(iteration)]

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, folder: Path) -> list[str]:
        """Write what was left as a file, on the disk; return its name, none for a rank without groups."""
        if not self._groups:
            return []
        name = f"tails_{self._groups.start:05}-{self._groups.stop - 1:05}.json"
        with open(folder / name, "w", encoding="utf-8") as out:
            json.dump({"short_rounds": self._short, "prompts": self._prompts, "left": self.left}, out)
            out.flush()
            os.fsync(out.fileno())
        return [name]

    def read(self, folder: Path) -> None:
        """Take what was left to these groups, whatever ranks had them; nothing where rounds are others now."""
        self.left = {}
        for file in sorted(folder.glob("tails_*.json")):
            first, last = map(int, re.findall("[0-9]+", file.stem))
            if max(first, self._groups.start) < min(last + 1, self._groups.stop):
                self.left |= {group: n for group, n in self._stored(file).items() if group in self._groups}

    def _stored(self, file: Path) -> Mapping[int, int]:
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            if (stored["short_rounds"], stored["prompts"]) != (self._short, self._prompts):
                return {}
            return {int(group): int(number) for group, number in stored["left"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable_state("env", file, error) from error
