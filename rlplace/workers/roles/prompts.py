"""The prompts of one split of a text task, as tokens: their order, and what happens to those that are too long."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Literal

from rlplace.config import Config
from rlplace.envs.registry import make_task
from rlplace.envs.text import Split, TextEpisode, TextTask
from rlplace.errors import ConfigError, Problem
from rlplace.models.tokenizer import Chat, Conversation, PlainText, Tokenizer, Tokens

_TRIES = 100  # prompts of an endless task that are drawn before the error that none is short enough
_APART = 1 << 23  # between the numbers of these draws: more than a run asks


class PromptOrder:
    """Order of a finite set of prompts: every epoch all rows, each time in another order. Keeps one epoch.

    It follows from the size, the seed and the number alone, so every placement asks the same.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._epoch, self._rows = -1, list(range(size))

    def row(self, number: int) -> int:
        """Return the row of the prompt with this number since the first iteration."""
        epoch, place = divmod(number, self._size)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, list(range(self._size))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._rows)
        return self._rows[place]


class Prompts:
    """Episode number n of a run follows from the seed and n alone: the same in every placement."""

    def __init__(
        self, task: TextTask, conversation: Conversation, *, seed: int, longest: int, long: Literal["refuse", "drop"]
    ) -> None:
        self._task, self._conversation, self._longest, self._long = task, conversation, longest, long
        self.dropped = 0
        self._rows: list[int] | None = None  # None: the task has no end
        if task.size is not None:
            self._rows = self._fitting(task.size)
            self._order = PromptOrder(len(self._rows), seed)

    def episodes(self, number: int, samples: int) -> tuple[Tokens, list[TextEpisode]]:
        """Return the prompt [P] of episode `number`, 0 <= number, and the episode `samples` times."""
        if self._rows is not None:
            return self._begun(self._rows[self._order.row(number)], samples)
        lengths: list[int] = []
        for row in itertools.islice(itertools.count(number, _APART), _TRIES if self._long == "drop" else 1):
            tokens, episodes = self._begun(row, samples)
            if len(tokens) <= self._longest:
                return tokens, episodes
            lengths.append(len(tokens))
        raise ConfigError([self._too_long(f"prompt {number}: {lengths[0]} tokens", min(lengths))])

    def _begun(self, row: int, samples: int) -> tuple[Tokens, list[TextEpisode]]:
        episodes = [self._task.episode(row) for _ in range(samples)]
        return self._conversation.first(episodes[0].prompt), episodes

    def _fitting(self, size: int) -> list[int]:
        """Return the rows whose prompts are short enough. Raises ConfigError where none is left or none may be."""
        lengths = [len(self._begun(row, 1)[0]) for row in range(size)]
        fitting = [row for row, length in enumerate(lengths) if length <= self._longest]
        self.dropped = size - len(fitting)
        if not fitting or (self.dropped and self._long == "refuse"):
            most = max(lengths)
            got = f"{self.dropped} of {size} prompts; the longest, number {lengths.index(most)}, has {most} tokens"
            raise ConfigError([self._too_long(got, most)])
        return fitting

    def _too_long(self, got: str, enough: int) -> Problem:
        return Problem(
            code="long-prompts",
            key="algorithm.max_prompt_length",
            what=f"prompts are longer than {self._longest} tokens",
            got=got,
            why="a cut prompt asks something else, so none is cut",
            fix=f"max_prompt_length: {enough}        (or leave them out: env.long_prompts: drop)",
        )


def conversation_of(config: Config, tokenizer: Tokenizer) -> Conversation:
    """Return how the config's model takes turns."""
    kind = Chat if config.text_env.chat else PlainText
    return kind(tokenizer, system=config.text_env.system)


def prompts_of(config: Config, model: Path, split: Split) -> Prompts:
    """Return the prompts of a run, checked one by one where the task is finite; needs no worker.

    Raises ConfigError: a broken or empty data set, no chat template, prompts that are too long.
    """
    task = make_task(config.text_env, seed=config.runner.seed, split=split)
    conversation = conversation_of(config, Tokenizer.load(model))
    longest, seed = config.algorithm.max_prompt_length, config.runner.seed
    prompts = Prompts(task, conversation, seed=seed, longest=longest, long=config.text_env.long_prompts)
    prompts.episodes(0, 1)  # a mistake in an endless task shows here
    return prompts


def check_prompts(config: Config, model: Path) -> tuple[Problem, ...]:
    """Report what is wrong with the prompts of a run, held-out prompts included."""
    problems: list[Problem] = []
    splits: tuple[Split, ...] = ("train", "held_out") if config.runner.eval_every else ("train",)
    for split in splits:
        try:
            prompts_of(config, model, split)
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    return tuple(problems)
