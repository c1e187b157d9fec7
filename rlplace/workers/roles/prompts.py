"""The prompts of one split of a text task, as tokens: which comes when, and what becomes of those that are too long."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

from rlplace.config import Config
from rlplace.envs.text import Split, TextEpisode, TextTask, make_task
from rlplace.envs.text.order import PromptOrder
from rlplace.errors import ConfigError, Problem
from rlplace.models.conversation import Chat, Conversation, PlainText
from rlplace.models.tokenizer import Tokenizer, Tokens

_TRIES = 100  # prompts of an endless task that are drawn before it is said that none is short enough
_APART = 1 << 23  # between the numbers of these draws: more than a run asks


class Prompts:
    """Which episode is number n of a run follows from the seed and n alone: the same in every placement."""

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
        """The prompt [P] of episode `number`, 0 <= number, and the episode `samples` times."""
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
        """Rows whose prompts are short enough."""
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
    """How the config's model takes turns."""
    kind = Chat if config.text_env.chat else PlainText
    return kind(tokenizer, system=config.text_env.system)


def prompts_of(config: Config, model: Path, split: Split) -> Prompts:
    """The prompts of a run, checked one by one where they have an end; no worker is needed for that.

    Raises ConfigError: a broken or empty data set, no chat template, prompts that are too long.
    """
    task = make_task(config.text_env, seed=config.runner.seed, split=split)
    conversation = conversation_of(config, Tokenizer.load(model))
    longest, seed = config.algorithm.max_prompt_length, config.runner.seed
    prompts = Prompts(task, conversation, seed=seed, longest=longest, long=config.text_env.long_prompts)
    prompts.episodes(0, 1)  # an endless task shows here what is wrong with all of it
    return prompts


def check_prompts(config: Config, model: Path) -> tuple[Problem, ...]:
    """What is wrong with what a run would ask, held-out prompts included."""
    problems: list[Problem] = []
    splits: tuple[Split, ...] = ("train", "held_out") if config.runner.eval_every else ("train",)
    for split in splits:
        try:
            prompts_of(config, model, split)
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    return tuple(problems)
