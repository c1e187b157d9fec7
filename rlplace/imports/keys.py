"""Which keys our config has: asked of its dataclasses, so that an importer can say what it cannot say yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rlplace.config import Config
from rlplace.config.keys import block_in, fields_of
from rlplace.config.knob import ModelKind
from rlplace.config.read import try_config
from rlplace.errors import Problem

_MACHINES = ("num_nodes", "accelerators_per_node")  # are written before what is placed on them


def has_key(key: str, kind: ModelKind) -> bool:
    """Whether the config has the dotted key; a block counts as one."""
    block: type | None = Config
    for name in key.split("."):
        fields = fields_of(block, kind) if block is not None else {}
        if name not in fields:
            return False
        block = block_in(fields[name][1])
    return True


def default_of(key: str, kind: ModelKind) -> object:
    """What the config holds where nothing is written; None where something must be, or where it is nothing."""
    block: type | None = Config
    *blocks, leaf = key.split(".")
    for name in blocks:
        assert block is not None, key
        block = block_in(fields_of(block, kind)[name][1])
    assert block is not None, key
    field, _ = fields_of(block, kind)[leaf]
    default = field.metadata.get("mlp", field.default) if kind == "mlp" else field.default
    return None if default is dataclasses.MISSING else default


def ordered(mapping: Mapping[str, object], kind: ModelKind, root: type = Config) -> dict[str, object]:
    """The same with its blocks and keys in the order in which configs are written."""
    fields = fields_of(root, kind)
    found: dict[str, object] = {}
    for name, (_, hint) in sorted(fields.items(), key=lambda item: item[0] not in _MACHINES):
        if name in mapping:
            value, block = mapping[name], block_in(hint)
            found[name] = ordered(value, kind, block) if block is not None and isinstance(value, Mapping) else value
    return found


def find_refusals(mapping: Mapping[str, object]) -> tuple[list[str], list[Problem]]:
    """Keys that must still be written before a run, and problems of those that are written."""
    config, problems = try_config(mapping)
    missing = [p.key for p in problems if p.code == "missing-key"]
    missing += config.missing if config is not None else ()
    return list(dict.fromkeys(missing)), [p for p in problems if p.code != "missing-key"]
