"""A model's tokenizer from its Hugging Face folder: text to token ids and back, chats by its template.

It reads the files itself and needs only the libraries `tokenizers` and `jinja2`, so that an env rank stays small and
starts fast. Results equal those of `AutoTokenizer`.

In a conversation, prompts and replies are each encoded alone and appended; sampled tokens are never encoded again::

    first:  [system, user] by the template, up to where the answer begins     ┐
    answer: as sampled, with its stop token                                   ├ appended, never encoded again
    reply:  what the template puts between that answer and the next           ┘
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.envs.text.contract import Image, Message, Prompt
from rlplace.errors import ConfigError
from rlplace.tokens import Tokens

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer as _Library

_KEY = "actor.model.path"
_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_ANSWER = "\N{BLACK SQUARE}answer\N{BLACK SQUARE}"  # stands for an answer while a reply is looked for behind it


class Tokenizer:
    """A tokenizer for one thread. `chat_template` is None where the folder has none."""

    def __init__(self, library: _Library, folder: Path) -> None:
        self._library = library
        self._folder = folder
        config = _json(folder / "tokenizer_config.json")
        # Special tokens are text, or a block with the text in `content`; null means none.
        named = {**_json(folder / "special_tokens_map.json"), **config}
        values = {
            name: of.get("content") if isinstance(of := named.get(name), dict) else of
            for name in _SPECIAL
        }
        self._special = {
            name: text for name, text in values.items() if isinstance(text, str)
        }
        self.chat_template = _chat_template(folder, config)
        self._template: jinja2.Template | None = None
        # What ends an answer: the ids that generation_config.json or config.json name, and the end of text.
        stops: list[int] = []
        for name in ("generation_config.json", "config.json"):
            ids = _json(folder / name).get("eos_token_id")
            stops += [] if ids is None else ids if isinstance(ids, list) else [ids]
        end = (
            library.token_to_id(self._special["eos_token"])
            if "eos_token" in self._special
            else None
        )
        self.stop_token_ids = tuple(
            dict.fromkeys([*stops, *([] if end is None else [end])])
        )

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a folder. Raises ConfigError where it has no tokenizer.json."""
        from tokenizers import Tokenizer as Library

        file = folder / "tokenizer.json"
        if not file.is_file():
            what = "the model's folder has no tokenizer.json"
            why = "prompts are encoded by the model's own tokenizer"
            fix = "save it there: AutoTokenizer.from_pretrained(<model>).save_pretrained(<folder>)"
            raise ConfigError.of("no-tokenizer", _KEY, what, str(folder), why, fix)
        try:
            library = Library.from_file(str(file))
        except Exception as error:  # as the library raises all of its errors
            raise _damaged(file, error) from error
        library.no_padding()
        library.no_truncation()
        return cls(library, folder)

    def stops(self, texts: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return what ends an answer: ids, the model's own and the special tokens among `texts`, and other texts."""
        special = self._without_text
        ids = dict.fromkeys(
            [
                *self.stop_token_ids,
                *(special[text] for text in texts if text in special),
            ]
        )
        return tuple(ids), tuple(text for text in texts if text not in special)

    def special_within(self, text: str) -> str | None:
        """Return a special token that is a part of `text`, which is then never found in an answer."""
        special = self._without_text
        if text in special:
            return None
        return next((token for token in special if token in text), None)

    @property
    def _without_text(self) -> Mapping[str, int]:
        """Tokens that the text of an answer leaves out."""
        added = {
            token.content: number
            for number, token in self._library.get_added_tokens_decoder().items()
        }
        return {
            text: number for text, number in added.items() if not self.decode([number])
        }

    @property
    def size(self) -> int:
        return int(self._library.get_vocab_size(with_added_tokens=True))

    @property
    def ids(self) -> Mapping[str, int]:
        ids: Mapping[str, int] = self._library.get_vocab(with_added_tokens=True)
        return ids

    def encode(self, text: str, *, special: bool = False) -> Tokens:
        """Encode a text; `special` adds the tokens that the tokenizer puts around a whole text.

        Raises ConfigError for half of a character, which bytes that were decoded with `surrogateescape` are.
        """
        try:
            return np.array(
                self._library.encode(text, add_special_tokens=special).ids, np.int32
            )
        except TypeError as error:
            what = "a text has half of a character"
            why = "of bytes decoded with surrogateescape, or an escape"
            fix = 'decode the bytes with errors="replace"'
            raise ConfigError.of(
                "no-text", "env.task", what, ascii(text)[:400], why, fix
            ) from error

    def decode(self, tokens: Sequence[int] | Tokens, *, special: bool = False) -> str:
        """Decode tokens; `special`: show special tokens too."""
        text: str = self._library.decode(
            [int(t) for t in tokens], skip_special_tokens=not special
        )
        return text

    def render(
        self,
        messages: Sequence[Message],
        *,
        answered: bool = False,
        arguments: Mapping[str, object] | None = None,
    ) -> str:
        """Render a chat by the model's template; unless `answered`, up to where the next answer begins.

        `arguments` are what the template takes beside the messages, such as tools.

        Raises ConfigError: there is no template, or it refuses these messages.
        """
        import jinja2

        if self.chat_template is None:
            what = "the model's tokenizer has no chat template"
            why = "prompts are messages of a chat, and only the template defines how this model sees one"
            fix = "env.chat=false sends prompts as plain text        (or: add a chat_template.jinja)"
            raise ConfigError.of(
                "no-chat-template", _KEY, what, str(self._folder), why, fix
            )
        chat = [
            {"role": message.role, "content": _content(message)} for message in messages
        ]
        try:
            if self._template is None:
                self._template = _environment().from_string(self.chat_template)
            known = {
                "tools": None,
                "documents": None,
                **self._special,
                **(arguments or {}),
            }
            return self._template.render(
                {**known, "messages": chat, "add_generation_prompt": not answered}
            )
        except Exception as error:  # a template is a program: besides its own errors it raises any other
            what = "the chat template refuses these messages"
            got = ", ".join(m.role for m in messages)
            raised = (
                str(error)
                if isinstance(error, jinja2.TemplateError)
                else f"{type(error).__name__}: {error}"
            )
            why = f"the template in {self._folder} raised: {raised}"
            fix = "env.chat=false        (prompts as plain text; or correct the messages or the template)"
            if any(message.role == "system" for message in messages):
                fix = "env.system=null        (if the roles it takes do not include system)"
            raise ConfigError.of(
                "chat-template-refused", _KEY, what, got, why, fix
            ) from error

    def chat(self, messages: Sequence[Message], *, answered: bool = False) -> Tokens:
        return self.encode(self.render(messages, answered=answered))


class StopTexts:
    """Finds the texts that end an answer, whatever tokens they are made of."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        # Tokens have a byte at least. More are looked at: the first of them may be a part of a character.
        self._most = max((len(text.encode()) for text in texts), default=0) + 4

    def end(self, tokens: Sequence[int]) -> bool:
        """Return whether one of them has come with the last of the tokens of an answer."""
        seen = tokens[-self._most :]
        written = self._tokenizer.decode(seen)
        found = [text for text in self._texts if text in written]
        before = self._tokenizer.decode(seen[:-1]) if found else ""
        return any(written.count(text) > before.count(text) for text in found)


class Chat:
    """Turns between a model and an environment by the model's chat template."""

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

    def first(self, prompt: Prompt) -> Tokens:
        """Return [P], up to where the first answer begins."""
        messages = (
            [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
        )
        return self._tokenizer.encode(self._render([*self._system, *messages]))

    def reply(self, answer: Tokens, text: str) -> Tokens:
        """Return what follows an answer, which may end in a stop token, up to where the next answer begins."""
        chat = [
            Message("user", "-"),
            Message("assistant", _ANSWER),
            Message("user", text),
        ]
        before, found, after = self._render([*self._system, *chat]).partition(_ANSWER)
        if not found or _ANSWER in after:
            what = "the chat template does not show an earlier answer exactly once"
            why = "what follows an answer in a conversation is found behind it, as the template renders it"
            fix = "another chat_template.jinja, or a task of one turn"
            got = repr((before + after)[:200])
            raise ConfigError.of("chat-template-refused", _KEY, what, got, why, fix)
        tokens = self._tokenizer.encode(after)
        # The answer already has the token by which it ended; the template would write it again.
        ended = len(answer) > 0 and len(tokens) > 0 and answer[-1] == tokens[0]
        if ended:
            return tokens[1:]
        return tokens

    def _render(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.render(messages, arguments=self._arguments)


class PlainText:
    """Turns of plain text, for models without chat training; a reply stands on lines of its own."""

    def __init__(self, tokenizer: Tokenizer, *, system: str | None) -> None:
        self._tokenizer = tokenizer
        self._system = system

    def first(self, prompt: Prompt) -> Tokens:
        parts = (
            [prompt]
            if isinstance(prompt, str)
            else [message.text for message in prompt]
        )
        return self._tokenizer.encode(
            "\n".join(([self._system] if self._system else []) + parts), special=True
        )

    def reply(self, answer: Tokens, text: str) -> Tokens:
        return self._tokenizer.encode(f"\n{text}\n")


def _content(message: Message) -> str | list[dict[str, str]]:
    """Return the content as chat templates take it; images are only named, since their tokens stand for them."""
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "image"} if isinstance(p, Image) else {"type": "text", "text": p}
        for p in message.content
    ]


def _json(file: Path) -> dict[str, Any]:
    try:
        content: object = (
            json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        )
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error
    if not isinstance(content, dict):
        raise _damaged(
            file, TypeError(f"it is a {type(content).__name__}, not an object")
        )
    return content


def _damaged(file: Path, error: Exception) -> ConfigError:
    what = f"{file.name} of the model's tokenizer cannot be read"
    fix = (
        "save it anew: AutoTokenizer.from_pretrained(<model>).save_pretrained(<folder>)"
    )
    return ConfigError.of(
        "no-tokenizer", _KEY, what, str(file), f"{type(error).__name__}: {error}", fix
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Read the chat template: a file of its own before the config; of several named ones, the one called default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise _damaged(file, error) from error
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get(
            "default"
        )
    if isinstance(template, str):
        return template
    return None


def _environment() -> jinja2.Environment:
    """Make the environment that chat templates are written for, as published with `apply_chat_template`."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` marks answers for other purposes; here it is what is inside."""

        tags = {"generation"}  # noqa: RUF012  # as the library declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(
        form
    )
    return environment
