"""A head of a model's own beside a config that ties it to the embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlplace.models.tied_heads import head_problems

EMBEDDING = np.arange(40_000, dtype=np.float32).reshape(400, 100)
OTHER = EMBEDDING + 1
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("config", "head", "is_problem"),
    [
        (TIED, OTHER, True),
        ({"text_config": TIED}, OTHER, True),
        ({"text_config": TIED, "model_type": "qwen3_vl"}, OTHER, False),
        ({**TIED, "model_type": "qwen3_vl"}, OTHER, True),
        (TIED, EMBEDDING, False),
        (TIED, None, False),
        # Tokens of another number, which other checks report
        (TIED, OTHER[:300], False),
        ({"tie_word_embeddings": False}, OTHER, False),
        ({}, OTHER, False),
    ],
)
@pytest.mark.parametrize("files", [1, 2])
def test_a_head_that_would_be_left_out_is_told(
    tmp_path: Path,
    config: dict[str, Any],
    head: Any,
    is_problem: bool,
    files: int,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {"model.embed_tokens.weight": EMBEDDING}
    if head is not None:
        weights["lm_head.weight"] = head
    if files == 1:
        save_file(weights, tmp_path / "model.safetensors")
    else:
        for name, weight in weights.items():
            save_file({name: weight}, tmp_path / f"{name}.safetensors")
        index = {"weight_map": {name: f"{name}.safetensors" for name in weights}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = [problem.code for problem in head_problems(tmp_path)]
    assert found == (["two-heads"] if is_problem else [])


def test_a_folder_without_a_config_has_no_head(tmp_path: Path) -> None:
    assert list(head_problems(tmp_path)) == []
