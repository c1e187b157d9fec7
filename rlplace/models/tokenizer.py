"""A model's tokenizer, from its Hugging Face folder: text to token ids and back, and chats by the model's template.

The files are read here, with the libraries `tokenizers` and `jinja2` only, so that an env rank stays small and starts
fast. Results equal those of `AutoTokenizer`.

In a conversation, prompt and replies are each encoded alone and appended. Sampled tokens are never encoded again::

    first:  [system, user] by the template, up to where the answer begins     ┐
    answer: as sampled, with its stop token                                   ├ appended, never encoded again
    reply:  what the template puts between that answer and the next           ┘
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.codes import config_error
from rlplace.envs.text.contract import (
    Image,
    Message,
    MessagesWithTools,
    Prompt,
    RawText,
    ToolCall,
)
from rlplace.envs.text.tool_calls import EXAMPLE_CALL, EXAMPLE_TOOL
from rlplace.errors import ConfigError
from rlplace.json_text import parsed
from rlplace.models.learned_text import (
    MARK_BEGIN,
    MARK_END,
    LearnedTokens,
    Piece,
    learned_chat,
    learned_tokens,
)
from rlplace.tokens import Tokens
from rlplace.units import clipped

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer as _Library

    from rlplace.models.template_limits import LimitedEnvironment

_KEY = "actor.model.path"
# Special tokens that a chat template may use, by their names in the config
_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Stands for a special token that a reply has as text
_WRITTEN = "\N{BLACK SQUARE}special\N{BLACK SQUARE}"
# Stands for the result of a tool in a rendered chat
_RESULT = "\N{BLACK SQUARE}result\N{BLACK SQUARE}"
# Stands for the text of a message, to find out whether a template shows it
_ANOTHER = "\N{BLACK SQUARE}another\N{BLACK SQUARE}"
# A text of so many characters that stands in a rendered chat is shown; a shorter one may be a part of other words
_SURELY_SHOWN = 12
# Roles of messages that a prompt has to show; templates cut thoughts of earlier answers on purpose
_SHOWN_ROLES = ("system", "user")
# Stands for an answer in a rendered chat, to find what follows it
_ANSWER = "\N{BLACK SQUARE}answer\N{BLACK SQUARE}"


class _ContentForm(enum.Enum):
    """Forms of a message's content that a chat template shows: a text, a list of parts, or both."""

    TEXT = enum.auto()
    LIST = enum.auto()
    BOTH = enum.auto()


class Tokenizer:
    """A tokenizer, for use by one thread.

    `chat_template`: the template that turns a chat into text; None if the model's folder has no template.
    """

    def __init__(self, library: _Library, folder: Path) -> None:
        self._library = library
        self._folder = folder
        config = _json(folder / "tokenizer_config.json")
        # A special token is a text, or a mapping with the text in `content`; null means none
        named = {**_json(folder / "special_tokens_map.json"), **config}
        self._special: dict[str, str] = {}
        for name in _SPECIAL:
            text = named.get(name)
            if isinstance(text, dict):
                text = text.get("content")
            if isinstance(text, str):
                self._special[name] = text
        self.chat_template = _chat_template(folder, config)
        # Whether marks are written -> the compiled template, and the environment that limits it
        self._templates: dict[bool, tuple[LimitedEnvironment, jinja2.Template]] = {}
        # Finds special tokens in a text; made when it is first needed
        self._special_texts: re.Pattern[str] | None = None
        # Ids that end an answer: those of generation_config.json and config.json, and the end of text
        stops: list[int] = []
        for name in ("generation_config.json", "config.json"):
            ids = _json(folder / name).get("eos_token_id")
            if isinstance(ids, list):
                stops += ids
            elif ids is not None:
                stops.append(ids)
        if "eos_token" in self._special:
            end = library.token_to_id(self._special["eos_token"])
            if end is not None:
                stops.append(end)
        # Without repetitions, in this order
        self.stop_token_ids = tuple(dict.fromkeys(stops))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Return the tokenizer of a folder. Raises ConfigError if tokenizer.json is missing or damaged."""
        from tokenizers import Tokenizer as Library

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise config_error("no-tokenizer", _KEY, str(folder), error="missing")
        try:
            library = Library.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise _damaged(file, error) from error
        _add_tokens(library, _json(folder / "tokenizer_config.json"))
        # Prompts have their own lengths
        library.no_padding()
        library.no_truncation()
        return cls(library, folder)

    def stops(
        self, texts: Sequence[str], *, chat: bool = False
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the token ids that end an answer, and the texts that end an answer.

        `texts`: the stop texts of the job. The ids are the model's own stop tokens, and the tokens of those stop texts
        that are special tokens. The returned texts are all other stop texts. `chat`: whether prompts are chats; then
        the token by which the chat template ends a turn is a stop token too, whatever the model's files say.
        """
        special = self._without_text
        ids = list(self.stop_token_ids)
        end = self._end_of_turn if chat else None
        if end is not None:
            ids.append(end)
        others = []
        for text in texts:
            if text in special:
                ids.append(special[text])
            else:
                others.append(text)
        without_repetitions = dict.fromkeys(ids)
        return tuple(without_repetitions), tuple(others)

    def special_within(self, text: str) -> str | None:
        """Return a special token that is a part of `text`, but not all of it; None without such a token.

        Decoded answers do not contain special tokens, so a stop text with such a part is never found in an answer.
        """
        special = self._without_text
        if text in special:
            return None
        return next((token for token in special if token in text), None)

    @functools.cached_property
    def _without_text(self) -> Mapping[str, int]:
        """Text of an added token -> its id, for the added tokens that decoding leaves out of an answer."""
        without = {}
        for number, token in self._library.get_added_tokens_decoder().items():
            if not self.decode([number]):
                without[token.content] = number
        return without

    @functools.cached_property
    def _end_of_turn(self) -> int | None:
        """Id of the special token that the chat template writes behind an answer; None if it writes no such token."""
        if self.chat_template is None:
            return None
        chat = [Message("user", "-"), Message("assistant", _ANSWER)]
        try:
            rendered = self.render(chat, answered=True)
        except ConfigError:  # the prompts of the job may be other messages
            return None
        behind = rendered.rpartition(_ANSWER)[2].lstrip()
        tokens = self.encode(behind)
        if not behind or not len(tokens):
            return None
        first = int(tokens[0])
        return first if first in self._without_text.values() else None

    def special_in(self, text: str) -> str | None:
        """Return the first special token in `text`, such as `<|im_end|>`, which is encoded as one; None without one."""
        found = self._special_pattern().search(text)
        return found and found[0]

    def with_marks(self, text: str, mark: str) -> tuple[str, Sequence[str]]:
        """Return `text` with `mark` in the place of each special token, and these tokens as texts."""
        pattern = self._special_pattern()
        return pattern.sub(mark, text), pattern.findall(text)

    def encode_letters(self, text: str) -> Tokens:
        """Return the token ids of a text in which special tokens are read as the letters that they are written in."""
        self._library.encode_special_tokens = True
        try:
            return self.encode(text)
        finally:
            self._library.encode_special_tokens = False

    def _special_pattern(self) -> re.Pattern[str]:
        """Return a pattern that matches each special token. The longest one counts where several match."""
        if self._special_texts is None:
            longest_first = sorted(self._without_text, key=len, reverse=True)
            tokens = [re.escape(token) for token in longest_first]
            self._special_texts = re.compile("|".join(tokens) or r"(?!)")
        return self._special_texts

    @property
    def size(self) -> int:
        """Number of tokens in the vocabulary, added tokens included."""
        return int(self._library.get_vocab_size(with_added_tokens=True))

    @property
    def ids(self) -> Mapping[str, int]:
        """Token -> id, added tokens included."""
        ids: Mapping[str, int] = self._library.get_vocab(with_added_tokens=True)
        return ids

    def encode(self, text: str, *, special: bool = False) -> Tokens:
        """Return the token ids of a text. `special`: add the tokens that the tokenizer puts around a whole text.

        Raises ConfigError for a text with half of a character (a surrogate), as from bytes that were decoded with
        `surrogateescape`.
        """
        return np.array(self._encoded(text, special=special).ids, np.int32)

    def encode_beginning(self, text: str) -> Tokens:
        """Return the token ids of a text that goes on, with the tokens that the tokenizer puts before a whole text.

        Those that the tokenizer puts behind a whole text, such as the end of text, are left out. The first token is not
        put before a text that begins with it already. Raises ConfigError as `encode` does.
        """
        # Tokens before and behind any text, and the text
        around = list(self._encoded("-", special=True).special_tokens_mask)
        before = around.index(0)
        behind = around[::-1].index(0)
        ids = list(self._encoded(text, special=True).ids)
        ids = ids[: len(ids) - behind]
        if before and ids[before - 1 : before] == ids[before : before + 1]:
            del ids[before]
        return np.array(ids, np.int32)

    def _encoded(self, text: str, *, special: bool) -> Any:
        """Return what the library makes of a text. `special`: as in `encode`."""
        try:
            return self._library.encode(text, add_special_tokens=special)
        except TypeError as error:
            raise config_error(
                "no-text", "env.task", clipped(ascii(text), 400)
            ) from error

    def decode(self, tokens: Sequence[int] | Tokens, *, special: bool = False) -> str:
        """Return the text of `tokens`. `special`: include the text of special tokens."""
        text: str = self._library.decode(
            [int(t) for t in tokens],
            skip_special_tokens=not special,
        )
        return text

    def decode_answer(self, tokens: Sequence[int] | Tokens) -> str:
        """Return the text of an answer as rewards and tasks read it: without special tokens but those of tags.

        Tags are special tokens that come in pairs, such as <think> and </think>.
        """
        hidden = {*self._without_text.values()} - self._tags
        seen = [int(token) for token in tokens if int(token) not in hidden]
        return self.decode(seen, special=True)

    def decode_written(self, tokens: Sequence[int] | Tokens) -> str:
        """Return the text of an answer with its special tokens, but without the stop tokens at its end."""
        stops, _ = self.stops((), chat=True)
        written = [int(token) for token in tokens]
        while written and written[-1] in stops:
            del written[-1]
        return self.decode(written, special=True)

    @functools.cached_property
    def _tags(self) -> frozenset[int]:
        """Ids of special tokens that open and close a tag. The tokens that begin and end texts are not among them."""
        special = self._without_text
        ends = {*self.stop_token_ids}
        ends |= {special[text] for text in self._special.values() if text in special}
        tags = set[int]()
        for text, number in special.items():
            # <think> and </think>, [THINK] and [/THINK]
            closing = special.get(f"{text[:1]}/{text[1:]}")
            if closing is not None and len(text) > 2:
                tags |= {number, closing}
        return frozenset(tags - ends)

    def render(
        self,
        messages: Sequence[Message],
        *,
        answered: bool = False,
        arguments: Mapping[str, object] | None = None,
        marked: bool = False,
    ) -> str:
        """Return a chat as text by the model's template, up to the point where the next answer begins.

        `answered`: leave out the words that begin the next answer. `arguments`: values for the template in addition to
        the messages, such as tools. `marked`: put MARK_BEGIN and MARK_END around what the template marks for training,
        with its tag `generation`. Raises ConfigError if there is no template, or if it rejects these messages.
        """
        import jinja2

        if self.chat_template is None:
            raise config_error("no-chat-template", _KEY, str(self._folder))
        form = self._content_form
        chat = [_for_template(message, form) for message in messages]
        try:
            if marked not in self._templates:
                environment = _environment(marked)
                limited = environment.limited(self.chat_template)
                self._templates[marked] = environment, limited
            environment, template = self._templates[marked]
            # The template's variables: ours, the special tokens, those of the job
            known = {
                "tools": None,
                "documents": None,
                **self._special,
                **(arguments or {}),
            }
            values = {**known, "messages": chat}
            values["add_generation_prompt"] = not answered
            return environment.render(template, values)
        except Exception as error:  # a template is a program: it may raise anything
            roles = [message.role for message in messages]
            raised = f"{type(error).__name__}: {error}"
            if isinstance(error, jinja2.TemplateError):
                raised = str(error)
            name = "messages"
            if "system" in roles:
                name = "with-system"
            raise config_error(
                "chat-template-refused",
                _KEY,
                ", ".join(roles),
                error=name,
                folder=self._folder,
                raised=raised,
            ) from error

    @functools.cached_property
    def _content_form(self) -> _ContentForm:
        """The contents of messages that the template shows: some templates of models for images read lists alone."""
        if not self._shows([{"type": "text", "text": _ANOTHER}]):
            return _ContentForm.TEXT
        if self._shows(_ANOTHER):
            return _ContentForm.BOTH
        return _ContentForm.LIST

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        """Return whether the template shows the text `_ANOTHER` in a content, and shows no list as Python writes it."""
        import jinja2

        raised = (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        )
        values: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._special,
            "messages": [{"role": "user", "content": content}],
            "add_generation_prompt": True,
        }
        try:
            environment = _environment(marked=False)
            template = environment.limited(self.chat_template or "")
            shown = environment.render(template, values)
        # `render` says what the template raises for a chat
        except raised:
            return False
        return _ANOTHER in shown and "'text'" not in shown

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names of all variables in the chat template; empty without one. Raises ConfigError for a wrong template."""
        import jinja2
        import jinja2.nodes

        if self.chat_template is None:
            return frozenset()
        try:
            tree = _environment(marked=False).parse(self.chat_template)
        except jinja2.TemplateError as error:
            raise config_error(
                "chat-template-refused",
                _KEY,
                clipped(self.chat_template, 200),
                error="messages",
                folder=self._folder,
                raised=str(error),
            ) from error
        return frozenset(name.name for name in tree.find_all(jinja2.nodes.Name))

    def chat(self, messages: Sequence[Message], *, answered: bool = False) -> Tokens:
        """Return the token ids of a chat by the model's template, up to the point where the next answer begins.

        `answered`: leave out the tokens that begin the next answer.
        """
        return self.encode(self.render(messages, answered=answered))


class StopTexts:
    """Finds out whether an answer ends with a stop text, however the stop text is split into tokens."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        # Tokens to look at: a token has at least a byte, and the first may be part of a character
        self._most = max((len(text.encode()) for text in texts), default=0) + 4

    def end(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token of `tokens`, an unfinished answer, has completed one of the stop texts."""
        seen = tokens[-self._most :]
        written = self._tokenizer.decode(seen)
        found = [text for text in self._texts if text in written]
        if not found:
            return False
        # It was there before if the text without the last token has as many
        before = self._tokenizer.decode(seen[:-1])
        return any(written.count(text) > before.count(text) for text in found)


class Chat:
    """Makes the tokens of a conversation between a model and an environment, by the model's chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        system: str | None,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = arguments
        self._system = [] if system is None else [Message("system", system)]
        # Whether the template is known to show results of tools, and to end a prompt where an answer begins
        self._shows_results = False
        self._begins_answers = False

    def first(self, prompt: Prompt) -> Tokens:
        """Return the tokens of a prompt, up to the place where the first answer begins.

        Raises ConfigError as `text` does.
        """
        if isinstance(prompt, RawText):
            return self._tokenizer.encode_beginning(prompt)
        return self._tokenizer.encode(self.text(prompt))

    def text(self, prompt: Prompt) -> str:
        """Return a prompt as the text that the model reads, up to the place where the first answer begins.

        If the last message is of the assistant, the answer continues this message. Raises ConfigError if both the job
        and the prompt have a system message, or if the template does not show a message of the prompt or its tools, or
        ends a prompt as it ends an answer.
        """
        if isinstance(prompt, RawText):
            return prompt
        messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        arguments = dict(self._arguments or {})
        if isinstance(prompt, MessagesWithTools):
            arguments["tools"] = prompt.tools
            self._require_shown(prompt, arguments)
        if self._system and any(message.role == "system" for message in messages):
            raise config_error("two-system-messages", "env.system", "system, system")
        chat = [*self._system, *messages]
        # An empty message of the assistant is an answer that has not begun
        if chat[-1].role == "assistant" and not chat[-1].text.strip():
            chat = chat[:-1]
        if not chat or chat[-1].role != "assistant":
            rendered = self._tokenizer.render(chat, arguments=arguments)
            self._require_messages_shown(chat, rendered, arguments)
            self._require_begun(chat, rendered, arguments)
            return rendered
        begun = chat[-1].text
        rendered = self._tokenizer.render(chat, answered=True, arguments=arguments)
        self._require_messages_shown(chat, rendered, arguments, answered=True)
        before, found, after = rendered.rpartition(begun.strip())
        if not found:
            got = repr(rendered[-200:])
            raise config_error("chat-template-refused", _KEY, got, error="continued")
        # Some templates cut blanks at the end of a message
        blanks = begun[len(begun.rstrip()) :]
        kept = blanks if after.startswith(blanks) else ""
        return before + found + kept

    def _require_messages_shown(
        self,
        chat: Sequence[Message],
        rendered: str,
        arguments: Mapping[str, object],
        *,
        answered: bool = False,
    ) -> None:
        """Raise ConfigError if the template shows the same text whatever a message of system or user says.

        `rendered`, `answered`: the chat as the template shows it, with or without the words that begin an answer.
        Templates may change a text, for example cut its blanks. So a message counts as shown if the chat would be
        another one with another text in its place.
        """
        for at, message in enumerate(chat):
            text = message.text.strip()
            if message.role not in _SHOWN_ROLES or not text:
                continue
            if len(text) >= _SURELY_SHOWN and text in rendered:
                continue
            other = [*chat]
            other[at] = dataclasses.replace(message, content=_ANOTHER)
            shown = self._tokenizer.render(
                other, answered=answered, arguments=arguments
            )
            if shown == rendered:
                got = f"{message.role}: {clipped(text, 200)!r}"
                raise config_error(
                    "chat-template-refused",
                    _KEY,
                    got,
                    error="hidden",
                    role=message.role,
                )

    def _require_begun(
        self,
        chat: Sequence[Message],
        rendered: str,
        arguments: Mapping[str, object],
    ) -> None:
        """Raise ConfigError if a rendered prompt ends with a token that ends an answer, and begins no answer.

        The policy would have to write the beginning of its own message, and would often write another one's. Templates
        that write nothing before an answer have no such beginning, as that of DialoGPT.
        """
        if self._begins_answers:
            return
        answered = self._tokenizer.render(chat, answered=True, arguments=arguments)
        if answered == rendered:
            ids, _ = self._tokenizer.stops((), chat=True)
            tokens = self._tokenizer.encode(rendered.rstrip())
            ends = len(tokens) > 0 and int(tokens[-1]) in ids
            if ends and self._writes_before_answers(chat, rendered, arguments):
                got = repr(rendered[-200:])
                raise config_error("chat-template-refused", _KEY, got, error="unbegun")
        self._begins_answers = True

    def _writes_before_answers(
        self,
        chat: Sequence[Message],
        rendered: str,
        arguments: Mapping[str, object],
    ) -> bool:
        """Return whether the template writes words between a prompt and its answer, such as the name of the role.

        `rendered`: the prompt as the template shows it.
        """
        answered = [*chat, Message("assistant", _ANSWER)]
        whole = self._tokenizer.render(answered, answered=True, arguments=arguments)
        before, found, _ = whole.rpartition(_ANSWER)
        return not found or before.strip() != rendered.strip()

    def _require_shown(
        self, prompt: MessagesWithTools, arguments: Mapping[str, object]
    ) -> None:
        """Raise ConfigError if the template shows the same text with the tools of a prompt and without them."""
        without = {**arguments, "tools": None}
        shown = self._tokenizer.render(prompt, arguments=arguments)
        if shown == self._tokenizer.render(prompt, arguments=without):
            raise _tools_not_shown(prompt)

    def learned(self, messages: Sequence[Message]) -> LearnedTokens:
        """Return the tokens of a whole conversation, and which of them are learned: those of its answers.

        The messages of the assistant are the answers, each with the token that ends it. Raises ConfigError as `text`
        does, and if the template does not show a message of the conversation.
        """
        arguments = dict(self._arguments or {})
        if isinstance(messages, MessagesWithTools):
            arguments["tools"] = messages.tools
            self._require_shown(messages, arguments)
        if self._system and any(message.role == "system" for message in messages):
            raise config_error("two-system-messages", "env.system", "system, system")
        chat = [*self._system, *messages]
        learned = learned_chat(self._tokenizer, chat, arguments)
        rendered = self._tokenizer.render(chat, answered=True, arguments=arguments)
        self._require_messages_shown(chat, rendered, arguments, answered=True)
        return learned

    def reply(self, answer: Tokens, reply: Prompt) -> Tokens:
        """Return the tokens between an answer and the next answer: the end of the answer's turn, and the reply.

        The result ends where the next answer begins. `answer`: the tokens of the answer. If they end with a stop token,
        the result does not repeat the stop token. `reply`: a text of the user; or messages, such as the results of
        tools; or a RawText, which follows the answer as it is. If the reply contains the text of a special token,
        because it may repeat the answer, this text is encoded as ordinary letters and ends no turn. Raises ConfigError
        if the template does not show an earlier answer exactly once.
        """
        if isinstance(reply, RawText):
            return self._tokenizer.encode(reply)
        messages = [Message("user", reply)] if isinstance(reply, str) else reply
        if any(message.role == "tool" for message in messages):
            self._require_results_shown()
        special: list[str] = []
        shown: list[Message] = []
        for message in messages:
            text, found_here = self._tokenizer.with_marks(message.text, _WRITTEN)
            shown.append(dataclasses.replace(message, content=text))
            special += found_here
        # Render a chat with a mark for the answer; the reply is what follows the mark
        chat = [Message("user", "-"), Message("assistant", _ANSWER), *shown]
        before, found, after = self._render([*self._system, *chat]).partition(_ANSWER)
        if not found or _ANSWER in after:
            got = repr(clipped(before + after, 200))
            raise config_error("chat-template-refused", _KEY, got, error="turns")
        first, *others = after.split(_WRITTEN)
        if len(others) != len(special):
            got = repr(clipped(after, 200))
            raise config_error("chat-template-refused", _KEY, got, error="turns")
        parts = [self._tokenizer.encode(first)]
        for token, part in zip(special, others, strict=True):
            parts.append(self._tokenizer.encode_letters(token))
            parts.append(self._tokenizer.encode(part))
        tokens = np.concatenate(parts)
        # Leave out the stop token if the answer has it already, also behind blanks
        last = answer[-1] if len(answer) else None
        at = next((n for n, token in enumerate(tokens) if token == last), None)
        if at is not None and not self._tokenizer.decode(tokens[:at]).strip():
            return tokens[at + 1 :]
        return tokens

    def _require_results_shown(self) -> None:
        """Raise ConfigError if the template does not show the result of a tool behind an answer."""
        if self._shows_results:
            return
        result = Message("tool", _RESULT, call_id=EXAMPLE_CALL.id, name="-")
        chat = [Message("user", "-"), Message("assistant", _ANSWER), result]
        rendered = self._render(chat)
        self._shows_results = _RESULT in rendered.partition(_ANSWER)[2]
        if not self._shows_results:
            got = repr(clipped(rendered, 200))
            raise config_error("chat-template-refused", _KEY, got, error="results")

    def example_call(self) -> str:
        """Return the text in which the template writes a call of EXAMPLE_CALL; "" if it writes none.

        The text of other messages and of definitions of tools is no part of it.
        """
        asked = [Message("user", "-")]
        called = [*asked, Message("assistant", "", (EXAMPLE_CALL,))]
        arguments = {**(self._arguments or {}), "tools": [EXAMPLE_TOOL]}
        try:
            before = self._tokenizer.render(asked, arguments=arguments)
            whole = self._tokenizer.render(called, answered=True, arguments=arguments)
        except ConfigError:  # the template takes no tools
            return ""
        # The beginning of an answer may have a thought that the template leaves out later
        pairs = enumerate(zip(before, whole, strict=False))
        common = min(len(before), len(whole))
        differ = next((at for at, (one, other) in pairs if one != other), common)
        # Without the tokens that end the answer
        written = self._tokenizer.encode(whole[differ:].rstrip())
        return self._tokenizer.decode_written(written)

    def _render(self, messages: Sequence[Message]) -> str:
        """Return messages as text by the template, with the job's arguments."""
        return self._tokenizer.render(messages, arguments=self._arguments)


class PlainText:
    """Makes the tokens of a conversation in plain text, for models without chat training."""

    def __init__(self, tokenizer: Tokenizer, *, system: str | None) -> None:
        self._tokenizer = tokenizer
        self._system = system

    def first(self, prompt: Prompt) -> Tokens:
        """Return the tokens of a prompt, after the system text if there is one."""
        return self._tokenizer.encode_beginning(self.text(prompt))

    def text(self, prompt: Prompt) -> str:
        """Return a prompt as the text that the model reads, after the system text if there is one.

        Raises ConfigError for a prompt with tools: only a chat template shows them.
        """
        parts = [self._system] if self._system else []
        if isinstance(prompt, MessagesWithTools):
            raise _tools_not_shown(prompt)
        if isinstance(prompt, RawText):
            return prompt
        if isinstance(prompt, str):
            parts.append(prompt)
        else:
            parts += [message.text for message in prompt]
        return "\n".join(parts)

    def learned(self, messages: Sequence[Message]) -> LearnedTokens:
        """Return the tokens of a whole conversation, and which of them are learned: those of its answers.

        As in a run, nothing stands between the first messages and the answer, and line breaks stand around a reply.
        """
        first = next(i for i, each in enumerate(messages) if each.role == "assistant")
        begun = messages[:first]
        if isinstance(messages, MessagesWithTools):
            begun = MessagesWithTools.of(begun, messages.tools)
        pieces = [Piece(self.text(begun), is_learned=False)]
        for message in messages[first:]:
            if message.role == "assistant":
                pieces.append(Piece(message.text, is_learned=message.is_learned))
            else:
                pieces.append(Piece(f"\n{message.text}\n", is_learned=False))
        stops = self._tokenizer.stop_token_ids
        return learned_tokens(self._tokenizer, pieces, stops, is_plain=True)

    def example_call(self) -> str:
        """Return "": a text without a template has no form of calls."""
        return ""

    def reply(self, answer: Tokens, reply: Prompt) -> Tokens:
        """Return the tokens of a reply, with a line break before and after it. `answer` is not used.

        `reply`: a text; or messages, which stand in lines of their own; or a RawText, which has no line breaks around
        it.
        """
        if isinstance(reply, RawText):
            return self._tokenizer.encode(reply)
        if not isinstance(reply, str):
            reply = "\n".join(message.text for message in reply)
        return self._tokenizer.encode(f"\n{reply}\n")


def _tools_not_shown(prompt: MessagesWithTools) -> ConfigError:
    got = clipped(repr([*prompt.tools]), 200)
    return config_error("tools-not-shown", "env.kwargs.tools", got)


def _for_template(message: Message, form: _ContentForm) -> dict[str, Any]:
    """Return a message in the form that chat templates take. Keys without a value are left out.

    `form`: the contents that the template reads. The arguments of calls are values instead of JSON texts, because
    templates write them as JSON.
    """
    content = _content(message, form)
    shown: dict[str, Any] = {"role": message.role, "content": content}
    if message.calls:
        shown["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": _arguments(call)},
            }
            for call in message.calls
        ]
    if message.call_id:
        shown["tool_call_id"] = message.call_id
    if message.name:
        shown["name"] = message.name
    return shown


def _arguments(call: ToolCall) -> object:
    """Return the value of a call's arguments; the text itself if it is no JSON."""
    try:
        value: object = parsed(call.arguments)
    except ValueError:
        return call.arguments
    return value


def _content(message: Message, form: _ContentForm) -> str | list[dict[str, str]]:
    """Return the content of a message in the form that a chat template reads.

    Parts that are all texts are one text for a template that reads no lists: it would show a list as Python writes it.
    The entry for an image has no pixels, because the template only puts an image token in its place.
    """
    content = message.content
    if isinstance(content, str):
        if form is not _ContentForm.LIST:
            return content
        return [{"type": "text", "text": content}]
    if not message.images and form is _ContentForm.TEXT:
        return message.text
    return [
        {"type": "image"} if isinstance(p, Image) else {"type": "text", "text": p}
        for p in content
    ]


def _json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if the file does not exist. Raises ConfigError if it is damaged."""
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else "{}"
        content: object = parsed(text)
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error
    if not isinstance(content, dict):
        raise _damaged(
            file,
            TypeError(f"it is a {type(content).__name__}, not an object"),
        )
    return content


def _add_tokens(library: _Library, config: Mapping[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json has beyond tokenizer.json, in their order, as transformers does.

    `config`: the content of tokenizer_config.json.
    """
    from tokenizers import AddedToken

    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for _, told in sorted(listed.items(), key=lambda item: item[0].zfill(20)):
        content = told.get("content") if isinstance(told, dict) else None
        if isinstance(content, str) and library.token_to_id(content) is None:
            given = {name: bool(told[name]) for name in flags if name in told}
            library.add_tokens([AddedToken(content, **given)])


def _damaged(file: Path, error: Exception) -> ConfigError:
    """Return the error for a file of the tokenizer that cannot be read. `error`: the cause."""
    return config_error(
        "no-tokenizer",
        _KEY,
        str(file),
        error="damaged",
        file=file.name,
        reason=f"{type(error).__name__}: {error}",
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a folder; None if it has none. `config`: the content of tokenizer_config.json.

    A separate template file takes precedence over the config. If there are several named templates, the template with
    the name "default" is returned.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise _damaged(file, error) from error
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    if isinstance(template, str):
        return template
    return None


def _environment(marked: bool) -> LimitedEnvironment:
    """Return the jinja2 environment for chat templates, with the settings of `apply_chat_template` in transformers.

    Time and size of a rendering are limited. `marked`: put marks around the content of the tag `generation`.
    """
    import jinja2.ext
    import jinja2.nodes

    from rlplace.models.template_limits import LimitedEnvironment

    class Generation(jinja2.ext.Extension):
        """Jinja tag `{% generation %}...{% endgeneration %}`, by which templates mark answers for training on them.

        The tag renders what is inside, with marks around it if they are asked for.
        """

        tags = {"generation"}  # noqa: RUF012  # as the library declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if marked:
                body = [_written(MARK_BEGIN, line), *body, _written(MARK_END, line)]
            return jinja2.nodes.Scope(body, lineno=line)

    def _written(text: str, line: int) -> jinja2.nodes.Output:
        data = jinja2.nodes.TemplateData(text, lineno=line)
        return jinja2.nodes.Output([data], lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            sort_keys=sort_keys,
        )

    environment = LimitedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment.globals["strftime_now"] = strftime_now
    return environment
