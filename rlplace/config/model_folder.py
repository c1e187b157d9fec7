"""Read the config.json of a language-model job's models: the keys that a plan needs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from rlplace.config.schema import Config, FrozenConfig, RewardConfig, TrainedConfig
from rlplace.errors import ConfigError, Problem, Source, source_of

_Block = TypeVar("_Block", bound=TrainedConfig | FrozenConfig)

_GET = "scripts/get_model smollm2        (or the folder of another Hugging Face model)"


def with_folder(config: Config, sources: Mapping[str, Source]) -> Config:
    """Give every model of the config an absolute path and the keys of its folder's config.json.

    Those of the folder win. No folder is needed where keys of a config.json are written in the config. Raises
    ConfigError.
    """
    if config.kind == "mlp":
        return config
    reward = config.reward
    if isinstance(reward, RewardConfig):
        rewards: RewardConfig | dict[str, RewardConfig] = _with_model(reward, "reward", sources)
    else:
        rewards = {name: _with_model(block, f"reward.{name}", sources) for name, block in reward.items()}
    return dataclasses.replace(
        config,
        actor=_with_model(config.actor, "actor", sources),
        critic=_with_model(config.critic, "critic", sources),
        reference=_with_model(config.reference, "reference", sources),
        reward=rewards,
    )


def _with_model(block: _Block, component: str, sources: Mapping[str, Source]) -> _Block:
    if isinstance(block, RewardConfig) and block.kind != "model":
        return dataclasses.replace(block, model=None)  # a function or an endpoint needs no folder
    model = block.model if isinstance(block.model, Mapping) else None
    if model is None or model.get("path") is None:
        return block
    written, key = str(model["path"]), f"{component}.model.path"
    folder = Path(written).expanduser().resolve()
    if folder.is_dir() or "model_type" not in model:
        try:
            model = {**model, **_config_json(folder, written, key)}
        except ConfigError as error:
            source = source_of(key, sources)
            raise ConfigError([dataclasses.replace(p, source=source) for p in error.problems]) from error
    return dataclasses.replace(block, model={**model, "path": str(folder)})


def _config_json(folder: Path, written: str, key: str) -> Mapping[str, object]:
    if not folder.is_dir():
        raise ConfigError([no_folder(folder, written, key)])
    file = folder / "config.json"
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        keys, why = None, f"{folder} has no config.json"
    else:
        why = f"{file} names no model_type"
    if not isinstance(keys, dict) or "model_type" not in keys:
        raise ConfigError([not_a_model("is not the folder of a Hugging Face model", written, why, _GET, key)])
    return keys


def no_folder(folder: Path, written: str, key: str) -> Problem:
    why = f"the model and its tokenizer are read from {folder}"
    fix = _GET if key == "actor.model.path" else "path: <the folder of a Hugging Face model>"
    return Problem(code="no-model-folder", key=key, what="there is no such folder", got=written, why=why, fix=fix)


def not_a_model(what: str, got: str, why: str, fix: str, key: str) -> Problem:
    return Problem(code="not-a-model", key=key, what=what, got=got, why=why, fix=fix)
