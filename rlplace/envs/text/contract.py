"""Contracts of text tasks, as an env worker uses them, and the transcript that reward functions read.

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
    """An episode could not begin; where a config is checked that refuses it, in a run another prompt may be asked."""


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """A PNG or JPEG, as a file that every env rank can read, or as the bytes of one."""

    source: str | bytes

    def read(self) -> bytes:
        """Raises OSError."""
        if isinstance(self.source, bytes):
            return self.source
        return Path(self.source).read_bytes()


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    role: Literal["system", "user", "assistant"]
    # Parts where a model sees images, in the order in which it reads them
    content: str | tuple[str | Image, ...]

    @property
    def text(self) -> str:
        parts = (self.content,) if isinstance(self.content, str) else self.content
        return "".join(part for part in parts if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.content if isinstance(part, Image))


# A text is one message of the user where the model chats
Prompt = str | Sequence[Message]


class TextEpisode(Protocol):
    """One conversation. Used by one thread."""

    @property
    def prompt(self) -> Prompt: ...

    def reply(self, answer: str) -> str | None:
        """Return the environment's reply to an answer; None when the episode is over. Not called again after None."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Return what reward functions compare answers with, such as the right one. Called once, at the end."""
        ...


class TextTask(Protocol):
    """A source of episodes, made as `Task(seed=..., split=..., **kwargs)`; a ValueError refuses the arguments.

    One whose episodes take long to begin has `episodes(number, samples)`, too, which begins those of a prompt together.

    Cheap enough to be made on the driver too, which so finds mistakes before anything is launched. Replies to different
    episodes are made in threads, at the same time; with `replies_alone = True`, one by one in the rank's own.
    """

    # Names of the reward functions that count where the config names none
    rewards: ClassVar[Sequence[str]]

    @property
    def size(self) -> int | None:
        """Number of different episodes; None: endless."""
        ...

    def episode(self, number: int) -> TextEpisode:
        """Return a new episode, the same for the same number (0 <= number < `size`), in every process."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OneTurn:
    """An episode that ends with the first answer."""

    prompt: Prompt
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def reply(self, answer: str) -> str | None:
        return None

    def facts(self) -> Mapping[str, Any]:
        return self.known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A finished episode, as reward functions read it."""

    prompt: Prompt
    answers: tuple[str, ...]  # without special tokens
    replies: tuple[str, ...]  # the environment's, between the answers
    facts: Mapping[str, Any]
    tokens: int  # that the policy wrote
    truncated: bool  # the last answer was cut by a length

    @property
    def answer(self) -> str:
        """The last one."""
        if self.answers:
            return self.answers[-1]
        return ""
