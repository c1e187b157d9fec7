"""The prompts of one split of a text task, as tokens: their order, and what happens to those that are too long."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from rlplace.config.schema import Config
from rlplace.envs.registry import make_task
from rlplace.envs.text import Split, TextEpisode
from rlplace.errors import ConfigError, Problem
from rlplace.models.tokenizer import Chat, PlainText, Tokenizer, Tokens

_TRIES = 100  # prompts of an endless task that are drawn before the error that none is short enough
_APART = 1 << 23  # between the numbers of these draws: more than a run asks


class Prompts:
    """Episode number n of a run follows from the seed and n alone: the same in every placement.

    Every epoch of a finite task asks all its rows, each time in another order, of which one is kept.
    """

    def __init__(self, config: Config, model: Path, split: Split) -> None:
        """Check the prompts, one by one where the task is finite; needs no worker.

        Raises ConfigError: a broken or empty data set, no chat template, prompts that are too long.
        """
        env = config.text_env
        self.task = make_task(env, seed=config.runner.seed, split=split)
        self.tokenizer = Tokenizer.load(model)
        self.conversation = (Chat if env.chat else PlainText)(self.tokenizer, system=env.system)
        self._longest, self._drop = config.algorithm.max_prompt_length, env.long_prompts == "drop"
        self.dropped = 0
        self._seed, self._epoch, self._order = config.runner.seed, -1, list[int]()
        self._rows = None if self.task.size is None else self._fitting(self.task.size)  # None: the task has no end
        self.episodes(0, 1)  # a mistake in an endless task shows here

    def episodes(self, number: int, samples: int) -> tuple[Tokens, list[TextEpisode]]:
        """Return the prompt [P] of episode `number`, 0 <= number, and the episode `samples` times."""
        if self._rows is not None:
            epoch, place = divmod(number, len(self._rows))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, list(self._rows)
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            return self._begun(self._order[place], samples)
        lengths: list[int] = []
        for row in itertools.islice(itertools.count(number, _APART), _TRIES if self._drop else 1):
            tokens, episodes = self._begun(row, samples)
            if len(tokens) <= self._longest:
                return tokens, episodes
            lengths.append(len(tokens))
        raise self._too_long(f"prompt {number}: {lengths[0]} tokens", min(lengths))

    def _begun(self, row: int, samples: int) -> tuple[Tokens, list[TextEpisode]]:
        episodes = [self.task.episode(row) for _ in range(samples)]
        return self.conversation.first(episodes[0].prompt), episodes

    def _fitting(self, size: int) -> list[int]:
        """Return the rows whose prompts are short enough. Raises ConfigError where none is left or none may be."""
        lengths = [len(self._begun(row, 1)[0]) for row in range(size)]
        fitting = [row for row, length in enumerate(lengths) if length <= self._longest]
        self.dropped = size - len(fitting)
        if not fitting or (self.dropped and not self._drop):
            most = max(lengths)
            got = f"{self.dropped} of {size} prompts; the longest, number {lengths.index(most)}, has {most} tokens"
            raise self._too_long(got, most)
        return fitting

    def _too_long(self, got: str, enough: int) -> ConfigError:
        what = f"prompts are longer than {self._longest} tokens"
        why = "a cut prompt asks something else, so none is cut"
        fix = f"max_prompt_length: {enough}        (or leave them out: env.long_prompts: drop)"
        return ConfigError.of("long-prompts", "algorithm.max_prompt_length", what, got, why, fix)


def check_prompts(config: Config, model: Path) -> tuple[Problem, ...]:
    """Report what is wrong with the prompts of a run, held-out prompts included."""
    problems: list[Problem] = []
    splits: tuple[Split, ...] = ("train", "held_out") if config.runner.eval_every else ("train",)
    for split in splits:
        try:
            Prompts(config, model, split)
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    return tuple(problems)
