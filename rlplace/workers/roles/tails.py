"""Tail batching: choose the prompts of an iteration; prompts with slow answers move to a later round that waits for
all answers.

An example with `short_rounds: 2` and 4 prompts in an iteration; prompts are named by their numbers in the run::

    round 0   asks 0-3 and 8, 10                   ends when 4 groups are complete, and postpones the other 2 prompts
    round 1   asks 4-7 and 9, 11                   ends when 4 groups are complete, and postpones the other 2 prompts
    round 2   asks the 4 postponed prompts         waits for all; learned so far: 0-11, each once

So the prompts of three rounds are those that three rounds without postponing would ask (RollPacker, arXiv 2509.21009).
The answers to a postponed prompt are dropped. If prompt 8 was asked ahead and prompt 2 was postponed, round 2 asks
prompt 2 in place of prompt 8. A checkpoint has these pairs of prompts, so a run that resumes between two rounds loses
no prompt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from rlplace.json_text import parsed
from rlplace.workers.saving import unreadable_state


class Tails:
    """Chooses the prompts to which one env rank requests answers in each iteration, if the config has short rounds.

    An iteration is a short round or a long round. A short round also requests answers to a few prompts of the next long
    round, in advance. It ends before all answers are complete, and postpones as many slow prompts as were requested in
    advance. The long round requests the postponed prompts in place of those requested in advance, and waits for all
    answers.

    `left`: prompt requested in advance -> postponed prompt.
    """

    def __init__(
        self,
        short_rounds: int,
        prompts: int,
        groups: range,
        first: Callable[[int], int] | None = None,
    ) -> None:
        """Start without postponed prompts.

        `short_rounds`: number of short rounds before each long round. `prompts`: number of prompts in an iteration.
        `groups`: group numbers that this rank owns in an iteration. `first`: function from an iteration to the number
        of its first prompt; None: all iterations of the run have had `prompts` prompts.
        """
        self._short = short_rounds
        self._prompts = prompts
        self._groups = groups
        self._first = first or (lambda iteration: iteration * prompts)
        # Prompt asked ahead in a short round -> postponed prompt, of this run
        self.left: dict[int, int] = {}
        # The same pairs, as read from the checkpoint
        self._before: dict[int, int] = {}

    def asked(self, iteration: int) -> dict[int, int]:
        """Return the prompts to which this rank requests answers in `iteration`: group number -> prompt number.

        A short round also requests answers to prompts of the next long round. If such a prompt belongs to group g of
        the long round, it has the group number `prompts` + g in the short round.
        """
        first = self._first(iteration)
        places = {group: first + group for group in self._groups}
        instead = self._before
        if self._round(iteration) == self._short:
            instead = instead | self.left
        else:
            ahead = self._ahead(iteration)
            places |= {
                self._prompts + group: number
                for group, number in zip(self._early(iteration), ahead, strict=True)
            }
        return {place: instead.get(number, number) for place, number in places.items()}

    def more(self, iteration: int) -> int:
        """Return for how many groups this rank requests answers in `iteration` without waiting for them.

        Return 0 in a long round, which waits for all answers.
        """
        return len(self._early(iteration))

    def leave(self, iteration: int, numbers: list[int]) -> None:
        """Postpone prompts of the short round `iteration`, whose answers are not complete, to the next long round.

        `numbers`: the prompt numbers, as many as `more` returns for `iteration`.
        """
        # Earlier pairs are not needed any more.
        first = self._first(iteration)
        self._before, self.left = (
            {n: m for n, m in known.items() if n >= first}
            for known in (self._before, self.left)
        )
        self.left |= dict(zip(self._ahead(iteration), numbers, strict=True))

    def _round(self, iteration: int) -> int:
        return iteration % (self._short + 1)

    def _early(self, iteration: int) -> list[int]:
        """Return the groups of the next long round whose prompts are requested in advance, in the short round
        `iteration`.

        If `iteration` is a long round, return an empty list.
        """
        return [
            group
            for group in self._groups
            if self._short and group % self._short == self._round(iteration)
        ]

    def _ahead(self, iteration: int) -> list[int]:
        """Return the prompt numbers of the next long round that are requested in advance, in the short round
        `iteration`.

        If `iteration` is a long round, return an empty list.
        """
        last = self._first(iteration + self._short - self._round(iteration))
        return [last + group for group in self._early(iteration)]

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, folder: Path) -> list[str]:
        """Write the pairs (prompt requested in advance, postponed prompt) as one file in `folder`, flushed to disk.

        Return a list with the file's name. A rank without groups writes nothing and returns an empty list.
        """
        if not self._groups:
            return []
        name = f"tails_{self._groups.start:05}-{self._groups.stop - 1:05}.json"
        with open(folder / name, "w", encoding="utf-8") as out:
            json.dump(
                {"prompts": self._prompts, "instead": self._before | self.left}, out
            )
            out.flush()
            os.fsync(out.fileno())
        return [name]

    def read(self, folder: Path) -> None:
        """Read the pairs (prompt requested in advance, postponed prompt) of this rank's groups from all files in
        `folder`.

        The numbers of ranks and of prompts in an iteration may be others than when the files were written.
        """
        self.left = {}
        self._before = {}
        for file in sorted(folder.glob("tails_*.json")):
            # The group in which this run asks a prompt follows from the prompt's number
            for ahead, left in self._stored(file).items():
                if (ahead - self._first(0)) % self._prompts in self._groups:
                    self._before[ahead] = left

    def _stored(self, file: Path) -> Mapping[int, int]:
        try:
            stored = parsed(file.read_text(encoding="utf-8"))
            return {int(ahead): int(left) for ahead, left in stored["instead"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable_state("env", file, error) from error
