"""Turn prompts and replies into tokens: each is encoded alone and appended; sampled tokens are never encoded again.

::

    first:  [system, user] by the template, up to where the answer begins     ┐
    answer: as sampled, with its stop token                                   ├ appended, never encoded again
    reply:  what the template puts between that answer and the next           ┘
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rlplace.envs.text.contract import Message, Prompt
from rlplace.errors import ConfigError, Problem
from rlplace.models.tokenizer import Tokenizer, Tokens

_ANSWER = "\N{BLACK SQUARE}answer\N{BLACK SQUARE}"  # stands for an answer while a reply is looked for behind it


class Conversation(Protocol):
    """The turns between a model and an environment, as tokens. Stateless."""

    def first(self, prompt: Prompt) -> Tokens:
        """Return [P], up to where the first answer begins."""
        ...

    def reply(self, answer: Tokens, text: str) -> Tokens:
        """Return what follows an answer, which may end in a stop token, up to where the next answer begins."""
        ...


class Chat:
    """Turns by the model's chat template."""

    def __init__(self, tokenizer: Tokenizer, *, system: str | None) -> None:
        self._tokenizer = tokenizer
        self._system = [] if system is None else [Message("system", system)]

    def first(self, prompt: Prompt) -> Tokens:
        messages = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
        return self._tokenizer.chat([*self._system, *messages])

    def reply(self, answer: Tokens, text: str) -> Tokens:
        chat = [Message("user", "-"), Message("assistant", _ANSWER), Message("user", text)]
        before, found, after = self._tokenizer.render([*self._system, *chat]).partition(_ANSWER)
        if not found or _ANSWER in after:
            raise ConfigError([_lost_answer(before + after)])
        tokens = self._tokenizer.encode(after)
        # The answer already has the token by which it ended; the template would write it again.
        ended = len(answer) > 0 and len(tokens) > 0 and answer[-1] == tokens[0]
        return tokens[1:] if ended else tokens


class PlainText:
    """Turns of plain text, for models without chat training; a reply stands on lines of its own."""

    def __init__(self, tokenizer: Tokenizer, *, system: str | None) -> None:
        self._tokenizer, self._system = tokenizer, system

    def first(self, prompt: Prompt) -> Tokens:
        parts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
        return self._tokenizer.encode("\n".join(([self._system] if self._system else []) + parts), special=True)

    def reply(self, answer: Tokens, text: str) -> Tokens:
        return np.asarray(self._tokenizer.encode(f"\n{text}\n"), np.int32)


def _lost_answer(rendered: str) -> Problem:
    return Problem(
        code="chat-template-refused",
        key="actor.model.path",
        what="the chat template does not show an earlier answer exactly once",
        got=repr(rendered[:200]),
        why="what follows an answer in a conversation is found behind it, as the template renders it",
        fix="another chat_template.jinja, or a task of one turn",
    )
