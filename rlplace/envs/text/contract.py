"""What a text task does for an env worker, and what a reward function is shown.

::

    task.episode(number) ──▶ prompt ──▶ answer ── reply(answer) ──▶ text ──▶ answer ── reply(answer) ──▶ None
                                                                                          facts() ──▶ reward functions
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

Split = Literal["train", "held_out"]


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


Prompt = str | Sequence[Message]  # a text is one message of the user where the model chats


class TextEpisode(Protocol):
    """One conversation. Used by one thread."""

    @property
    def prompt(self) -> Prompt: ...

    def reply(self, answer: str) -> str | None:
        """What the environment says to an answer; None: the episode is over. Not called again after None."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """What reward functions judge the answers by, such as the right one. Asked once, after the last answer."""
        ...


class TextTask(Protocol):
    """A source of episodes, made as `Task(seed=..., split=..., **kwargs)`; a ValueError refuses the arguments.

    Cheap enough to be made on the driver too, which so finds mistakes before anything is launched.
    """

    rewards: ClassVar[Sequence[str]]  # names of the reward functions that count where the config names none

    @property
    def size(self) -> int | None:
        """How many different episodes there are; None: no end of them."""
        ...

    def episode(self, number: int) -> TextEpisode:
        """A new episode, the same for the same number (0 <= number, and below `size`), in every process."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OneTurn:
    """An episode that is over with the first answer."""

    prompt: Prompt
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def reply(self, answer: str) -> str | None:
        return None

    def facts(self) -> Mapping[str, Any]:
        return self.known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """An episode that is over, as reward functions see it."""

    prompt: Prompt
    answers: tuple[str, ...]  # without special tokens
    replies: tuple[str, ...]  # what the environment said between them
    facts: Mapping[str, Any]
    tokens: int  # that the policy wrote
    truncated: bool  # the last answer was cut by a length

    @property
    def answer(self) -> str:
        """The last one."""
        return self.answers[-1] if self.answers else ""
