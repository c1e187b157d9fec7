"""The keys that configs have, from the dataclasses of the schema."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping

from rlplace.config.knob import ModelKind
from rlplace.config.schema import Config

Field = tuple["dataclasses.Field[object]", object]  # with its type


def fields_of(block: type, kind: ModelKind) -> dict[str, Field]:
    """The fields of a block in a job with this kind of actor model, by name, with their types."""
    hints = typing.get_type_hints(block)
    return {
        f.name: (f, f.metadata.get("by_kind", {}).get(kind, hints[f.name]))
        for f in dataclasses.fields(block)
        if f.metadata.get("only", kind) == kind
    }


def block_in(hint: object) -> type | None:
    """The dataclass that a type is, or has among its alternatives."""
    kinds = [k for k in (hint, *typing.get_args(hint)) if isinstance(k, type) and dataclasses.is_dataclass(k)]
    return kinds[0] if kinds else None


def key_paths() -> dict[str, bool]:
    """Every key that some config may have -> whether the user's own names stand below it."""
    return {path: free for kind in typing.get_args(ModelKind) for path, free in _paths(Config, kind, "")}


def _paths(block: type, kind: ModelKind, above: str) -> Iterator[tuple[str, bool]]:
    for name, (_, hint) in fields_of(block, kind).items():
        below = block_in(hint)
        mappings = (h for h in (hint, *typing.get_args(hint)) if typing.get_origin(h) is Mapping)
        yield above + name, any(True for _ in mappings)
        if below is not None:
            yield from _paths(below, kind, f"{above}{name}.")
