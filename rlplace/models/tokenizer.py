"""A model's tokenizer from its Hugging Face folder: text to token ids and back, chats by its template.

It reads the files itself and needs only the libraries `tokenizers` and `jinja2`, so that an env rank stays small and
starts fast. Results equal those of `AutoTokenizer`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import ConfigError, Problem

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer as _Library

    from rlplace.envs.text.contract import Message

Tokens = NDArray[np.int32]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer for one thread. `chat_template` is None where the folder has none."""

    def __init__(
        self, library: _Library, *, folder: Path, special: Mapping[str, str], chat_template: str | None, stops: Tokens
    ) -> None:
        self._library, self._folder, self._special, self.chat_template = library, folder, special, chat_template
        self.stop_token_ids = tuple(int(token) for token in stops)  # what ends an answer, as the model's files say
        self._template: jinja2.Template | None = None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a folder. Raises ConfigError where it has no tokenizer.json."""
        from tokenizers import Tokenizer as Library

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError([_no_tokenizer(folder)])
        library = Library.from_file(str(file))
        library.no_padding()
        library.no_truncation()
        config = _json(folder / "tokenizer_config.json")
        special = _special_tokens({**_json(folder / "special_tokens_map.json"), **config})
        return cls(
            library,
            folder=folder,
            special=special,
            chat_template=_chat_template(folder, config),
            stops=_stops(folder, library, special),
        )

    @property
    def size(self) -> int:
        """Size of the vocabulary, added tokens included."""
        return int(self._library.get_vocab_size(with_added_tokens=True))

    @property
    def ids(self) -> Mapping[str, int]:
        """Ids of all tokens, added ones included."""
        ids: Mapping[str, int] = self._library.get_vocab(with_added_tokens=True)
        return ids

    def encode(self, text: str, *, special: bool = False) -> Tokens:
        """Encode a text; `special` adds the tokens that the tokenizer puts around a whole text."""
        return np.array(self._library.encode(text, add_special_tokens=special).ids, np.int32)

    def decode(self, tokens: Sequence[int] | Tokens, *, special: bool = False) -> str:
        """Decode tokens; `special`: show special tokens too."""
        text: str = self._library.decode([int(t) for t in tokens], skip_special_tokens=not special)
        return text

    def render(self, messages: Sequence[Message], *, answered: bool = False) -> str:
        """Render a chat by the model's template; unless `answered`, up to where the next answer begins.

        Raises ConfigError: there is no template, or it refuses these messages.
        """
        import jinja2

        if self.chat_template is None:
            raise ConfigError([no_chat_template(self._folder)])
        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            if self._template is None:
                self._template = _environment().from_string(self.chat_template)
            return self._template.render(
                messages=chat, tools=None, documents=None, add_generation_prompt=not answered, **self._special
            )
        except jinja2.TemplateError as error:
            raise ConfigError([_refused(self._folder, messages, str(error))]) from error

    def chat(self, messages: Sequence[Message], *, answered: bool = False) -> Tokens:
        """Encode a rendered chat."""
        return self.encode(self.render(messages, answered=answered))


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Read special tokens: text, or a block with the text in `content`; null means none."""
    special = {}
    for name in _SPECIAL:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            special[name] = value
    return special


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Read the chat template: a file of its own before the config; of several named ones, the one called default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _stops(folder: Path, library: _Library, special: Mapping[str, str]) -> Tokens:
    """Return the ids that generation_config.json or config.json name, and the tokenizer's end of text."""
    stops: list[int] = []
    for name in ("generation_config.json", "config.json"):
        ids = _json(folder / name).get("eos_token_id")
        stops += [] if ids is None else ids if isinstance(ids, list) else [ids]
    end = library.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return np.array(list(dict.fromkeys([*stops, *([] if end is None else [end])])), np.int32)


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

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def no_chat_template(folder: Path) -> Problem:
    return Problem(
        code="no-chat-template",
        key="actor.model.path",
        what="the model's tokenizer has no chat template",
        got=str(folder),
        why="prompts are messages of a chat, and only the template says how this model sees one",
        fix="env.chat=false sends prompts as plain text        (or: put a chat_template.jinja into the folder)",
    )


def _no_tokenizer(folder: Path) -> Problem:
    return Problem(
        code="no-tokenizer",
        key="actor.model.path",
        what="the model's folder has no tokenizer.json",
        got=str(folder),
        why="prompts are encoded by the model's own tokenizer",
        fix="save it there: AutoTokenizer.from_pretrained(<model>).save_pretrained(<folder>)",
    )


def _refused(folder: Path, messages: Sequence[Message], why: str) -> Problem:
    return Problem(
        code="chat-template-refused",
        key="actor.model.path",
        what="the chat template refuses these messages",
        got=", ".join(message.role for message in messages),
        why=f"the template in {folder} raised: {why}",
        fix="env.system=null, if the roles it takes do not include system",
    )
