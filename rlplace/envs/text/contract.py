"""Contracts of text tasks, as env workers use them, and the transcript that reward functions read.

::

    task.episode(number) ──▶ prompt ──▶ answer ── reply(answer) ──▶ text ──▶ answer ── reply(answer) ──▶ None
                                                                                          facts() ──▶ reward functions
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from rlplace.errors import ConfigError

Split = Literal["train", "held_out"]


class NoPrompt(ConfigError):
    """The error that an episode could not begin. A check of a config reports it; a run may take another prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """A PNG or JPEG image.

    `source`: the path of a file that every env rank can read, or the bytes of the file.
    """

    source: str | bytes

    def read(self) -> bytes:
        """Return the bytes of the image file. Raises OSError."""
        if isinstance(self.source, bytes):
            return self.source
        return Path(self.source).read_bytes()


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    `content`: a text; or, for models that read images, texts and images in their order.
    """

    role: Literal["system", "user", "assistant"]
    content: str | tuple[str | Image, ...]

    @property
    def text(self) -> str:
        """All texts of the message, joined. Images are left out."""
        parts = (self.content,) if isinstance(self.content, str) else self.content
        return "".join(part for part in parts if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of the message, in their order."""
        return tuple(part for part in self.content if isinstance(part, Image))


class MessagesWithTools(tuple[Message, ...]):
    """The messages of a prompt, and the definitions of the tools that the chat template shows with them.

    `tools`: a mapping for each tool, in the form of JSON Schema that chat templates take.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(
        cls, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> MessagesWithTools:
        """Return `messages` with `tools`."""
        made = cls(messages)
        made.tools = tools
        return made


# A plain text becomes one user message for models that chat
Prompt = str | Sequence[Message]


class TextEpisode(Protocol):
    """One conversation between the policy and an environment. All methods are called by one thread.

    If an episode has a method `cut()`, it is called before `reply` gets an answer that was cut at a length limit.
    """

    @property
    def prompt(self) -> Prompt:
        """The prompt of the episode: a text, or messages."""
        ...

    def reply(self, answer: str) -> str | None:
        """Return the environment's reply to an answer of the policy; None if the episode is over.

        After None, this method is not called again.
        """
        ...

    def facts(self) -> Mapping[str, Any]:
        """Return name -> value: what reward functions need besides the answers, such as the right answer.

        This method is called once, at the end of the episode.
        """
        ...


class TextTask(Protocol):
    """A source of episodes, made as `Task(seed=..., split=..., **kwargs)`. A ValueError there rejects the arguments.

    `rewards`: reward functions to use if the config names none.

    A task with episodes that take long to begin also has a method `episodes(number, samples)`: it begins the episodes
    of all samples of a prompt together. The driver makes the task too, to find mistakes before workers start, so making
    it must be cheap. `reply` is called in several threads at once, for different episodes. If a task sets
    `replies_alone = True`, it is called only in the main thread of the rank, one call at a time.

    A task whose episodes have several turns may have a method `identity(number)`, which returns a text: equal texts for
    equal episodes. An evaluation then asks no episode twice. Episodes of class OneTurn are compared by their prompts.
    """

    # Reward functions to use if the config names none
    rewards: ClassVar[Sequence[str]]

    @property
    def size(self) -> int | None:
        """The number of different episodes; None if it is unlimited."""
        ...

    def episode(self, number: int) -> TextEpisode:
        """Return a new episode. Equal numbers (0 <= number < `size`) give equal episodes in every process."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OneTurn:
    """An episode that ends after the first answer.

    `known`: what `facts` returns: name -> value, for reward functions.
    """

    prompt: Prompt
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def reply(self, answer: str) -> str | None:
        """Return None, since the episode is over after the first answer."""
        return None

    def facts(self) -> Mapping[str, Any]:
        """Return the facts for reward functions, name -> value."""
        return self.known


def prompt_identity(prompt: Prompt) -> str:
    """Return a text that is equal for equal prompts. A plain text equals one message of the user with this text."""
    if isinstance(prompt, str):
        prompt = [Message("user", prompt)]
    if isinstance(prompt, MessagesWithTools):
        return repr((list(prompt), prompt.tools))
    return repr(list(prompt))


def episode_identity(
    task: TextTask, number: int, shown: Callable[[Prompt], str] = prompt_identity
) -> str | None:
    """Return a text that is equal for equal episodes of a task, such as its prompt; None if the task has none.

    `number`: number of the episode. `shown`: takes the prompt of an episode of class OneTurn, and returns the text.
    """
    identity = getattr(task, "identity", None)
    if identity is not None:
        return str(identity(number))
    if hasattr(task, "episodes"):
        # Beginning an episode of such a task takes long.
        return None
    episode = task.episode(number)
    if not isinstance(episode, OneTurn):
        return None
    return shown(episode.prompt)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A finished episode, as reward functions get it.

    `answers`: answers of the policy, without the special tokens that begin and end texts and turns; those of tags, such
    as <think>, are there. `replies`: replies of the environment, between the answers.
    `facts`: name -> value from the task, such as the right answer.
    `tokens`: number of tokens that the policy sampled. `truncated`: whether the last answer was cut off by a length
    limit. `opened`: the tag with which each prompt ends, if the chat template begins answers with one, such as
    "<think>"; it is not repeated in the answers.
    """

    prompt: Prompt
    answers: tuple[str, ...]
    replies: tuple[str, ...]
    facts: Mapping[str, Any]
    tokens: int
    truncated: bool
    opened: str = ""

    @property
    def answer(self) -> str:
        """The last answer; "" if there is none."""
        if self.answers:
            return self.answers[-1]
        return ""
