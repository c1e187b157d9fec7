"""Files of a model's folder that are not whole: found by their headers, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlplace.models.heads import INDEX, SINGLE, unread_weights, weight_shapes


def saved(folder: Path, *names: str) -> Path:
    """One file for each weight, and the index."""
    for number, name in enumerate(names):
        save_file({name: torch.zeros(3)}, folder / f"{number}.safetensors")
    weight_map = {name: f"{number}.safetensors" for number, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_whole_files_and_one_file_alone(tmp_path: Path) -> None:
    assert unread_weights(tmp_path) == f"it has neither {SINGLE} nor {INDEX}"
    save_file({"one": torch.zeros(3)}, tmp_path / SINGLE)
    assert unread_weights(tmp_path) is None
    assert unread_weights(saved(tmp_path, "one", "two")) is None


@pytest.mark.parametrize("size", [0, 7, 8, 40, -1])
def test_a_file_that_is_cut_short(tmp_path: Path, size: int) -> None:
    file = saved(tmp_path, "one", "two") / "1.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "cut short" in str(unread_weights(tmp_path))
    assert str(file) in str(unread_weights(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("1.safetensors", None, "1.safetensors is missing"),
        (
            "1.safetensors",
            b"version https://git-lfs.github.com/spec/v1",
            "git lfs pull",
        ),
        (
            "1.safetensors",
            (4).to_bytes(8, "little") + b"{}[]",
            "1.safetensors cannot be read: Extra data",
        ),
        (INDEX, b"{", f"{INDEX} cannot be read: Expecting"),
        (INDEX, b"{}", f"{INDEX} cannot be read: 'weight_map'"),
        (
            INDEX,
            b'{"weight_map": {"six": "1.safetensors"}}',
            f"1.safetensors has no six, which {INDEX} names",
        ),
    ],
)
def test_what_is_missing_or_damaged_is_named(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    file = saved(tmp_path, "one", "two") / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert says in str(unread_weights(tmp_path))


def test_a_file_with_more_than_its_header_says(tmp_path: Path) -> None:
    """Such as two files that were written one behind the other."""
    file = saved(tmp_path, "one", "two") / "1.safetensors"
    file.write_bytes(file.read_bytes() + b"\0" * 8)
    assert "damaged" in str(unread_weights(tmp_path))


@pytest.mark.parametrize(
    "header",
    [[1], {"a": {"shape": [1]}}, {"a": 3}, {"a": {"data_offsets": []}}],
    ids=str,
)
def test_a_header_that_is_none_of_safetensors_is_told(
    tmp_path: Path, header: object
) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert "its header is damaged" in str(unread_weights(tmp_path))
    assert weight_shapes(tmp_path) == {}
