"""Which tokens of a written conversation are learned: those of its answers, each with the token that ends it.

::

    messages ── chat template ──▶ <turn>user: 1+2?<eos><turn>assistant: 3<eos>
    learned                                                            ▔▔▔▔▔▔

A template says by its tag `generation` which parts are answers. Without the tag, an answer is what follows the
rendering of the messages before it. The text before an answer, and the answer, are each encoded alone, as in a run:
there the model reads the tokens of a prompt, and its answer follows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.codes import config_error
from rlplace.envs.text.contract import Message
from rlplace.tokens import Tokens
from rlplace.units import clipped

if TYPE_CHECKING:
    from rlplace.models.tokenizer import Tokenizer

_KEY = "actor.model.path"
_SHOWN = 200  # characters of a rendered chat that an error shows
# The tag by which a template marks answers
_TAG = re.compile(r"\{%-?\+?\s*generation\b")
# Variable of many templates: whether an answer begins with a thought
_THINKING = "enable_thinking"
# Stand before and behind what a template marks for training
MARK_BEGIN = "\N{BLACK SQUARE}learned from here\N{BLACK SQUARE}"
MARK_END = "\N{BLACK SQUARE}learned to here\N{BLACK SQUARE}"
_MARKED = re.compile(f"{MARK_BEGIN}(.*?){MARK_END}", re.DOTALL)


class Piece(NamedTuple):
    """A part of a conversation as text. `is_learned`: whether it is an answer."""

    text: str
    is_learned: bool


class LearnedTokens(NamedTuple):
    """The tokens of a conversation [L], and for each of them whether it is learned [L]."""

    tokens: Tokens
    mask: NDArray[np.bool_]


def learned_chat(
    tokenizer: Tokenizer, chat: Sequence[Message], arguments: Mapping[str, object]
) -> LearnedTokens:
    """Return the tokens of a chat by the template of `tokenizer`, and which of them are learned.

    `chat`: messages, with at least one of the assistant that is learned; the first one is of no assistant. `arguments`:
    values for the template beside the messages. Raises ConfigError if the template refuses the messages, or does not
    show them as they are.
    """
    if _TAG.search(tokenizer.chat_template or ""):
        pieces = marked_pieces(tokenizer, chat, arguments)
    else:
        pieces = pieces_by_prefix(tokenizer, chat, arguments)
    stops, _ = tokenizer.stops((), chat=True)
    return learned_tokens(tokenizer, pieces, stops)


def marked_pieces(
    tokenizer: Tokenizer, chat: Sequence[Message], arguments: Mapping[str, object]
) -> list[Piece]:
    """Return a rendered chat, cut at the tags `generation` of the template. Raises ConfigError if it marks nothing."""
    text = tokenizer.render(chat, answered=True, arguments=arguments, marked=True)
    # Texts and marked texts take turns
    parts = _MARKED.split(text)
    pieces = [Piece(part, is_learned=at % 2 == 1) for at, part in enumerate(parts)]
    if not any(piece.is_learned and piece.text for piece in pieces):
        raise config_error(
            "chat-template-refused",
            _KEY,
            repr(clipped(text, _SHOWN)),
            error="marks-nothing",
        )
    answers = [message for message in chat if message.role == "assistant"]
    if all(message.is_learned for message in answers):
        return pieces
    # Which marked text is which answer
    marked = [at for at, piece in enumerate(pieces) if piece.is_learned]
    if len(marked) != len(answers):
        raise config_error(
            "chat-template-refused",
            _KEY,
            repr(clipped(text, _SHOWN)),
            error="marks-others",
            marked=len(marked),
            answers=len(answers),
        )
    for at, message in zip(marked, answers, strict=True):
        pieces[at] = pieces[at]._replace(is_learned=message.is_learned)
    return pieces


def pieces_by_prefix(
    tokenizer: Tokenizer, chat: Sequence[Message], arguments: Mapping[str, object]
) -> list[Piece]:
    """Return a rendered chat, cut where answers begin and end. Raises ConfigError if an answer is not found."""
    found = _cut(tokenizer, chat, arguments)
    if not isinstance(found, str):
        return found
    # Templates that open a thought mostly do not show it in a whole chat
    plain = {**arguments, _THINKING: False}
    helps = _THINKING in tokenizer.variables
    helps = helps and not isinstance(_cut(tokenizer, chat, plain), str)
    raise config_error(
        "chat-template-refused",
        _KEY,
        repr(clipped(found, _SHOWN)),
        error="opened-thought" if helps else "answers",
    )


def _cut(
    tokenizer: Tokenizer, chat: Sequence[Message], arguments: Mapping[str, object]
) -> list[Piece] | str:
    """Return a rendered chat, cut where answers begin and end.

    An answer begins where the rendered text of the previous messages ends, and ends with its own text. If the rendered
    chat does not begin with the rendered first messages, or does not contain an answer, return the rendered first
    messages.
    """
    whole = tokenizer.render(chat, answered=True, arguments=arguments)
    pieces: list[Piece] = []
    done = 0
    for at, message in enumerate(chat):
        if message.role != "assistant":
            continue
        before = tokenizer.render(chat[:at], arguments=arguments)
        answer = message.text.strip()
        found = whole.find(answer, len(before))
        if not whole.startswith(before) or found < 0:
            return before
        end = found + len(answer)
        pieces.append(Piece(whole[done : len(before)], is_learned=False))
        said = whole[len(before) : end]
        pieces.append(Piece(said, is_learned=message.is_learned))
        done = end
    return [*pieces, Piece(whole[done:], is_learned=False)]


def learned_tokens(
    tokenizer: Tokenizer,
    pieces: Sequence[Piece],
    stops: Sequence[int],
    *,
    is_plain: bool = False,
) -> LearnedTokens:
    """Return the tokens of a conversation, and which of them are learned.

    `pieces`: the conversation; nothing behind its last answer is kept. `stops`: ids of the tokens that end an answer.
    An answer at the end of the conversation that has no such token gets the first one of `stops`. `is_plain`: whether
    the tokenizer puts its first tokens before the text, since no template has written them.
    """
    ends = [tokenizer.decode([stop], special=True) for stop in stops]
    ended = _with_ends(pieces, ends) if ends else list(pieces)
    last = max(at for at, piece in enumerate(ended) if piece.is_learned)
    parts: list[Tokens] = []
    masks: list[NDArray[np.bool_]] = []
    for at, piece in enumerate(ended[: last + 1]):
        tokens = tokenizer.encode(piece.text)
        if at == 0 and is_plain:
            tokens = tokenizer.encode_beginning(piece.text)
        has_end = len(tokens) > 0 and int(tokens[-1]) in stops
        if at == last and stops and not has_end:
            tokens = np.append(tokens, np.int32(stops[0]))
        parts.append(tokens)
        masks.append(np.full(len(tokens), piece.is_learned))
    return LearnedTokens(np.concatenate(parts), np.concatenate(masks))


def _with_ends(pieces: Sequence[Piece], ends: Sequence[str]) -> list[Piece]:
    """Return `pieces`, in which the token that ends an answer is a part of the answer, and blanks behind it are not.

    `ends`: texts of the tokens that end an answer.
    """
    token = "|".join(map(re.escape, ends))
    texts = [piece.text for piece in pieces]
    for at, piece in enumerate(pieces[:-1]):
        if not piece.is_learned:
            continue
        inside = re.search(rf"(?:{token})(\s*)$", texts[at])
        behind = re.match(rf"\s*(?:{token})", texts[at + 1])
        if inside is not None:
            texts[at] = texts[at][: inside.start(1)]
            texts[at + 1] = inside[1] + texts[at + 1]
        elif behind is not None:
            texts[at] += behind[0]
            texts[at + 1] = texts[at + 1][behind.end() :]
    return [
        Piece(text, is_learned=piece.is_learned)
        for text, piece in zip(texts, pieces, strict=True)
    ]
