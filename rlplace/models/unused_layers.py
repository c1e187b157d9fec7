"""Warns of a model whose files have weights of more layers than its config says: the others would be left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplace.codes import problem
from rlplace.errors import ConfigError, Problem
from rlplace.json_text import read_object
from rlplace.models.heads import weight_shapes

# Code of the warning
WARNING = "unused-layers"
# A weight of the layers that read text; images have layers of other names
_LAYER = re.compile(r"(?:model\.|language_model\.|transformer\.)*(?:layers|h)\.(\d+)\.")
# Keys of config.json: the number of layers, and the number of those that predict further tokens, which are not used
_LAYERS = ("num_hidden_layers", "n_layer")
_FURTHER = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def layer_problems(folder: Path, key: str = "actor.model.path") -> Iterator[Problem]:
    """Yield a warning if the files of a model have more layers than its config.json says.

    The model would be made of the first layers alone. `folder`: the model's folder. `key`: the config key that names
    it.
    """
    try:
        config = read_object(folder / "config.json", key)
    # Other checks report a file that is missing or damaged
    except (ConfigError, OSError):
        return
    text = config.get("text_config", config)
    layers = _first_number(text, _LAYERS)
    if layers is None:
        return
    matches = map(_LAYER.match, weight_shapes(folder))
    numbers = [int(match[1]) for match in matches if match is not None]
    stored = max(numbers, default=-1) + 1
    if stored > layers + (_first_number(text, _FURTHER) or 0):
        yield problem(
            WARNING,
            key,
            str(folder),
            stored=stored,
            layers=layers,
            file=folder / "config.json",
        )


def _first_number(config: Any, keys: tuple[str, ...]) -> int | None:
    """Return the value of the first of `keys` that is a whole number in a config; None without one."""
    if not isinstance(config, dict):
        return None
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    return None
