"""JSON Schema (draft 2020-12) of the config, from its dataclasses: editors complete keys and show what each means."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlplace.config.keys import fields_of
from rlplace.config.kinds import MODEL_KEYS, TAGS
from rlplace.config.knob import ModelKind
from rlplace.config.schema import AlgorithmName, Config

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_SIZE_TEXT = r"^\s*[0-9]+(\.[0-9]+)?\s*([KMGTkmgt][Ii]?[Bb]|[Bb])?\s*$"
_BOUNDS = {"minimum": "minimum", "above": "exclusiveMinimum", "maximum": "maximum", "below": "exclusiveMaximum"}
# Values that Hydra fills in while it composes, such as ${algorithm.gamma}; a schema cannot know what they become.
_FILLED_IN: dict[str, Any] = {"type": "string", "pattern": r"^\$\{.+\}$"}
# What Hydra takes out of the file before the config is read.
_HYDRA: dict[str, Any] = {
    "defaults": {"type": "array", "description": "other files that this one is composed of"},
    "hydra": {"type": "object", "description": "settings of Hydra itself"},
}


def config_schema() -> dict[str, Any]:
    """What a config file may hold, by the kind of model that the actor trains.

    Required keys may come from another file or the command line, so that only unknown keys and wrong values are
    refused.
    """
    defs: dict[str, Any] = {}
    roots = {kind: _reference(Config, kind, defs) for kind in typing.get_args(ModelKind)}
    for root in roots.values():
        defs[root["$ref"].rpartition("/")[2]]["properties"] |= _HYDRA
    names = [name for name in typing.get_args(AlgorithmName) if name != "ppo"]
    keys: dict[str, Any] = {"type": "object", "anyOf": [{"required": [key]} for key in MODEL_KEYS]}
    language = [_where(tag, [v for v, kind in values.items() if kind == "causal_lm"]) for tag, values in TAGS.items()]
    return {
        "$schema": DRAFT,
        "title": "rlplace config",
        "type": "object",
        "if": {"anyOf": [*language, _where("algorithm.name", names), _having("actor.model", keys)]},
        "then": roots["causal_lm"],
        "else": roots["mlp"],
        "$defs": dict(sorted(defs.items())),
    }


def _where(key: str, values: Sequence[str]) -> dict[str, Any]:
    """The schema of a config in which `key` has one of the values."""
    return _having(key, {"enum": list(values)})


def _having(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a config whose `key` has one of its own."""
    for name in reversed(key.split(".")):
        schema = {"type": "object", "properties": {name: schema}, "required": [name]}
    return schema


def _reference(block: type, kind: ModelKind, defs: dict[str, Any]) -> dict[str, Any]:
    """A pointer to the schema of a dataclass, which is put into `defs` on the way."""
    name = f"{block.__name__}.{kind}"
    if name not in defs:
        defs[name] = {}  # holds the place, should a class hold itself
        defs[name] = _block(block, kind, defs)
    return {"$ref": f"#/$defs/{name}"}


def _block(block: type, kind: ModelKind, defs: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, (field, hint) in fields_of(block, kind).items():
        schema = _value(hint, field.metadata, kind, defs)
        about = {"description": field.metadata["doc"]} if "doc" in field.metadata else {}
        value = field.metadata.get("mlp", field.default) if kind == "mlp" else field.default
        default = {} if value is dataclasses.MISSING else {"default": _plain(value)}
        properties[name] = schema | about | default
    doc = (block.__doc__ or "").strip()
    about = {"description": doc.split("\n")[0]} if doc and not doc.startswith(f"{block.__name__}(") else {}
    return {"type": "object", **about, "properties": properties, "additionalProperties": False}


def _value(hint: object, rules: Mapping[str, Any], kind: ModelKind, defs: dict[str, Any]) -> dict[str, Any]:
    """The schema of one type; mirrors what `structure.Reader` reads."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": list(_alternatives(args, rules, kind, defs))}
    if origin is tuple:
        return {"type": "array", "items": _value(args[0], rules, kind, defs)}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _reference(hint, kind, defs)
    if origin is typing.Literal:
        return {"anyOf": [{"enum": list(args)}, _FILLED_IN]}
    if origin is not None:
        blocks = dataclasses.is_dataclass(args[1])
        return {"type": "object"} | ({"additionalProperties": _value(args[1], rules, kind, defs)} if blocks else {})
    return {"anyOf": [*_scalar(hint, rules), _FILLED_IN]} if hint is not str else {"type": "string"}


def _alternatives(
    args: tuple[object, ...], rules: Mapping[str, Any], kind: ModelKind, defs: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Each once, unions inside of unions opened."""
    seen: list[dict[str, Any]] = []
    for arg in args:
        schema: dict[str, Any] = {"type": "null"} if arg is type(None) else _value(arg, rules, kind, defs)
        options: list[dict[str, Any]] = schema.get("anyOf", [schema])
        seen += [option for option in options if option not in seen]
    yield from seen


def _scalar(hint: object, rules: Mapping[str, Any]) -> list[dict[str, Any]]:
    if rules.get("unit") == "bytes":
        return [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SIZE_TEXT}]
    if hint is bool:
        return [{"type": "boolean"}]
    bounds = {_BOUNDS[rule]: value for rule, value in rules.items() if rule in _BOUNDS}
    return [{"type": "integer" if hint is int else "number", **bounds}]


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
