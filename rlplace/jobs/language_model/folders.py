"""Complete a config with what the folders of its language models say of them."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlplace.codes import config_error
from rlplace.config.blocks.language_model import (
    FrozenConfig,
    LanguageModelJobConfig,
    RewardConfig,
)
from rlplace.config.blocks.training import ActorConfig, TrainedConfig
from rlplace.config.model_folder import instead_of, model_folder, no_folder
from rlplace.errors import ConfigError, Source, source_of
from rlplace.json_text import parsed
from rlplace.models.adapter_folder import read_adapter
from rlplace.models.folders import existing_folder

_Block = TypeVar("_Block", bound=TrainedConfig | FrozenConfig)


def with_folder(
    config: LanguageModelJobConfig, sources: Mapping[str, Source]
) -> LanguageModelJobConfig:
    """Return a copy of the config in which each language model has the keys of its config.json, and an absolute path.

    An actor that begins with an adapter gets rank, alpha and targets of the adapter. Keys of config.json override keys
    of the config. The folder may be missing if the config itself describes the model (`model_type`). `sources`: config
    key -> file and line in which its value is set. Raises ConfigError.
    """
    reward = config.reward
    if isinstance(reward, RewardConfig):
        rewards: RewardConfig | dict[str, RewardConfig] = _with_model(
            reward, "reward", sources
        )
    else:
        rewards = {
            name: _with_model(block, f"reward.{name}", sources)
            for name, block in reward.items()
        }
    return dataclasses.replace(
        config,
        actor=_with_adapter(_with_model(config.actor, "actor", sources), sources),
        critic=_with_model(config.critic, "critic", sources),
        reference=_with_model(config.reference, "reference", sources),
        teacher=_with_model(config.teacher, "teacher", sources),
        reward=rewards,
    )


def _with_model(block: _Block, component: str, sources: Mapping[str, Source]) -> _Block:
    if isinstance(block, RewardConfig) and block.kind != "model":
        # A function or an endpoint needs no folder
        return dataclasses.replace(block, model=None)
    model = block.model if isinstance(block.model, Mapping) else None
    if model is None or model.get("path") is None:
        return block
    written = str(model["path"])
    key = f"{component}.model.path"
    folder = model_folder(written)
    if os.path.isdir(folder) or "model_type" not in model:
        read = _config_json(folder, written, key, source_of(key, sources))
        # A shipped model, for example, where the written keys say nothing about the model.
        other = model.get("model_type") not in (
            None,
            read["model_type"],
        )
        model = {
            **{
                n: value
                for n, value in model.items()
                if not other or n in ("kind", "path")
            },
            **read,
        }
    return dataclasses.replace(block, model={**model, "path": str(folder)})


def _with_adapter(actor: ActorConfig, sources: Mapping[str, Source]) -> ActorConfig:
    """Return the actor's block with rank, alpha and targets of the adapter that it begins with, if it names one.

    Raises ConfigError if training cannot start from the adapter, or if the block sets another rank, alpha or targets.
    """
    base = existing_folder(actor.language_model)
    if actor.lora_adapter is None or base is None:
        return actor
    key = "actor.lora_adapter"
    adapter = read_adapter(actor.lora_adapter, base, key, source_of(key, sources))
    read: dict[str, Any] = {
        "lora_rank": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_targets": adapter.targets,
    }
    # What the config says besides must be the same
    usual = ActorConfig()
    for name, value in read.items():
        written = getattr(actor, name)
        set_here = written != getattr(usual, name)
        if name == "lora_targets":
            written = tuple(sorted(written))
        if set_here and written != value:
            other = f"actor.{name}"
            raise config_error(
                "unfit-adapter",
                other,
                _as_yaml(written),
                error="other-value",
                source=source_of(other, sources),
                name=name,
                adapter=adapter.folder,
                value=_as_yaml(value),
            )
    return dataclasses.replace(actor, **read, lora_adapter=str(adapter.folder))


def _as_yaml(value: float | tuple[str, ...]) -> str:
    """Return a number, or a list of names, as it stands in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return f"{value:g}"


def _config_json(
    folder: Path, written: str, key: str, source: Source | None
) -> Mapping[str, object]:
    # Whatever the text is; a name that is too long is no folder either.
    if not os.path.isdir(folder):
        raise ConfigError([no_folder(written, key, source)])
    file = folder / "config.json"
    if (folder / "adapter_config.json").exists() and not file.exists():
        merged = f"{written.rstrip('/')}-merged"
        raise config_error(
            "not-a-model",
            key,
            written,
            error="adapter",
            source=source,
            folder=folder,
            command=shlex.join(["scripts/merge_adapter", written, merged]),
            merged=merged,
        )
    reason = None
    try:
        keys = parsed(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        keys = None
        which = "no-config-json"
    except (OSError, ValueError) as error:
        keys = None
        which = "unread-config"
        reason = str(error)
    else:
        which = "no-type"
    if not isinstance(keys, dict) or "model_type" not in keys:
        raise config_error(
            "not-a-model",
            key,
            written,
            error=which,
            source=source,
            folder=folder,
            file=file,
            reason=reason,
            instead=instead_of(folder),
        )
    return keys
