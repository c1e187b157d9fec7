"""The folder of a language-model job's model, as far as a plan needs it: the keys of its config.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from rlplace.errors import ConfigError, Problem, Source
from rlplace.llm_config import LlmConfig
from rlplace.placement.written import source_of

_PATH = "model.path"
_GET = "scripts/get_model smollm2        (or the folder of another Hugging Face model)"


def with_folder(config: LlmConfig, sources: Mapping[str, Source]) -> LlmConfig:
    """The config with an absolute `model.path` and the keys of the folder's config.json, which count.

    A plan needs no folder where the keys of config.json are written in the config. Raises ConfigError.
    """
    path = (config.model or {}).get("path")
    if path is None:
        return config
    assert config.model is not None
    folder = Path(str(path)).expanduser().resolve()
    if not folder.is_dir() and "model_type" in config.model:
        return dataclasses.replace(config, model={**config.model, "path": str(folder)})
    keys = _config_json(folder, str(path), sources)
    return dataclasses.replace(config, model={**config.model, **keys, "path": str(folder)})


def _config_json(folder: Path, written: str, sources: Mapping[str, Source]) -> Mapping[str, object]:
    if not folder.is_dir():
        raise ConfigError([no_folder(folder, written, sources)])
    keys = _json(folder / "config.json")
    if keys is None or "model_type" not in keys:
        why = f"{folder} has no config.json" if keys is None else f"{folder / 'config.json'} names no model_type"
        raise ConfigError([not_a_model("is not the folder of a Hugging Face model", written, why, _GET, sources)])
    return keys


def _json(file: Path) -> Mapping[str, object] | None:
    """None where there is no such file, or not a block of keys in it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, Mapping) else None


def no_folder(folder: Path, written: str, sources: Mapping[str, Source]) -> Problem:
    return Problem(
        code="no-model-folder",
        key=_PATH,
        what="there is no such folder",
        got=written,
        source=source_of(_PATH, sources),
        why=f"the model and its tokenizer are read from {folder}",
        fix=_GET,
    )


def not_a_model(what: str, got: str, why: str, fix: str, sources: Mapping[str, Source]) -> Problem:
    source = source_of(_PATH, sources)
    return Problem(code="not-a-model", key=_PATH, what=what, got=got, source=source, why=why, fix=fix)
