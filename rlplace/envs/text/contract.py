"""Contracts of text tasks, as env workers use them, and the transcript that reward functions read.

::

    task.episode(number) ──▶ prompt ──▶ answer ── reply(answer) ──▶ text ──▶ answer ── reply(answer) ──▶ None
                                                                                          facts() ──▶ reward functions
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from rlplace.errors import ConfigError

Split = Literal["train", "held_out"]


class NoPrompt(ConfigError):
    """An episode could not begin. A check of a config reports this error; a run may take another prompt instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """A PNG or JPEG image: the path of a file that every env rank can read, or the bytes of such a file."""

    source: str | bytes

    def read(self) -> bytes:
        """Return the bytes of the image file. Raises OSError."""
        if isinstance(self.source, bytes):
            return self.source
        return Path(self.source).read_bytes()


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    # Text; or, for models that read images, texts and images in their order
    content: str | tuple[str | Image, ...]

    @property
    def text(self) -> str:
        """The whole text of the message, without images."""
        parts = (self.content,) if isinstance(self.content, str) else self.content
        return "".join(part for part in parts if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of the message, in their order."""
        return tuple(part for part in self.content if isinstance(part, Image))


# A plain text becomes one user message for models that chat
Prompt = str | Sequence[Message]


class TextEpisode(Protocol):
    """One conversation, used by one thread."""

    @property
    def prompt(self) -> Prompt:
        """The prompt of the episode: a text, or messages."""
        ...

    def reply(self, answer: str) -> str | None:
        """Return the environment's reply to an answer of the policy, or None if the episode is over.

        After None, this method is not called again.
        """
        ...

    def facts(self) -> Mapping[str, Any]:
        """Return name -> value, for all that reward functions need besides the answers, such as the right answer.

        Called once, at the end of the episode.
        """
        ...


class TextTask(Protocol):
    """A source of episodes, made as `Task(seed=..., split=..., **kwargs)`. A ValueError rejects the arguments.

    A task whose episodes take long to begin also has a method `episodes(number, samples)`, which begins the episodes of
    all samples of a prompt together.

    The driver makes the task too, to find mistakes before workers start, so making it must be cheap. `reply` is called
    in several threads at once, for different episodes; for a task with `replies_alone = True`, one call at a time, in
    the main thread of the rank.
    """

    # Reward functions to use if the config names none
    rewards: ClassVar[Sequence[str]]

    @property
    def size(self) -> int | None:
        """The number of different episodes; None if there is no end."""
        ...

    def episode(self, number: int) -> TextEpisode:
        """Return a new episode. Equal numbers (0 <= number < `size`) give equal episodes in every process."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OneTurn:
    """An episode that ends with the first answer."""

    prompt: Prompt
    # What `facts` returns
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def reply(self, answer: str) -> str | None:
        """Return None, since the episode is over after the first answer."""
        return None

    def facts(self) -> Mapping[str, Any]:
        """Return the facts that were given when the episode was made."""
        return self.known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A finished episode, as reward functions read it."""

    prompt: Prompt
    answers: tuple[str, ...]  # of the policy, without special tokens
    replies: tuple[str, ...]  # of the environment, between the answers
    facts: Mapping[str, Any]  # of the task, such as the right answer
    tokens: int  # number of tokens that the policy sampled
    truncated: bool  # the last answer was cut off by a length limit

    @property
    def answer(self) -> str:
        """The last answer; "" if there is none."""
        if self.answers:
            return self.answers[-1]
        return ""
