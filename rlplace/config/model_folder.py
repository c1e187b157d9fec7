"""The folders of a language-model job's models, as far as a plan needs them: the keys of their config.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from rlplace.config import Config, FrozenConfig, RewardConfig, TrainedConfig
from rlplace.errors import ConfigError, Problem, Source, source_of

_Block = TypeVar("_Block", bound=TrainedConfig | FrozenConfig)

_PATH = "actor.model.path"
_GET = "scripts/get_model smollm2        (or the folder of another Hugging Face model)"
_OWN = ("actor", "critic", "reference")  # roles with one block, which may name a model of its own


def with_folder(config: Config, sources: Mapping[str, Source]) -> Config:
    """The config with an absolute `actor.model.path` and the keys of the folder's config.json, which count.

    So of every component with a model of its own. A plan needs no folder where the keys of config.json are written in
    the config. Raises ConfigError.
    """
    if config.kind == "mlp":
        return config
    reward = config.reward
    return dataclasses.replace(
        config,
        **{role: _with_model(getattr(config, role), role, sources) for role in _OWN},
        reward=_with_model(reward, "reward", sources)
        if isinstance(reward, RewardConfig)
        else {name: _with_model(block, f"reward.{name}", sources) for name, block in reward.items()},
    )


def _with_model(block: _Block, key: str, sources: Mapping[str, Source]) -> _Block:
    if isinstance(block, RewardConfig) and block.kind != "model":
        return dataclasses.replace(block, model=None)  # a function or an endpoint needs no folder
    keys = block.model if isinstance(block.model, Mapping) else None
    return dataclasses.replace(block, model=_with_keys(keys, f"{key}.model.path", sources))


def _with_keys(
    model: Mapping[str, object] | None, key: str, sources: Mapping[str, Source]
) -> Mapping[str, object] | None:
    """The model with an absolute path and the keys of its config.json; as it is where it has no path."""
    path = (model or {}).get("path")
    if model is None or path is None:
        return model
    folder = Path(str(path)).expanduser().resolve()
    if not folder.is_dir() and "model_type" in model:
        return {**model, "path": str(folder)}
    return {**model, **_config_json(folder, str(path), key, sources), "path": str(folder)}


def _config_json(folder: Path, written: str, key: str, sources: Mapping[str, Source]) -> Mapping[str, object]:
    if not folder.is_dir():
        raise ConfigError([no_folder(folder, written, sources, key)])
    keys = _json(folder / "config.json")
    if keys is None or "model_type" not in keys:
        why = f"{folder} has no config.json" if keys is None else f"{folder / 'config.json'} names no model_type"
        raise ConfigError([not_a_model("is not the folder of a Hugging Face model", written, why, _GET, sources, key)])
    return keys


def _json(file: Path) -> Mapping[str, object] | None:
    """None where there is no such file, or not a block of keys in it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, Mapping) else None


def no_folder(folder: Path, written: str, sources: Mapping[str, Source], key: str = _PATH) -> Problem:
    return Problem(
        code="no-model-folder",
        key=key,
        what="there is no such folder",
        got=written,
        source=source_of(key, sources),
        why=f"the model and its tokenizer are read from {folder}",
        fix=_GET if key == _PATH else "path: <the folder of a Hugging Face model>",
    )


def not_a_model(what: str, got: str, why: str, fix: str, sources: Mapping[str, Source], key: str = _PATH) -> Problem:
    return Problem(code="not-a-model", key=key, what=what, got=got, source=source_of(key, sources), why=why, fix=fix)
