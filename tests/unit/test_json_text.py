"""Files and requests that are no JSON: each reader names the file and says why, whatever the damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlplace.checkpoints import report_written, written
from rlplace.checkpoints.checkpoint import RUN, Checkpoint
from rlplace.cli.train import _table
from rlplace.config.compose import Composed
from rlplace.errors import ConfigError
from rlplace.json_text import parsed, parsed_object, read_object
from rlplace.models.checkpoint import Checkpoint as ModelFiles
from rlplace.models.vision import VisionSpec
from rlplace.placement.memory import families
from rlplace.report.trackers import pages
from rlplace.workers.engines.weights import ExpectedWeights

DAMAGED = {
    "cut": b'{"a": {"b": [1, 2',
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep-objects": b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
    "bytes": b'{"a": "\xff\xfe"}',
    "empty": b"",
    "long-number": b'{"a": ' + b"1" * 5000 + b"}",
}
OTHERS = {"list": b"[1, 2]", "text": b'"abc"', "null": b"null"}
EACH = pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)


@EACH
def test_a_damaged_text_is_a_value_error_with_a_reason(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parsed(text)
    assert "recursion" not in str(caught.value)


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_another_value_is_no_object(text: bytes) -> None:
    assert parsed(text) == json.loads(text)
    with pytest.raises(ValueError, match="not an object"):
        parsed_object(text)


def test_pairs_make_the_objects() -> None:
    assert parsed('{"a": 1, "a": 2}', tuple) == (("a", 1), ("a", 2))


@pytest.mark.parametrize(
    "text", [*DAMAGED.values(), *OTHERS.values()], ids=[*DAMAGED, *OTHERS]
)
def test_the_error_about_a_file_names_it(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "some.json"
    with pytest.raises(FileNotFoundError):
        read_object(file, "actor.model.path")
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"some\.json") as caught:
        read_object(file, "actor.model.path")
    assert caught.value.codes == ("damaged-json",)
    assert caught.value.problems[0].key == "actor.model.path"


# ── the readers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def model(folder: Path) -> Path:
    save_file({"a": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    return folder


def _vision(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    VisionSpec.of(folder, cast("Any", None))


def _images(folder: Path, text: bytes) -> None:
    keys = {"vision_config": {}, "image_token_id": 3}
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    (folder / "preprocessor_config.json").write_bytes(text)
    VisionSpec.of(folder, cast("Any", None))


def _expected_weights(folder: Path, text: bytes) -> None:
    (model(folder) / "config.json").write_bytes(text)
    ExpectedWeights.of_folder(folder)


def _index(folder: Path, text: bytes) -> None:
    (model(folder) / "model.safetensors.index.json").write_bytes(text)
    ModelFiles(folder)


def _run_of_checkpoint(folder: Path, text: bytes) -> None:
    (folder / RUN).write_bytes(text)
    checkpoint = Checkpoint(
        folder=folder,
        iteration=1,
        version=1,
        score=None,
        ranks={},
        libraries={},
        files={},
    )
    checkpoint.values(RUN)


def _summary(folder: Path, text: bytes) -> None:
    (folder / "summary.json").write_bytes(text)
    composed = cast("Composed", type("Words", (), {"words": ()}))
    _table([(composed, folder)])


@EACH
@pytest.mark.parametrize(
    ("read", "name"),
    [
        (_vision, "config.json"),
        (_images, "preprocessor_config.json"),
        (_expected_weights, "config.json"),
        (_index, "model.safetensors.index.json"),
        (_run_of_checkpoint, RUN),
        (_summary, "summary.json"),
    ],
)
def test_each_reader_has_an_error_that_names_the_file(
    tmp_path: Path, read: Callable[[Path, bytes], None], name: str, text: bytes
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / name) in str(caught.value)


@EACH
def test_a_damaged_report_of_a_rank_is_named(tmp_path: Path, text: bytes) -> None:
    report_written(tmp_path, 0, [])
    assert written(tmp_path, 1) == {}
    (tmp_path / "rank_00000.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"rank_00000\.json"):
        written(tmp_path, 1)


@EACH
def test_a_damaged_note_of_a_tracker_does_not_hide_the_others(
    tmp_path: Path, text: bytes
) -> None:
    folder = tmp_path / "trackers"
    folder.mkdir()
    (folder / "a.json").write_bytes(text)
    (folder / "b.json").write_text('{"page": "https://b"}', encoding="utf-8")
    damaged, whole = pages(tmp_path)
    assert str(folder / "a.json") in damaged
    assert whole == "https://b"


@EACH
def test_a_damaged_description_of_a_model_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    made: list[str] = []

    def ask(keys: str) -> dict[str, Any]:
        made.append(keys)
        return {"family": "x"}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(families, "_ask", ask)
    families._kept.cache_clear()
    assert families._kept("{}") == {"family": "x"}
    (file,) = (tmp_path / "rlplace" / "models").iterdir()
    file.write_bytes(text)
    for _ in range(2):
        families._kept.cache_clear()
        assert families._kept("{}") == {"family": "x"}
    assert len(made) == 2
    families._kept.cache_clear()
