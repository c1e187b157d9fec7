"""The config blocks as pydantic models: they validate a mapping, explain wrong values, and give a JSON Schema."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, ClassVar, cast

import annotated_types
import pydantic
import pydantic.json_schema
from pydantic_core import PydanticCustomError

from rlplace.codes import problem
from rlplace.config.fields import JobName, default_of, fields_of, jobs, tag_of
from rlplace.config.keys import PRESETS_OF_ALL
from rlplace.config.number_text import (
    as_number,
    as_rate,
    as_seconds,
    as_thousands,
)
from rlplace.config.of_job import config_of, named_configs
from rlplace.config.other_names import meant_word
from rlplace.config.own import OWN, OWN_NAME, OwnName, block_of_name, with_module
from rlplace.config.read import MOST_WHOLE
from rlplace.config.which_job import MARKED, MODEL_KEYS, USUAL, marks
from rlplace.config.yaml_text import merged_blocks, quote, show
from rlplace.errors import did_you_mean

DRAFT = "https://json-schema.org/draft/2020-12/schema"
# Values such as ${algorithm.gamma}, which Hydra replaces while composing; a schema cannot check them.
_FILLED_IN: dict[str, Any] = {"type": "string", "pattern": r"^\$\{.+\}$"}
# Keys that Hydra removes from the file before the config is read.
_HYDRA: dict[str, Any] = {
    "defaults": {
        "type": "array",
        "description": "other files that this one is composed of",
    },
    "hydra": {"type": "object", "description": "settings of Hydra itself"},
}
SIZE_TEXT = r"^\s*[0-9]+(\.[0-9]+)?\s*([KMGTkmgt][Ii]?[Bb]|[Bb])?\s*$"
_SIZES = pydantic.TypeAdapter(pydantic.ByteSize)  # takes more units than SIZE_TEXT
SWITCHES = {
    **dict.fromkeys(
        ("true", "yes", "on", "1", "y", "t", "enabled", "enable", "always", "active"),
        "true",
    ),
    **dict.fromkeys(
        ("false", "no", "off", "0", "n", "f", "none", "null", "disabled", "disable"),
        "false",
    ),
    **dict.fromkeys(("never", "inactive"), "false"),
}
_PERCENT_TEXT = r"\s*([0-9]{1,2}(?:\.[0-9]+)?)\s*%\s*"
# In the meaning of a key: 0 switches off what the key sets
ZERO_IS_OFF = re.compile(r"\b0: (?:never|none|off|free|from all)\b")
_RESERVE_TEXT = rf"^auto$|^{_PERCENT_TEXT}$|{SIZE_TEXT}"
SHARE_OR_BYTES = "share or bytes"
# Words for a value that is not given
_CHOSEN = ("auto", "default", "automatic")
_LONG_UNITS = {
    "kilobyte": "kB",
    "megabyte": "MB",
    "gigabyte": "GB",
    "terabyte": "TB",
    "kibibyte": "KiB",
    "mebibyte": "MiB",
    "gibibyte": "GiB",
    "tebibyte": "TiB",
    "meg": "M",
    "gig": "G",
}
# Of a text such as 256x2: most layers, and the least width of one
_MOST_LAYERS = 8
_LEAST_WIDTH = 16
MOST_SIZE = 1 << 60  # upper bound of every size in bytes; a larger one is a mistake
LEAST_SIZE = 1024  # a smaller number without a unit is probably meant in GiB or MiB
# Rule of a field -> its annotation, its sign, and pydantic's error type.
_BOUNDS = {
    "minimum": (annotated_types.Ge, ">=", "greater_than_equal"),
    "above": (annotated_types.Gt, ">", "greater_than"),
    "maximum": (annotated_types.Le, "<=", "less_than_equal"),
    "below": (annotated_types.Lt, "<", "less_than"),
}


class Block(pydantic.BaseModel):
    """Base of the pydantic models of config blocks. `of`: the dataclass of the config block.

    The models are strict: no value is converted to a different type, and unknown keys are errors.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    of: ClassVar[type]


@functools.cache
def model_of(block: type, job: JobName) -> type[Block]:
    """Return the pydantic model that validates a config block in this kind of job. `block`: dataclass of the block."""
    fields: dict[str, Any] = {}
    for name, (field, hint) in fields_of(block, job).items():
        default = default_of(field, job)
        about: dict[str, Any] = {"description": field.metadata.get("doc")}
        if (
            dataclasses.is_dataclass(hint)
            or _tagged(hint)
            or field.default_factory is not dataclasses.MISSING
        ):
            about |= {"default": {}, "validate_default": True}
        elif default is not dataclasses.MISSING:
            about["default"] = default
        rules = {**field.metadata, "name": name, "usual": default}
        fields[name] = (_annotation(hint, rules, job), pydantic.Field(**about))
    doc = (block.__doc__ or "").strip().partition("\n")[0]
    model = pydantic.create_model(
        f"{block.__name__}_{job}",
        __base__=Block,
        __doc__=None if doc.startswith(block.__name__) else doc,
        **fields,
    )
    model.of = block
    return model


def plain(value: object) -> Any:
    """Return a validated value in which pydantic models are replaced by objects of the config dataclasses."""
    if isinstance(value, Block):
        return type(value).of(
            **{name: plain(getattr(value, name)) for name in type(value).model_fields}
        )
    if (
        isinstance(value, dict)
        and value
        and all(isinstance(below, Block) for below in value.values())
    ):
        return {name: plain(below) for name, below in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value


def _annotation(hint: Any, rules: Mapping[str, Any], job: JobName) -> Any:
    args = typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        model: Any = model_of(hint, job)
        if "word" not in rules:
            return model
        word = functools.partial(_block_of_word, rules["word"])
        shown = _with_words(hint, rules["word"], model.model_json_schema())
        return Annotated[
            model, pydantic.BeforeValidator(word), pydantic.WithJsonSchema(shown)
        ]
    if any(
        typing.get_origin(o) is Mapping
        and dataclasses.is_dataclass(typing.get_args(o)[1])
        for o in args
    ):
        return _one_or_named(args, job)
    if _tagged(hint):
        return _one_of_kinds(args, job)
    if typing.get_origin(hint) is tuple:
        items: Any = tuple
        listed = items[_annotation(args[0], rules, job), ...]
        return Annotated[
            listed,
            pydantic.Strict(False),
            pydantic.BeforeValidator(functools.partial(_listed, args[0])),
        ]

    def explained(
        value: object, check: pydantic.ValidatorFunctionWrapHandler
    ) -> object:
        try:
            return check(value)
        except pydantic.ValidationError as error:
            errors = {wrong["type"] for wrong in error.errors()}
            raise _explained(hint, value, rules, errors) from None

    return Annotated[_value(hint, rules), pydantic.WrapValidator(explained)]


def _block_of_word(key: str, value: object) -> object:
    """Return the block for which a plain word stands: the block with this word under `key`. A block is returned as is.

    YAML reads the words on and off as true and false.
    """
    if isinstance(value, Mapping):
        written = value.get(key)
        if isinstance(written, bool):
            return {**value, key: _SWITCHED[written]}
        return value
    if isinstance(value, bool):
        return {key: _SWITCHED[value]}
    return {key: value}


_SWITCHED = {True: "on", False: "off"}


def _with_words(block: type, key: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a block for which a plain word may stand.

    `key`: its key with these words. `schema`: the JSON Schema of the block alone.
    """
    words = typing.get_args(typing.get_type_hints(block)[key])
    plain = {"anyOf": [{"enum": [*words, *_SWITCHED]}, _FILLED_IN]}
    kept = {name: value for name, value in schema.items() if name != "type"}
    return kept | {"if": {"type": "object"}, "else": plain}


def _tagged(hint: Any) -> bool:
    """Return whether the type `hint` is a union of dataclasses: alternative blocks, selected by their key `kind`."""
    return len(typing.get_args(hint)) > 1 and all(
        dataclasses.is_dataclass(o) for o in typing.get_args(hint)
    )


def _one_of_kinds(blocks: Sequence[Any], job: JobName) -> Any:
    """Return a pydantic type for a value that is one of several alternative blocks.

    The key `kind` of the value selects the block. Without a known `kind`, it is the first. `blocks`: dataclasses of the
    alternatives. `job`: the kind of job.
    """
    tags = {tag_of(block): block for block in blocks}

    def which(value: object) -> str:
        written = value.get("kind") if isinstance(value, Mapping) else None
        return f"<{written if written in tags else next(iter(tags))}>"

    options: list[Any] = [
        Annotated[cast(Any, model_of(b, job)), pydantic.Tag(f"<{tag}>")]
        for tag, b in tags.items()
    ]
    return Annotated[
        functools.reduce(operator.or_, options), pydantic.Discriminator(which)
    ]


def _one_or_named(args: Sequence[Any], job: JobName) -> Any:
    """Return a pydantic type for a value that is one block, a mapping from names to blocks, or null.

    `args`: members of the union that is the field's type. `job`: the kind of job.
    """
    (block,) = (
        arg for arg in args if isinstance(arg, type) and dataclasses.is_dataclass(arg)
    )
    model: Any = model_of(block, job)
    fields = {f.name for f in dataclasses.fields(block)}

    def which(value: object) -> str:
        if not isinstance(value, Mapping):
            if value is None:
                return "<none>"
            return "<one>"
        named = sum(
            name not in fields and isinstance(below, Mapping)
            for name, below in value.items()
        )
        if named and named >= sum(name in fields for name in value):
            return "<names>"
        return "<one>"

    return Annotated[
        Annotated[model, pydantic.Tag("<one>")]
        | Annotated[dict[str, model], pydantic.Tag("<names>")]
        | Annotated[None, pydantic.Tag("<none>")],
        pydantic.Discriminator(which),
    ]


def _value(hint: Any, rules: Mapping[str, Any]) -> Any:
    """Return the pydantic type of a plain value: a number, a text, or a free mapping.

    `hint`: type of the field. `rules`: metadata of the field, such as bounds and unit.
    """
    origin = typing.get_origin(hint)
    if rules.get("unit") == SHARE_OR_BYTES:
        shown = {
            "anyOf": [
                {"type": "number", "minimum": 0},
                {"type": "string", "pattern": _RESERVE_TEXT},
            ]
        }
        return Annotated[
            Any,
            pydantic.BeforeValidator(_share_or_bytes),
            pydantic.WithJsonSchema(shown),
        ]
    if hint is OwnName:
        return Annotated[str, pydantic.StringConstraints(pattern=OWN_NAME)]
    if _is_union(hint):
        return functools.reduce(
            operator.or_, [_value(option, rules) for option in typing.get_args(hint)]
        )
    if origin is Mapping:
        return Annotated[
            pydantic.InstanceOf[Mapping[str, object]],
            pydantic.WithJsonSchema({"type": "object"}),
        ]
    if hint is int and rules.get("unit") == "bytes":
        shown = {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": SIZE_TEXT},
            ]
        }
        return Annotated[
            int, pydantic.BeforeValidator(_bytes), pydantic.WithJsonSchema(shown)
        ]
    rules = _bounded(hint, rules)
    bounds = [
        _BOUNDS[rule][0](bound) for rule, bound in rules.items() if rule in _BOUNDS
    ]
    if hint is int:
        return Annotated[(int, *bounds, pydantic.BeforeValidator(_whole))]
    if hint is float:
        return Annotated[(float, pydantic.AllowInfNan(False), *bounds)]
    return hint


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _bounded(hint: Any, rules: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rules of a field. An int without an upper bound gets one, so that arithmetic stays finite."""
    if hint is int:
        return {"maximum": MOST_WHOLE, **rules}
    return rules


def _listed(item: Any, value: object) -> object:
    """Return `value` if it is a list. Otherwise, raise the pydantic error that says how to write the list.

    `item`: type of the list items.
    """
    if isinstance(value, (list, tuple)):
        named_blocks = _blocks_of_names(item, value)
        if named_blocks is not None:
            raise _error("wrong-type", "names-as-keys", show(named_blocks))
        return value
    options: Sequence[Any] = (item,)
    if _is_union(item):
        options = typing.get_args(item)
    items = _list_in_text(value)
    if items is not None:
        raise _error("wrong-type", "list", items)
    if item is str and re.fullmatch("all([-_ ]linear)?", str(value).lower()):
        # PEFT's word for what no names mean here
        raise _error("wrong-type", "list", "[]")
    words = _words_of(options)
    # A text with names of choices, separated by commas
    named: list[str] = []
    if words and isinstance(value, str):
        named = [word.strip() for word in value.split(",")]
    own = OwnName in options and ":" in str(value)
    if not {*named} <= {*words} and not own:
        near = [meant for word in named if (meant := meant_word(word, words))]
        choices = ", ".join(words)
        fits = f"[<some of {choices}>]"
        if str(value).lower() in ("none", "null", "false", "off"):
            fits = "[]"
        elif len(near) == len(named):
            fits = f"[{', '.join(near)}]"
        raise _error("unknown-choice", "choices", fits, choices=choices)
    # A block of names
    block = isinstance(value, Mapping)
    if isinstance(value, Mapping):
        # Equal lists under several names, such as pi and vf
        same = [*value.values()]
        if same and isinstance(same[0], list) and all(one == same[0] for one in same):
            raise _error("wrong-type", "list", show(same[0]))
        with_settings = any(isinstance(of, Mapping) and of for of in value.values())
        if with_settings and words:
            raise _error("wrong-type", "list-of-names")
        if words and all(isinstance(word, str) for word in value):
            raise _error("wrong-type", "list-of-names", show(list(value)))
        named_items = _items_of(item, value)
        if named_items is not None:
            raise _error("wrong-type", "list", show(named_items))
    # A single item in place of a list
    fits = f"[{quote(value)}]"
    if isinstance(value, str) and "," in value:
        fits = f"[{value}]"
    elif isinstance(item, type) and dataclasses.is_dataclass(item) and not block:
        fits = f"[{block_of_name(item, value)}]"
    raise _error("wrong-type", "list", fits)


def _list_in_text(value: object) -> str | None:
    """Return the list that a text holds, as YAML: a list in quotes, or numbers with blanks; None without one."""
    if not isinstance(value, str):
        return None
    text = value.strip()
    if re.fullmatch(r"\[[^\[\]{}]*\]", text):
        return text
    # Two layers of 256: 256x2, or 2x256
    pair = re.fullmatch(r"([0-9]+)\s*[x*]\s*([0-9]+)", text)
    if pair is not None:
        few, many = sorted((int(pair[1]), int(pair[2])))
        if 0 < few <= _MOST_LAYERS and many >= _LEAST_WIDTH:
            return show([many] * few)
    if re.fullmatch(
        r"\([0-9]+(\s*,\s*[0-9]+)*,?\)|[0-9]+(\s+[0-9]+)+|[0-9]+(\s*x\s*[0-9]+)+", text
    ):
        return f"[{', '.join(re.findall('[0-9]+', text))}]"
    return None


def _words_of(options: Sequence[Any]) -> list[Any]:
    """Return the values of all Literal types in `options`, the members of a union."""
    words: list[Any] = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            words += typing.get_args(option)
    return words


def _items_of(item: Any, value: Mapping[Any, object]) -> list[object] | None:
    """Return the list that is probably meant by a block, for a key that needs a list; None if this is not clear.

    `item`: type of the list items. `value`: the block; its keys are taken as names of the items, its values as their
    settings.
    """
    if not dataclasses.is_dataclass(item):
        if item is str and value:
            return list(value)
        return None
    fields = [field.name for field in dataclasses.fields(item)]
    if not value or {*value} & {*fields}:
        return None
    return [
        {"name": with_module(cast(type, item), str(name))}
        | (
            {k: v for k, v in below.items() if k in fields} or {"kwargs": below}
            if isinstance(below, Mapping)
            else {}
        )
        | (
            {"weight": below}
            if "weight" in fields and isinstance(below, int | float)
            else {}
        )
        for name, below in value.items()
    ]


def _blocks_of_names(item: Any, values: Sequence[object]) -> list[object] | None:
    """Return the list that is meant if names of items stand as keys: [{math_answer: 1.0}]; None if there are none.

    `item`: type of the list items. `values`: the list.
    """
    fields = []
    if isinstance(item, type) and dataclasses.is_dataclass(item):
        fields = [field.name for field in dataclasses.fields(item)]
    if fields[:1] != ["name"]:
        return None
    found: list[object] = []
    for value in values:
        # A single key that is no misspelt field, with a weight or with settings
        settings = [*value.values()] if isinstance(value, Mapping) else []
        named = len(settings) == 1 and isinstance(settings[0], int | float | Mapping)
        if isinstance(value, Mapping) and named:
            (name,) = value
            if did_you_mean(str(name), fields) is None:
                found += _items_of(item, value) or [value]
                continue
        found.append(value)
    return None if found == [*values] else found


def _whole(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _bytes(value: object) -> object:
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and (value == 0 or LEAST_SIZE <= value <= MOST_SIZE)
    ):
        return value
    match = re.fullmatch(SIZE_TEXT, value) if isinstance(value, str) else None
    if match is None or (match[2] is None and 0 < float(match[0]) < LEAST_SIZE):
        raise ValueError
    try:
        size = int(_SIZES.validate_python(match[0]))
    except OverflowError:  # the number is larger than a float can be
        raise ValueError from None
    if size > MOST_SIZE:
        raise ValueError
    return size


def _share_or_bytes(value: object) -> object:
    """Return the value of a key that takes a share of the memory, a size in bytes, or "auto".

    The result is a float below 1 for a share, a whole number of bytes for a size, or "auto". `value`: a number, a text
    such as `5 %` or `16GiB`, or "auto". Raises ValueError for any other value.
    """
    if value == "auto":
        return value
    percent = re.fullmatch(_PERCENT_TEXT, value) if isinstance(value, str) else None
    share = float(percent[1]) / 100 if percent else value
    if not isinstance(share, float):
        return _bytes(share)
    if not 0 <= share < 1:
        raise ValueError
    return share


# ── explanations of wrong values ─────────────────────────────────────────────────────────────────────────────────────


def _error(
    code: str, error: str, fits: str | None = None, **facts: Any
) -> PydanticCustomError:
    """Return a pydantic error with the text that the tables of rlplace/codes have for `code`.

    `error`: name of the text, since a code has several texts. `fits`: a valid value of the key, which the error
    suggests. `facts`: name -> value to be filled into the text.
    """
    told = problem(code, "", error=error, **facts)
    context = {"told": told, "what": told.what, "fix": fits, "why": told.why}
    return PydanticCustomError(code, "wrong", context)


def _explained(
    hint: Any, value: object, rules: Mapping[str, Any], errors: Set[str]
) -> PydanticCustomError:
    """Return the error that explains why a value is invalid.

    `hint`: type of the field. `rules`: metadata of the field, such as bounds and unit. `errors`: types of the errors
    that pydantic has reported for the value.
    """
    options: list[Any] = [hint]
    optional = False
    if _is_union(hint):
        options = [o for o in typing.get_args(hint) if o is not type(None)]
        optional = type(None) in typing.get_args(hint)
    words = _words_of(options)
    # The alternative that is not a word; None if there are only words
    of = next((o for o in options if typing.get_origin(o) is not typing.Literal), None)
    about = rules.get("doc")
    written = str(value).strip()
    if optional and written.lower() in ("none", "null", "~"):
        return _error("wrong-type", "null", "null")
    # What follows from other values is null
    if optional and not words and of in (int, float) and written.lower() in _CHOSEN:
        error = "whole-number" if of is int else "number"
        return _error("wrong-type", error, "null", about=about)
    # false for nothing
    if optional and value is False and of in (int, float, str):
        error = "text" if of is str else "whole-number" if of is int else "number"
        return _error("wrong-type", error, "null", about=about)
    if rules.get("unit") == SHARE_OR_BYTES:
        fits = None
        if isinstance(value, int | float) and 1 <= value < 100:
            fits = f"{value:g} %"
        return _error("bad-size", "share", fits)
    if words and (of is None or isinstance(value, str)):
        if of is OwnName:
            return _not_a_word([*words, OWN], value, number=None)
        return _not_a_word(words, value, number=of)
    if of is OwnName:
        fits = None
        if re.fullmatch(r"[A-Za-z_][\w.]*\.[A-Z]\w*", str(value)):
            module, _, name = str(value).rpartition(".")
            fits = f"{module}:{name}"
        return _error("wrong-type", "own", fits, own=OWN, about=about)
    if rules.get("unit") == "bytes":
        return _no_size(value)
    if typing.get_origin(of) is Mapping:
        if rules["name"] == "component_placement":
            return _no_placement(value)
        named = isinstance(value, str) and (os.path.isdir(value) or "/" in value)
        if rules["name"] == "model" and named:
            return _error("wrong-type", "model", f"{{path: {value}}}")
        # A block whose only key was removed
        fits = "{}" if value is None else _block_in_text(value)
        return _error("wrong-type", "block", fits, about=about)
    if of is str and rules["name"] == "resume" and value is True:
        return _error("wrong-type", "resume", "auto")
    if of is str:
        fits = None
        # The only item of a list
        if isinstance(value, list):
            texts = [item for item in value if isinstance(item, str)]
            fits = quote(texts[0]) if len(texts) == len(value) == 1 else None
        elif value is not None:
            fits = f'"{show(value)}"'
        return _error("wrong-type", "text", fits)
    if of is bool:
        fits = SWITCHES.get(written.lower()) or did_you_mean(
            written.lower(), ("true", "false")
        )
        # The word of the key itself: enforce_eager: eager
        if fits is None and written.lower() in rules["name"].split("_"):
            fits = "true"
        error = "switch"
        if fits is not None:
            error = "meant-switch"
        return _error("wrong-type", error, fits)
    return _no_number(of, value, rules, errors)


def _block_in_text(value: object) -> str | None:
    """Return the block that is meant by texts such as `a=1, b=2`, as YAML; None if they have another form."""
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        return None
    pairs = []
    for text in texts:
        pair = re.fullmatch(r"\s*(\w+)\s*=\s*([\w./-]+)\s*", str(text))
        if pair is None:
            return None
        pairs.append(f"{pair[1]}: {pair[2]}")
    return "{" + ", ".join(pairs) + "}"


def _not_a_word(
    words: Sequence[object], value: object, *, number: object
) -> PydanticCustomError:
    """Return the error about a value that is not one of the allowed `words`.

    `number`: int or float if the key also takes numbers of this type; None if it takes words only.
    """
    near = meant_word(value, [str(word) for word in words])
    # Of numbers, the nearest one is not the one that is meant
    if type(value) is int and all(type(word) is int for word in words):
        near = None
    if value == "all" and "auto" in words:
        near = "auto"
    if type(value) is int and f"k{value}" in words:
        near = f"k{value}"
    # YAML reads no and off as false
    if value is False:
        near = next((word for word in ("none", "off", "no") if word in words), near)
    digits = re.findall(r"[0-9]+", str(value))
    named = isinstance(value, str) and re.search("[A-Za-z]", value)
    if near is None and named and len(digits) == 1 and int(digits[0]) in words:
        # Such as zero3 for 3
        near = digits[0]
    if near is None and number is not None and isinstance(value, str):
        near = as_number(value, number)
    error = "choice"
    if number and near:
        error = "misspelt-word"
    elif number:
        error = "word"
    elif near:
        error = "misspelt-choice"
    choices = ", ".join(show(word) for word in words)
    return _error("unknown-choice", error, near, near=near, choices=choices)


def _no_placement(value: object) -> PydanticCustomError:
    """Return the error about a whole placement that is a text or a list instead of a block.

    If the meaning is clear (the text `all`, or a list of blocks), the error proposes a valid block.
    """
    fits = None
    if value in ("all", "colocated", "collocated", "colocate", "colocate_all"):
        fits = "{preset: colocate_all}"
    elif isinstance(value, list) and value:
        merged = merged_blocks(value)
        fits = show(merged) if merged else None
    elif isinstance(value, str):
        # A preset by its name alone
        preset = meant_word(value, PRESETS_OF_ALL)
        fits = f"{{preset: {preset}}}" if preset else None
    return _error("wrong-type", "placement", fits)


def _short_unit(word: re.Match[str]) -> str:
    """Return the sign of a unit that is written out, such as `GB` for `gigabytes`; another word unchanged."""
    return _LONG_UNITS.get(word[0].lower().removesuffix("s"), word[0])


def _no_size(value: object) -> PydanticCustomError:
    """Return the error about a wrong size in bytes.

    The error proposes a valid size with the same number. If the number has no unit, GiB is proposed.
    """
    # gigabytes, gibibytes, gigs
    text = re.sub("[A-Za-z]{3,}", _short_unit, str(value))
    written = re.fullmatch(
        r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT]?)(i?)(b?)(?:ytes?)?\.?)\s*",
        text,
        re.IGNORECASE,
    )
    if written is None:
        if type(value) is int and value > MOST_SIZE:
            return _error("bad-size", "too-large")
        return _error("bad-size", "size")
    number = float(written[1])
    exact: float = number
    if type(value) is int:
        exact = value
    unit = "KMGT".find(written[2].upper() or "x")
    if exact > MOST_SIZE or exact * 1024**unit > 1e18:
        return _error("bad-size", "too-large")
    if number <= 0 or isinstance(value, bool):
        return _error("bad-size", "size")
    power = (written[2] or "G").upper()
    decimal = written[2] and written[4] and not written[3]
    if decimal:
        return _error("bad-size", "size", f"{written[1]}{power}B")
    return _error("bad-size", "size", f"{written[1]}{power}iB")


def _no_number(
    of: object, value: object, rules: Mapping[str, Any], errors: Set[str]
) -> PydanticCustomError:
    """Return the error about a value that is not a number, or that is out of bounds.

    `of`: type of the number, int or float. `rules`: metadata of the field, such as bounds. `errors`: types of the
    errors that pydantic has reported for the value.
    """
    about = rules.get("doc")
    # A whole number that is too large for a float
    too_long = "float_type" in errors and type(value) is int
    if "finite_number" in errors or too_long:
        return _error("out-of-bounds", "finite", about=about)
    passed = next(
        (bound for bound, (_, _, error) in _BOUNDS.items() if error in errors), None
    )
    if passed is None:
        return _no_number_at_all(of, value, rules)
    if passed == "maximum":
        rules = _bounded(of, rules)
    signs = [
        f"{sign} {rules[bound]}"
        for bound, (_, sign, _) in _BOUNDS.items()
        if bound in rules
    ]
    rule = " and ".join(signs)
    # A share that was given in percent
    least = 2
    if rules.get("unit") != "share":
        least = 10
    highest = rules.get("maximum", rules.get("below"))
    if highest == 1 and isinstance(value, int | float) and least <= value < 100:
        share = show(value / 100)
        return _error("out-of-bounds", "bounds", share, rule=rule, about=about)
    # A rate or a weight with a sign too many; -1 is a habit for what is switched off
    if of is float and isinstance(value, float) and value < 0 and value != -1:
        largest: Any = rules.get("maximum", rules.get("below", math.inf))
        if -value <= largest:
            return _error(
                "out-of-bounds", "bounds", show(-value), rule=rule, about=about
            )
    error = "usual"
    shown = rules["usual"]
    if passed in ("minimum", "maximum"):
        error = "nearest"
        shown = rules[passed]
    if not isinstance(shown, int | float):
        return _error("out-of-bounds", "bounds", rule=rule, about=about)
    return _error("out-of-bounds", error, rule=rule, about=about, shown=show(shown))


def _no_number_at_all(
    of: object, value: object, rules: Mapping[str, Any]
) -> PydanticCustomError:
    """Return the error about a value that is not a number of the type `of`, int or float.

    `rules`: metadata of the field, such as its name and meaning.
    """
    fits = None
    # The only item of a list
    if isinstance(value, list) and value and type(value[0]) in (int, of):
        # One number, or the same one several times
        is_one = all(type(one) is type(value[0]) and one == value[0] for one in value)
        fits = show(value[0]) if is_one else None
    # false and null for nothing
    if (value is None or value is False) and ZERO_IS_OFF.search(rules.get("doc", "")):
        fits = "0"
    if isinstance(value, str):
        name = rules["name"]
        fits = as_number(value, of) or as_seconds(value, name) or as_rate(value, name)
        thousands = as_thousands(value, rules["name"])
        if fits is None and thousands is not None:
            fits = thousands.number
            if thousands.other is not None:
                fits += f"        (or: {rules['name']}: {thousands.other})"
    several = isinstance(value, list) and len(value) > 1 and fits is None
    if several and all(type(one) in (int, of) for one in cast(list[Any], value)):
        return PydanticCustomError("several_values", "several numbers in place of one")
    # The error says what the key means, unless the value shows what was meant
    told = rules.get("doc")
    if fits:
        told = None
    error = "number"
    if of is int:
        error = "whole-number"
    return _error("wrong-type", error, fits, about=told)


# ── JSON Schema (draft 2020-12): editors complete keys and show what each means ──────────────────────────────────────


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file.

    The schema does not require any key, since further files or overrides may set the key.
    """
    named = named_configs()
    _, schema = pydantic.json_schema.models_json_schema(
        [
            *((model_of(config_of(job), job), "validation") for job in jobs()),
            *((model_of(block, "simulator"), "validation") for block in named.values()),
        ]
    )
    blocks: dict[str, Any] = {
        name: _relaxed(block) for name, block in schema["$defs"].items()
    }
    for job in jobs():
        blocks[_name_of(job)]["properties"] |= _HYDRA
    # A job that the config names
    branches = []
    for name, block in named.items():
        of_job = model_of(block, "simulator").__name__
        blocks[of_job]["properties"] |= _HYDRA | {"job": {"const": name}}
        branches.append((_having("job", {"const": name}), of_job))
    keys: dict[str, Any] = {
        "type": "object",
        "anyOf": [{"required": [key]} for key in MODEL_KEYS],
        # A model with a kind says by it which job it is for
        "not": {"required": ["kind"]},
    }
    conditions = [_having(key, {"enum": values}) for key, values in marks().items()]
    choice: dict[str, Any] = {
        "if": {"anyOf": [*conditions, _having("actor.model", keys)]},
        "then": {"$ref": f"#/$defs/{_name_of(MARKED)}"},
        "else": {"$ref": f"#/$defs/{_name_of(USUAL)}"},
    }
    for condition, of_job in branches:
        choice = {
            "if": condition,
            "then": {"$ref": f"#/$defs/{of_job}"},
            "else": choice,
        }
    return {
        "$schema": DRAFT,
        "title": "rlplace config",
        "type": "object",
        **choice,
        "$defs": blocks,
    }


def _name_of(job: JobName) -> str:
    """Return the name of the JSON Schema of a job's config."""
    return model_of(config_of(job), job).__name__


def _having(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema that a config matches if its value at the path `key` matches `schema`."""
    for name in reversed(key.split(".")):
        schema = {"type": "object", "properties": {name: schema}, "required": [name]}
    return schema


def _relaxed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a block's JSON Schema in which no key is required and any value may be a reference `${...}`."""
    kept = {
        key: value for key, value in schema.items() if key not in ("required", "title")
    }
    return kept | {
        "properties": {
            name: _relaxed_value(value) for name, value in schema["properties"].items()
        }
    }


def _relaxed_value(schema: dict[str, Any]) -> dict[str, Any]:
    about = {
        key: schema[key]
        for key in ("description", "default")
        if schema.get(key, {}) != {}
    }
    rest = {
        key: v
        for key, v in schema.items()
        if key not in ("description", "default", "title", "discriminator")
    }
    options: list[dict[str, Any]] = rest.get("oneOf") or rest.get("anyOf") or [rest]
    (first, *others) = options
    free = (
        first.get("type") in ("object", "array", "string")
        and not {"enum", "const"} & first.keys()
    )
    if not others and (free or "$ref" in first or "properties" in first):
        return first | about
    return {"anyOf": [*options, _FILLED_IN]} | about
