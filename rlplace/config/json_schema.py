"""JSON Schema (draft 2020-12) of the config: editors complete keys and show what each means."""

from __future__ import annotations

import typing
from typing import Any

from rlplace.config.fields import ModelKind
from rlplace.config.read import MODEL_KEYS, TAGS
from rlplace.config.schema import AlgorithmName, Config

DRAFT = "https://json-schema.org/draft/2020-12/schema"
# Values that Hydra fills in while it composes, such as ${algorithm.gamma}; a schema cannot know what they become.
_FILLED_IN: dict[str, Any] = {"type": "string", "pattern": r"^\$\{.+\}$"}
# What Hydra takes out of the file before the config is read.
_HYDRA: dict[str, Any] = {
    "defaults": {"type": "array", "description": "other files that this one is composed of"},
    "hydra": {"type": "object", "description": "settings of Hydra itself"},
}


def config_schema() -> dict[str, Any]:
    """Return the schema of a config file, by the kind of model that the actor trains.

    Required keys may come from another file or the command line, so that only unknown keys and wrong values are
    refused.
    """
    from pydantic.json_schema import models_json_schema  # here: the reader of a plan needs no schema

    from rlplace.config.validate import model_of

    kinds = typing.get_args(ModelKind)
    _, schema = models_json_schema([(model_of(Config, kind), "validation") for kind in kinds])
    blocks: dict[str, Any] = {name: _block(block) for name, block in schema["$defs"].items()}
    for kind in kinds:
        blocks[f"Config_{kind}"]["properties"] |= _HYDRA
    keys: dict[str, Any] = {"type": "object", "anyOf": [{"required": [key]} for key in MODEL_KEYS]}
    language = {tag: [v for v, kind in values.items() if kind == "causal_lm"] for tag, values in TAGS.items()}
    language["algorithm.name"] = [name for name in typing.get_args(AlgorithmName) if name != "ppo"]
    conditions = [_having(key, {"enum": values}) for key, values in language.items()]
    return {
        "$schema": DRAFT,
        "title": "rlplace config",
        "type": "object",
        "if": {"anyOf": [*conditions, _having("actor.model", keys)]},
        "then": {"$ref": "#/$defs/Config_causal_lm"},
        "else": {"$ref": "#/$defs/Config_mlp"},
        "$defs": blocks,
    }


def _having(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a config whose `key` has this one."""
    for name in reversed(key.split(".")):
        schema = {"type": "object", "properties": {name: schema}, "required": [name]}
    return schema


def _block(schema: dict[str, Any]) -> dict[str, Any]:
    """Relax a block's schema: no key is required, and every value may be an interpolation."""
    kept = {key: value for key, value in schema.items() if key not in ("required", "title")}
    return kept | {"properties": {name: _value(value) for name, value in schema["properties"].items()}}


def _value(schema: dict[str, Any]) -> dict[str, Any]:
    about = {key: schema[key] for key in ("description", "default") if schema.get(key, {}) != {}}
    rest = {key: v for key, v in schema.items() if key not in ("description", "default", "title", "discriminator")}
    options: list[dict[str, Any]] = rest.get("oneOf") or rest.get("anyOf") or [rest]
    (first, *others) = options
    free = first.get("type") in ("object", "array", "string") and not {"enum", "const"} & first.keys()
    if not others and (free or "$ref" in first):
        return first | about
    return {"anyOf": [*options, _FILLED_IN]} | about
