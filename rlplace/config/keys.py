"""The paths of all keys that a config may have."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator

from rlplace.config.fields import ModelKind, block_at, blocks_in, fields_of
from rlplace.config.schema import Config

PLACEMENT = "cluster.component_placement"
KINDS: tuple[ModelKind, ...] = ("mlp", "causal_lm")


def all_places(kind: ModelKind) -> tuple[str, ...]:
    """Return the path of every key of a config."""

    def inside(block: type, above: str) -> Iterator[str]:
        for name, (_, hint) in fields_of(block, kind).items():
            yield f"{above}{name}"
            for below in blocks_in(hint):
                yield from inside(below, f"{above}{name}.")

    return tuple(dict.fromkeys(inside(Config, "")))


def places_of(name: str) -> list[str]:
    return list(
        dict.fromkeys(
            p
            for kind in KINDS
            for p in all_places(kind)
            if p.rpartition(".")[2] == name
        )
    )


@functools.cache
def takes_list(key: str) -> bool:
    """Whether the value of a key may be a list; that of a component in the placement may."""
    above, _, name = key.rpartition(".")
    if above == PLACEMENT:
        return True
    blocks = [
        block_at(Config, kind, above.split(".") if above else ()) for kind in KINDS
    ]
    hints = [
        fields_of(block, kind)[name][1]
        for block, kind in zip(blocks, KINDS, strict=True)
        if name in fields_of(block, kind)
    ]
    return any(
        typing.get_origin(option) is tuple
        for hint in hints
        for option in (hint, *typing.get_args(hint))
    )
