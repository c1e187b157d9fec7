"""Weights of layers that a model's config does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlplace.models.unused_layers import WARNING, layer_problems

_OF_TEXT = "model.layers.{}.mlp.up_proj.weight"


def folder(path: Path, config: dict[str, Any], *names: str) -> Path:
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: np.zeros(2) for name in names}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("config", "name", "stored"),
    [
        ({"num_hidden_layers": 2}, _OF_TEXT.format(2), 3),
        ({"num_hidden_layers": 2}, _OF_TEXT.format(1), None),
        ({"n_layer": 2}, "transformer.h.5.mlp.c_fc.weight", 6),
        (
            {"text_config": {"num_hidden_layers": 2}},
            "language_model.model.layers.1.mlp.up_proj.weight",
            None,
        ),
        (
            {"text_config": {"num_hidden_layers": 2}},
            "model.language_model.layers.27.mlp.up_proj.weight",
            28,
        ),
        # Layers that read images, and one that predicts a further token
        ({"num_hidden_layers": 2}, "model.visual.blocks.31.attn.qkv.weight", None),
        ({"num_hidden_layers": 2}, "vision_tower.encoder.layers.26.fc1.weight", None),
        (
            {"num_hidden_layers": 2, "num_nextn_predict_layers": 1},
            _OF_TEXT.format(2),
            None,
        ),
        ({}, _OF_TEXT.format(2), None),
    ],
)
def test_layers_beyond_those_of_the_config_are_told(
    tmp_path: Path, config: dict[str, Any], name: str, stored: int | None
) -> None:
    found = list(layer_problems(folder(tmp_path, config, _OF_TEXT.format(0), name)))
    if stored is None:
        assert found == []
        return
    (problem,) = found
    assert (problem.code, problem.key) == (WARNING, "actor.model.path")
    assert f"weights of {stored} layers, and config.json says 2" in problem.what


def test_a_folder_without_files_has_no_layers(tmp_path: Path) -> None:
    assert list(layer_problems(tmp_path)) == []
