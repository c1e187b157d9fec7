"""Models by the names under which they are published: the keys of their config.json, so that a plan can count them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplace.imports.settings import read_mapping

_CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "model"
_SHIPPED = {r"llama-?3(\.\d)?-8b": "llama_3_8b", r"llama-?3(\.\d)?-70b": "llama_3_70b", r"smollm2-135m": "smollm2"}


def shape_of(name: str) -> Mapping[str, object] | None:
    """The keys of a model by a part of its name, as in `org/Llama-3-8b-sft`; None for a model that is not known."""
    for pattern, file in _SHIPPED.items():
        if re.search(pattern, name.lower()):
            return {key: value for key, value in shipped(file).items() if key not in ("kind", "path")}
    shapes: dict[str, dict[str, object]] = tomllib.loads(
        Path(__file__).with_name("rules").joinpath("models.toml").read_text(encoding="utf-8")
    )
    return next((keys for pattern, keys in shapes.items() if re.search(pattern, name.lower())), None)


def shipped(file: str) -> dict[str, Any]:
    """The keys of a model in configs/model."""
    return read_mapping((_CONFIGS / f"{file}.yaml").read_text(encoding="utf-8"))
