"""Names and shapes of a checkpoint, and what is said of weights that do not have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlplace.workers.engines.weights import EMBEDDING, HEAD, ExpectedWeights, mismatches

NORM = "model.norm.weight"


def weights(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {EMBEDDING: torch.zeros(8, 4, dtype=torch.bfloat16), NORM: torch.zeros(4, dtype=torch.bfloat16)} | more


def problems(expected: ExpectedWeights, given: dict[str, torch.Tensor]) -> list[str]:
    return mismatches(expected.complete(given), expected.shapes, "model")


def folder(path: Path, stored: dict[str, torch.Tensor], tied: bool) -> Path:
    """A checkpoint in one file per weight."""
    for number, (name, weight) in enumerate(stored.items()):
        save_file({name: weight}, path / f"model-{number}.safetensors")
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return path


def test_names_and_shapes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    stored = weights() | {HEAD: torch.ones(8, 4), "layers.0.rotary_emb.inv_freq": torch.zeros(2)}
    expected = ExpectedWeights.of_folder(folder(tmp_path, stored, tied=False))
    assert expected.shapes == {EMBEDDING: (8, 4), NORM: (4,), HEAD: (8, 4)}
    assert not expected.tied
    assert expected.elements == 68
    assert problems(expected, weights(**{HEAD: torch.zeros(8, 4)})) == []
    assert problems(expected, weights()) == [f"{HEAD} is missing"]


@pytest.mark.parametrize("stored_twice", [False, True])
def test_a_tied_head_counts_once_and_may_be_left_out(tmp_path: Path, stored_twice: bool) -> None:
    stored = weights() | ({HEAD: torch.zeros(8, 4)} if stored_twice else {})
    expected = ExpectedWeights.of_folder(folder(tmp_path, stored, tied=stored_twice))
    assert expected.tied
    assert expected.elements == 36
    given = weights()
    assert expected.complete(given)[HEAD] is given[EMBEDDING]
    both = weights(**{HEAD: torch.zeros(8, 4)})
    assert expected.complete(both) is both
    assert problems(expected, given) == []


def test_every_mistake_is_named(tmp_path: Path) -> None:
    expected = ExpectedWeights.of_folder(folder(tmp_path, weights(), tied=True))
    given = {EMBEDDING: torch.zeros(8, 5), "stranger": torch.zeros(1)}
    assert problems(expected, given) == [
        f"{NORM} is missing",
        "stranger is not the model's",
        f"{HEAD} is [8, 5], expected [8, 4]",
        f"{EMBEDDING} is [8, 5], expected [8, 4]",
    ]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="safetensors"):
        ExpectedWeights.of_folder(tmp_path)
