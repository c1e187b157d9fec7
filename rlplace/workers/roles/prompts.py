"""The tokenized prompts of a run: their order, and the handling of prompts that are too long."""

from __future__ import annotations

import itertools
import logging
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlplace import codes
from rlplace.config.blocks.engine import ENDLESS_HELD_OUT
from rlplace.config.blocks.language_model import LanguageModelJobConfig, TextEnvConfig
from rlplace.config.yaml_text import show as show_value
from rlplace.envs.registry import make_task
from rlplace.envs.text import Image, Split, TextEpisode
from rlplace.envs.text.contract import NoPrompt, Prompt, episode_identity, place_of
from rlplace.envs.text.right_answers import THOUGHTS
from rlplace.envs.text.rows import Epochs, Share
from rlplace.errors import ConfigError, Problem, Source, did_you_mean
from rlplace.models.tokenizer import Chat, PlainText, Tokenizer
from rlplace.models.vision import VisionSpec
from rlplace.tokens import Files, Tokens
from rlplace.units import clipped
from rlplace.workers.roles.prompt_lengths import (
    MANY,
    Lengths,
    keep_lengths,
    kept_lengths,
    name_of,
)

# the end of a prompt in which a chat template opens a tag for the answer, and the tags that are known
_TAG_TOKENS = 24
_OPENED = re.compile(
    rf"[<\[](?:{THOUGHTS}|answer|solution)[>\]]\s{{0,8}}$",
    re.IGNORECASE,
)
LOG = logging.getLogger(__name__)
_SHOWN = 200  # characters of a prompt that an error shows
# Takes a line of text about work that takes long
Tell = Callable[[str], object]
_TRIES = 100  # draws of an endless task before the error that no prompt is short enough
# offset between the numbers of redraws; larger than any run's number of prompts
_APART = 1 << 23


class Prompts:
    """The prompts of a run, numbered from 0, with their tokens.

    Prompt number n depends only on n and on the seed, so it is the same in every placement. If the task has a fixed
    number of rows, each epoch of training uses each row once, or as often as the weight of its data set says, in a
    random order of its own.

    Held-out prompts have one fixed order, and none comes twice. They depend on `env.eval_seed`, not on `runner.seed`,
    so all evaluations of all runs ask the same prompts.
    """

    def __init__(
        self,
        config: LanguageModelJobConfig,
        model: Path,
        split: Split,
        *,
        tell: Tell = LOG.info,
    ) -> None:
        """Read the task's prompts and check them. This can run without workers.

        `model`: folder with the tokenizer. `split`: training or held-out prompts. `tell`: takes a line of text about
        work that takes long. Raises ConfigError for broken or empty data, for a missing chat template, and for a prompt
        that is too long.
        """
        env = config.env
        self._model = model
        self._settings = {
            "chat": env.chat,
            "system": env.system,
            "template": dict(env.template),
        }
        self._tell = tell
        self.held_out = split == "held_out"
        self._seed = env.eval_seed if self.held_out else config.runner.seed
        self.task = make_task(env, seed=self._seed, split=split)
        self.tokenizer = Tokenizer.load(model)
        self._vision = VisionSpec.of(model, env)
        self.conversation = _conversation(env, self.tokenizer)
        if read_example_call := getattr(self.task, "read_example_call", None):
            read_example_call(self.conversation.example_call())
        self._longest = config.algorithm.max_prompt_length
        self._drop = env.long_prompts == "drop"
        self.dropped = 0
        # None for an endless task
        self._epochs: Epochs | None = None
        # Rows of the task that an evaluation asks, in this order
        self._asked: Sequence[int] = ()
        fitting: Sequence[int] | None = None
        if self.task.size is not None:
            fitting = self._fitting(self.task.size)
        if self.held_out:
            self._asked = self._held_out_rows(fitting, config.runner.eval_prompts)
        elif fitting is not None:
            self._epochs = Epochs(self._shares(fitting), self._seed)
        # Raises errors of an endless task here.
        self.episodes(0, 1)

    def episodes(
        self, number: int, samples: int
    ) -> tuple[Tokens, Files, list[TextEpisode]]:
        """Return the tokens and the images of prompt number `number`, and new episodes that begin with this prompt.

        `number`: at least 0, and below `asked` for held-out prompts; equal numbers give equal prompts. `samples`:
        number of episodes.
        """
        if self.held_out:
            return self._begun(self._asked[number], samples)
        if self._epochs is not None:
            return self._begun(self._epochs.row(number), samples)
        lengths: list[int] = []
        for row in itertools.islice(
            itertools.count(number, _APART), _TRIES if self._drop else 1
        ):
            tokens, images, episodes = self._begun(row, samples)
            if len(tokens) <= self._longest:
                return tokens, images, episodes
            lengths.append(len(tokens))
        raise self._too_long(f"prompt {number}: {lengths[0]} tokens", min(lengths))

    def opened(self, prompt: Tokens) -> str:
        """Return the tag with which the tokens of a prompt end, such as "<think>"; "" if they end with none."""
        end = self.tokenizer.decode(prompt[-_TAG_TOKENS:], special=True)
        found = _OPENED.search(end)
        if found is None:
            return ""
        return found[0]

    def _shares(self, fitting: Sequence[int]) -> list[Share]:
        """Return the data sets of the task with their weights, without rows that are not in `fitting`.

        A task that does not tell its data sets has one, with the weight 1.
        """
        shares: Sequence[Share] | None = getattr(self.task, "shares", None)
        if shares is None:
            return [Share(rows=fitting, weight=1.0)]
        short = set(fitting)
        return [
            replace(share, rows=[row for row in share.rows if row in short])
            for share in shares
        ]

    @property
    def asked(self) -> int:
        """The number of held-out prompts that an evaluation asks."""
        return len(self._asked)

    def _held_out_rows(
        self, fitting: Sequence[int] | None, limit: int | None
    ) -> list[int]:
        """Return the numbers of the task's rows that an evaluation asks, each once, in ascending order.

        `fitting`: the rows of a data set that are short enough; None: the task has no end. `limit`: the largest number
        of rows; None: all rows of a data set, or ENDLESS_HELD_OUT prompts of an endless task. A smaller part of a data
        set is drawn with `env.eval_seed`.
        """
        if fitting is None:
            return self._different(limit or ENDLESS_HELD_OUT)
        if limit is None or limit >= len(fitting):
            return list(fitting)
        return sorted(random.Random(str(self._seed)).sample(fitting, limit))

    def _different(self, limit: int) -> list[int]:
        """Return the numbers of the first `limit` different prompts of an endless task.

        There are fewer if the task repeats itself, that is, if no new prompt comes in many draws. Prompts that are too
        long are left out if the config allows it.
        """
        rows: list[int] = []
        seen = set[str | None]()
        draws_since_new = 0
        for row in itertools.count():
            draws_since_new += 1
            identity = episode_identity(self.task, row)
            # Without an identity, equal episodes cannot be recognised
            if identity is None or identity not in seen:
                seen.add(identity)
                length = len(self._begun(row, 1)[0])
                if length <= self._longest:
                    rows.append(row)
                    draws_since_new = 0
                elif not self._drop:
                    raise self._too_long(f"prompt {row}: {length} tokens", length)
                else:
                    self.dropped += 1
            enough = draws_since_new >= _TRIES + _TRIES * len(rows)
            if len(rows) == limit or enough:
                break
        if not rows:
            raise self._too_long(f"prompt 0: {length} tokens", length)
        return rows

    def _begun(self, row: int, samples: int) -> tuple[Tokens, Files, list[TextEpisode]]:
        together = getattr(self.task, "episodes", None)
        episodes = (
            together(row, samples)
            if together
            else [self.task.episode(row) for _ in range(samples)]
        )
        prompt = episodes[0].prompt
        try:
            tokens: Tokens = self.conversation.first(prompt)
        except ConfigError as error:  # from the template, or an incomplete character
            asked = [
                replace(
                    p, got=f"prompt {row}: {p.got}", source=place_of(self.task, row)
                )
                for p in error.problems
            ]
            raise NoPrompt(asked) from error
        images: Files = ()
        shown = (
            []
            if isinstance(prompt, str)
            else [image for message in prompt for image in message.images]
        )
        if self._vision is not None:
            images, counts = self._vision.read(shown)
            tokens = self._vision.expand(tokens, counts)
        elif shown:
            raise self._unseen(shown)
        if not len(tokens):
            got = f"prompt {row}: {episodes[0].prompt!r}"
            raise codes.config_error(
                "empty-prompt", "env.kwargs", got, source=place_of(self.task, row)
            )
        return tokens, images, episodes

    def _fitting(self, size: int) -> list[int]:
        """Return the indices of the task's rows whose prompts are short enough.

        `size`: number of rows of the task. Raises ConfigError if all prompts are too long, or if any prompt is too long
        and the config does not allow to drop long prompts.
        """
        lengths = self._lengths(size)
        fitting = np.flatnonzero(lengths <= self._longest).tolist()
        self.dropped = size - len(fitting)
        if not fitting or (self.dropped and not self._drop):
            most = int(lengths.max())
            longest = int(lengths.argmax())
            got = f"{self.dropped} of {size} prompts; the longest, number {longest}, has {most} tokens"
            raise self._too_long(got, most, place_of(self.task, longest))
        return fitting

    def _lengths(self, size: int) -> Lengths:
        """Return the number of tokens of each prompt. `size`: number of rows of the task.

        Of a large data set they are kept, since counting takes long and each env rank needs them.
        """
        name = None
        content: str | None = getattr(self.task, "content", None)
        if size >= MANY and content is not None and self._vision is None:
            name = name_of(content, self._model, self._settings)
        if name is not None and (kept := kept_lengths(name, size)) is not None:
            return kept
        if size >= MANY:
            self._tell(f"counting the tokens of {size:,} prompts ...")
        began = time.perf_counter()
        lengths = np.empty(size, np.int32)
        for row in range(size):
            tokens, _, episodes = self._begun(row, 1)
            self._check_special(row, episodes[0].prompt)
            lengths[row] = len(tokens)
        if size >= MANY:
            seconds = time.perf_counter() - began
            file = None if name is None else keep_lengths(name, lengths)
            where = "" if file is None else f", kept in {file.parent}"
            self._tell(f"counted in {seconds:.1f} s{where}")
        return lengths

    def _check_special(self, row: int, prompt: Prompt) -> None:
        """Raise NoPrompt if a message of a chat has a special token in its text, which would end the message.

        `row`: number of the prompt in the task. Prompts that are not chats may be rendered chats.
        """
        if isinstance(self.conversation, PlainText):
            return
        if isinstance(prompt, str):
            texts = [prompt]
        else:
            texts = [message.text for message in prompt]
        for text in texts:
            token = self.tokenizer.special_in(text)
            if token is not None:
                found = codes.problem(
                    "special-token-in-prompt",
                    "env.chat",
                    clipped(f"prompt {row}: {text!r}", _SHOWN),
                    source=place_of(self.task, row),
                    token=token,
                )
                raise NoPrompt([found])

    def _unseen(self, shown: Sequence[Image]) -> ConfigError:
        return codes.config_error(
            "bad-image", "env.kwargs", f"{len(shown)} images", error="unseen"
        )

    def _too_long(
        self, got: str, enough: int, place: Source | None = None
    ) -> ConfigError:
        error = "refused"
        if self._drop:
            error = "all-dropped"
        return codes.config_error(
            "long-prompts",
            "algorithm.max_prompt_length",
            got,
            error=error,
            source=place,
            longest=self._longest,
            enough=enough,
        )


def _conversation(env: TextEnvConfig, tokenizer: Tokenizer) -> Chat | PlainText:
    """Return the converter from prompts to tokens: a chat template if `env.chat` is set, else plain text.

    Raises ConfigError for a value of `env.template` that the template has no variable for, so that it has no effect.
    """
    problems = []
    known = tokenizer.variables if env.chat else frozenset[str]()
    for name, value in env.template.items():
        if name in known or (env.chat and tokenizer.chat_template is None):
            continue
        near = did_you_mean(name, known)
        error = "misspelt" if near else "unknown"
        if not env.chat:
            error = "no-template"
        key = f"env.template.{name}"
        problems.append(
            codes.problem(
                "unused-template-value",
                key,
                show_value(value),
                error=error,
                name=name,
                near=near,
            )
        )
    if problems:
        raise ConfigError(problems)
    if env.chat:
        return Chat(tokenizer, system=env.system, arguments=env.template)
    return PlainText(tokenizer, system=env.system)


def rendered_by(
    config: LanguageModelJobConfig, model: Path
) -> Callable[[Prompt], str] | None:
    """Return a function that returns a prompt as the text that the model reads; None if there is no tokenizer.

    `model`: folder with the tokenizer.
    """
    try:
        return _conversation(config.env, Tokenizer.load(model)).text
    # Other checks report a missing tokenizer
    except (ConfigError, ModuleNotFoundError):
        return None


def splits(config: LanguageModelJobConfig) -> tuple[Split, ...]:
    if config.runner.eval_every:
        return ("train", "held_out")
    return ("train",)


def show(line: str) -> None:
    """Show a line about work that takes long; a command may print its result to standard output."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def check_prompts(config: LanguageModelJobConfig, model: Path) -> tuple[Problem, ...]:
    """Return the problems of the run's prompts; an empty tuple if all prompts are good.

    Held-out prompts are checked too if the run evaluates. `model`: folder with the tokenizer.
    """
    problems: list[Problem] = []
    for split in splits(config):
        try:
            Prompts(config, model, split, tell=show)
        except ConfigError as error:
            problems += [
                problem for problem in error.problems if problem not in problems
            ]
    return tuple(problems)
