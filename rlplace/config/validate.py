"""The blocks of the config as pydantic models, which validate a mapping and give the JSON Schema of each block."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import annotated_types
import pydantic
from pydantic_core import PydanticCustomError

from rlplace.config.keys import fields_of
from rlplace.config.knob import ModelKind

SIZE_TEXT = r"^\s*[0-9]+(\.[0-9]+)?\s*([KMGTkmgt][Ii]?[Bb]|[Bb])?\s*$"
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
LEAST_SIZE = 1024  # a smaller number without a unit is one of GiB or MiB, whose unit was forgotten
_BOUNDS = {
    "minimum": annotated_types.Ge,
    "above": annotated_types.Gt,
    "maximum": annotated_types.Le,
    "below": annotated_types.Lt,
}


class Block(pydantic.BaseModel):
    """A block of the config, in strict mode: no value is converted to another type."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    of: ClassVar[type]  # the dataclass


@functools.cache
def model_of(block: type, kind: ModelKind) -> type[Block]:
    """The model of a config dataclass in a job with this kind of actor model."""
    fields: dict[str, Any] = {}
    for name, (field, hint) in fields_of(block, kind).items():
        default = field.metadata.get("mlp", field.default) if kind == "mlp" else field.default
        about: dict[str, Any] = {"description": field.metadata.get("doc")}
        if dataclasses.is_dataclass(hint) or field.default_factory is not dataclasses.MISSING:
            about |= {"default": {}, "validate_default": True}
        elif default is not dataclasses.MISSING:
            about["default"] = default
        fields[name] = (_annotation(hint, field.metadata, kind), pydantic.Field(**about))
    doc = (block.__doc__ or "").strip().partition("\n")[0]
    model = pydantic.create_model(
        f"{block.__name__}_{kind}", __base__=Block, __doc__=None if doc.startswith(block.__name__) else doc, **fields
    )
    model.of = block
    return model


def _annotation(hint: Any, rules: Mapping[str, Any], kind: ModelKind) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return model_of(hint, kind)
    if origin in (typing.Union, types.UnionType):
        options = [_annotation(option, rules, kind) for option in args]
        if any(_is_named(option) for option in args):
            return _one_or_named(args, kind)
        return functools.reduce(operator.or_, options)
    if origin is typing.Literal:
        return hint
    if origin is tuple:
        items: Any = tuple
        return Annotated[items[_annotation(args[0], rules, kind), ...], pydantic.Strict(False)]
    if origin is not None:
        verbatim = pydantic.WithJsonSchema({"type": "object"})
        return Annotated[Any, pydantic.BeforeValidator(_mapping), verbatim]
    bounds = [_BOUNDS[rule](bound) for rule, bound in rules.items() if rule in _BOUNDS]
    if hint is int and rules.get("unit") == "bytes":
        shown = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": SIZE_TEXT}]}
        return Annotated[int, pydantic.BeforeValidator(_bytes), pydantic.WithJsonSchema(shown)]
    if hint is int:
        return Annotated[(int, *bounds, pydantic.BeforeValidator(_whole))]
    if hint is float:
        return Annotated[(float, pydantic.AllowInfNan(False), *bounds)]
    return hint


def _is_named(hint: Any) -> bool:
    args = typing.get_args(hint)
    return typing.get_origin(hint) is Mapping and dataclasses.is_dataclass(args[1])


def _one_or_named(args: Sequence[Any], kind: ModelKind) -> Any:
    """One block, or one block under each of several names; None where the field may be."""
    (block,) = (arg for arg in args if isinstance(arg, type) and dataclasses.is_dataclass(arg))
    model: Any = model_of(block, kind)

    def which(value: object) -> str:
        return "<none>" if value is None else "<names>" if has_names(block, value) else "<one>"

    return Annotated[
        Annotated[model, pydantic.Tag("<one>")]
        | Annotated[dict[str, model], pydantic.Tag("<names>")]
        | Annotated[None, pydantic.Tag("<none>")],
        pydantic.Discriminator(which),
    ]


def has_names(block: type, value: object) -> bool:
    """Whether these are blocks under names of their own, rather than one such block."""
    if not isinstance(value, Mapping):
        return False
    fields = {f.name for f in dataclasses.fields(block)}
    return any(name not in fields and isinstance(below, Mapping) for name, below in value.items())


def _mapping(value: object) -> object:
    if not isinstance(value, Mapping):
        raise PydanticCustomError("mapping", "expected a block of keys")
    return value


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bytes(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and (value == 0 or value >= LEAST_SIZE):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or (not match[2] and 0 < float(match[1]) < LEAST_SIZE):
        raise PydanticCustomError("size", "expected a size")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def plain(value: object) -> Any:
    """The dataclass of a validated block."""
    if isinstance(value, Block):
        return type(value).of(**{name: plain(getattr(value, name)) for name in type(value).model_fields})
    if isinstance(value, dict) and value and all(isinstance(below, Block) for below in value.values()):
        return {name: plain(below) for name, below in value.items()}
    return tuple(plain(item) for item in value) if isinstance(value, tuple) else value
