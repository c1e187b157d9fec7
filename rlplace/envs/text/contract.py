"""Contracts of text tasks, as env workers use them, and the transcript that reward functions read.

::

    task.episode(number) ──▶ prompt ──▶ answer ── reply(answer) ──▶ text ──▶ answer ── reply(answer) ──▶ None
                                                                                          facts() ──▶ reward functions

A reply is a text of the user, or a NextTurn: other messages, after any of the answers so far, or a new conversation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from rlplace.errors import ConfigError, Source

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
class ToolCall:
    """A call of a tool by the policy.

    `name`: name of the tool. `arguments`: a JSON text; of an object, if the call is as it should be. `id`: by which the
    message with the result names the call.
    """

    name: str
    arguments: str
    id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    `content`: a text; or, for models that read images, texts and images in their order. `calls`: the tools that a
    message of the assistant calls. `call_id`, `name`: of a message of a tool: which call it is the result of, and the
    name of the tool; "" if they are not known. `is_learned`: whether supervised fine-tuning learns a message of the
    assistant.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | tuple[str | Image, ...]
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    is_learned: bool = True

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


class RawText(str):
    """A prompt that the model reads as it is, also if it chats: no chat template is around it."""


# A plain text becomes one user message for models that chat
Prompt = str | Sequence[Message]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NextTurn:
    """What the policy answers next.

    `after`: number of the answer that `messages` follow, counted from 0 over the whole episode; None: `messages` are
    the prompt of a new conversation. After an answer, a RawText follows it as it is, and messages by the chat template.
    """

    messages: Prompt
    after: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """An answer of the policy, as the engine sampled it.

    `text`: with its special tokens, but without those that end the answer. `prompt`: ids of the tokens that the answer
    follows. `tokens`: ids of its tokens, with the stop token. `logprobs`: log-probability of each token under the
    distribution from which it was sampled. `is_cut`: whether the answer was cut at a length limit. `decode`: returns
    the text of token ids, with special tokens.
    """

    text: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_cut: bool
    decode: Callable[[Sequence[int]], str]


class TextEpisode(Protocol):
    """One conversation between the policy and an environment. All methods are called by one thread.

    If an episode has a method `sampled(answer: Sampled)`, it is called before `reply` gets this answer as a text.

    If an episode has a method `replies(answers)`, it is called in place of `reply` and `sampled`. `answers`: for each
    turn that was asked at the same time, in the order of the turns: (text, Sampled). It returns a list of NextTurn,
    which are asked at the same time, or None if the episode is over. The list may be empty if turns of an earlier
    list were left for later, since the answers of all might have had more tokens than an episode may have.
    """

    @property
    def prompt(self) -> Prompt:
        """The prompt of the episode: a text, or messages."""
        ...

    def reply(self, answer: str) -> str | NextTurn | None:
        """Return the environment's reply to an answer of the policy; None if the episode is over.

        After None, this method is not called again. An answer that was cut at a length limit ends the episode, unless
        the reply to it is a NextTurn.
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

    If a task has a method `read_example_call(written)`, it gets the text that the chat template of the model makes of
    a call of a tool, before the first episode. A task with episodes that take long to begin also has a method
    `episodes(number, samples)`: it begins the episodes of all samples of a prompt together. The driver makes the task
    too, to find mistakes before workers start, so making it must be cheap. `reply` is called in several threads at
    once, for different episodes. If a task sets `replies_alone = True`, it is called only in the main thread of the
    rank, one call at a time.

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


@runtime_checkable
class HasPlaces(Protocol):
    """A task whose rows stand in files."""

    def place(self, number: int) -> Source:
        """Return the file and line of row number `number`."""
        ...


def place_of(task: TextTask, number: int) -> Source | None:
    """Return the file and line of row number `number` of a task; None if its rows stand in no file."""
    return task.place(number) if isinstance(task, HasPlaces) else None


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


def text_of(prompt: Prompt) -> str:
    """Return the texts of all messages of a prompt, each in lines of its own."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message.text for message in prompt)


def prompt_identity(prompt: Prompt) -> str:
    """Return a text that is equal for equal prompts. A plain text equals one message of the user with this text."""
    if isinstance(prompt, RawText):
        return f"raw text {prompt!r}"
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
