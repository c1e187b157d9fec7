"""The rows of a run that learns from written answers: their tokens, and which of these are learned.

::

    {"prompt": "1+2?", "answer": "3"}                                  one answer, in a column of its own
    {"messages": [user, assistant, user, assistant]}                   several answers, as messages of the assistant
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace import codes
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.envs.text import Split, TextEpisode
from rlplace.envs.text.contract import (
    Message,
    MessagesWithTools,
    NoPrompt,
    OneTurn,
    place_of,
)
from rlplace.errors import ConfigError, Problem
from rlplace.models.learned_text import LearnedTokens
from rlplace.tokens import Files, Tokens
from rlplace.workers.roles.prompt_lengths import MANY, Lengths
from rlplace.workers.roles.prompts import LOG, Prompts, Tell, show, splits


class AnsweredRow(NamedTuple):
    """The tokens [L] of a row, and for each of them whether it is learned [L].

    `is_cut`: whether tokens beyond the limit are missing.
    """

    tokens: Tokens
    mask: NDArray[np.bool_]
    is_cut: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Answered(OneTurn):
    """A row whose answers are known. `prompt` has all its messages. `learned`: its tokens, before any is cut."""

    learned: LearnedTokens


class AnsweredRows(Prompts):
    """The rows of a run, numbered from 0, in the order in which `Prompts` asks them.

    A row is cut at `algorithm.longest` tokens. With `algorithm.truncated: mask`, nothing of a row that is cut is
    learned. `cut`, `unlearned`: how many rows of a data set are cut, and of how many nothing is learned; 0 for a task
    without end. `most`: tokens of its longest row.
    """

    def __init__(
        self,
        config: LanguageModelJobConfig,
        model: Path,
        split: Split,
        *,
        tell: Tell = LOG.info,
    ) -> None:
        """Read the rows and check them. The arguments are those of `Prompts`.

        Raises ConfigError for rows without an answer, and if nothing of any row is learned.
        """
        self.limit = config.algorithm.longest
        self._learns_cut = config.algorithm.truncated == "learn"
        self.cut = 0
        self.unlearned = 0
        self.most = 0
        super().__init__(config, model, split, tell=tell)
        if self.task.size and self.unlearned == self.task.size:
            raise codes.config_error(
                "no-written-answer",
                "algorithm.sequence_length",
                f"sequence_length: {self.limit}",
                error="all-cut",
                limit=self.limit,
                most=self.most,
            )

    def row(self, number: int) -> AnsweredRow:
        """Return row number `number`. It is numbered as a prompt: see `Prompts.episodes`."""
        _, _, episodes = self.episodes(number, 1)
        answered = episodes[0]
        assert isinstance(answered, _Answered), "as `_begun` makes them"
        return self._limited(answered.learned)

    def _limited(self, learned: LearnedTokens) -> AnsweredRow:
        """Return the tokens within the limit."""
        tokens, mask = learned
        is_cut = len(tokens) > self.limit
        mask = mask[: self.limit]
        if is_cut and not self._learns_cut:
            mask = np.zeros_like(mask)
        return AnsweredRow(tokens[: self.limit], mask, is_cut)

    def _lengths(self, size: int) -> Lengths:
        """Return the number of tokens before the first answer of each row, and count the rows that are cut.

        `size`: number of rows of the task.
        """
        if size >= MANY:
            self._tell(f"reading {size:,} rows ...")
        lengths = np.empty(size, np.int32)
        for row in range(size):
            tokens, _, episodes = self._begun(row, 1)
            lengths[row] = len(tokens)
            self._check_special(row, episodes[0].prompt)
            answered = episodes[0]
            assert isinstance(answered, _Answered), "as `_begun` makes them"
            self.most = max(self.most, len(answered.learned.tokens))
            limited = self._limited(answered.learned)
            self.cut += limited.is_cut
            self.unlearned += not limited.mask.any()
        return lengths

    def _begun(self, row: int, samples: int) -> tuple[Tokens, Files, list[TextEpisode]]:
        """Return the tokens before the first answer of a row, no images, and the row with its answers."""
        try:
            messages = self._messages(row)
            learned = self.conversation.learned(messages)
        except ConfigError as error:
            asked = [
                dataclasses.replace(
                    each, got=f"row {row}: {each.got}", source=place_of(self.task, row)
                )
                for each in error.problems
            ]
            raise NoPrompt(asked) from error
        first = int(learned.mask.argmax())
        answered = _Answered(prompt=messages, learned=learned)
        return learned.tokens[:first], (), [answered] * samples

    def _messages(self, row: int) -> Sequence[Message]:
        """Return the messages of a row; those of the assistant are its answers. Raises ConfigError without an answer.

        An answer in the column `answer` becomes the last message, if the last one is not of the assistant.
        """
        episode = self.task.episode(row)
        if not isinstance(episode, OneTurn):
            got = type(self.task).__name__
            raise codes.config_error("no-written-answer", "env.task", got, error="task")
        prompt = episode.prompt
        if isinstance(prompt, str):
            messages = [Message("user", prompt)]
        else:
            messages = list(prompt)
        if messages[-1].role != "assistant":
            answer = episode.facts().get("answer")
            # Of several right answers, the first one is learned
            if isinstance(answer, list | tuple) and answer:
                answer = answer[0]
            if answer is None:
                raise _no_answer("row", messages)
            messages.append(Message("assistant", str(answer)))
        answers = [each for each in messages if each.role == "assistant"]
        if not all(each.text.strip() for each in answers):
            raise _no_answer("empty", messages)
        if messages[0].role == "assistant":
            raise _no_answer("first", messages)
        if not any(each.is_learned for each in answers):
            raise _no_answer("unlearned", messages)
        if any(each.images for each in messages):
            raise codes.config_error(
                "bad-image", "env.kwargs", "images", error="unlearned"
            )
        if isinstance(prompt, MessagesWithTools):
            return MessagesWithTools.of(messages, prompt.tools)
        return messages

    def remark(self, component: str) -> str | None:
        """Return a line of text about the rows that are cut; None if none is. `component`: first word of the line."""
        if not self.cut:
            return None
        text = f"{component}: {self.cut} of {self.task.size} rows are cut at {self.limit} tokens"
        if self.unlearned:
            text += f", and nothing is learned of {self.unlearned}"
        return f"{text}: algorithm.sequence_length={self.most} keeps all of them"


def _no_answer(error: str, messages: Sequence[Message]) -> ConfigError:
    roles = ", ".join(each.role for each in messages)
    return codes.config_error("no-written-answer", "env.kwargs", roles, error=error)


def check_rows(config: LanguageModelJobConfig, model: Path) -> tuple[Problem, ...]:
    """Return the problems of the run's rows; an empty tuple if all rows are good.

    Held-out rows are checked too if the run evaluates. `model`: folder with the tokenizer.
    """
    problems: list[Problem] = []
    for split in splits(config):
        try:
            AnsweredRows(config, model, split, tell=show)
        except ConfigError as error:
            problems += [each for each in error.problems if each not in problems]
    return tuple(problems)
