"""Files that a run reads, and what has changed of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlplace.runtime import inputs


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules: `graders_of_mine.score` imports `graders_of_mine.words` and `table_of_mine`."""
    package = tmp_path / "graders_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "score.py").write_text(
        "import json\nfrom . import words\n\n"
        "def reward(transcript):\n    import table_of_mine\n    return 1.0\n"
    )
    (package / "words.py").write_text("import rlplace\nWORDS = ()\n")
    (package / "other.py").write_text("")
    (tmp_path / "table_of_mine.py").write_text("TABLE = {}\n")
    (tmp_path / "rlplace.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if "_of_mine" in name]:
        del sys.modules[name]


def config(folder: Path, **env: Any) -> dict[str, Any]:
    return {
        "env": {"rewards": [{"name": "graders_of_mine.score:reward"}], **env},
        "runner": {"callbacks": ["graders_of_mine.other:Call"]},
        "cluster": {"path": str(folder)},
    }


def test_code_is_read_with_what_it_imports_of_the_same_place(code: Path) -> None:
    found = inputs.inputs_of(config(code))
    assert list(found) == ["env.rewards.name"]
    assert sorted(found["env.rewards.name"]) == [
        "graders_of_mine/__init__.py",
        "graders_of_mine/score.py",
        "graders_of_mine/words.py",
        "table_of_mine.py",
    ]


def test_a_changed_import_is_named(code: Path) -> None:
    before = json.loads(inputs.written(inputs.inputs_of(config(code))))
    assert inputs.changes(before, inputs.inputs_of(config(code))) == {}
    (code / "table_of_mine.py").write_text("TABLE = {1}\n")
    (code / "graders_of_mine" / "words.py").write_text("import rlplace\nWORDS = [)\n")
    (change,) = inputs.changes(before, inputs.inputs_of(config(code))).values()
    assert change.what == (
        "graders_of_mine/words.py has other content, table_of_mine.py has 12 bytes instead of 11"
    )


def test_code_of_libraries_is_left_out() -> None:
    mapping = {"env": {"wrappers": ["json.decoder:JSONDecoder", "yaml:Loader", "no:A"]}}
    assert inputs.inputs_of(mapping) == {}


def test_data_sets_are_read_by_path_and_with_weights(tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text("{}")
    other = tmp_path / "other"
    (other / "train").mkdir(parents=True)
    (other / "train" / "rows.arrow").write_text("rows")
    (other / ".cache").write_text("")
    kwargs = {"path": {str(one): 0.5, str(other): 1}, "prompt": "question"}
    found = inputs.inputs_of({"env": {"kwargs": kwargs, "task": "prompts"}})
    assert sorted(found["env.kwargs.path"]) == ["one.jsonl", "train/rows.arrow"]
    alone = inputs.inputs_of({"env": {"kwargs": {"path": str(one)}}})
    one.write_text("{1}")
    again = inputs.inputs_of({"env": {"kwargs": {"path": str(one)}}})
    (change,) = inputs.changes(alone, again).values()
    assert change == inputs.Change(
        file="one.jsonl", what="one.jsonl has 3 bytes instead of 2"
    )


def test_the_folder_of_a_model_counts_without_folders_in_it(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "metrics.jsonl").write_text("")
    (tmp_path / "config.json").write_text(json.dumps({}))
    found = inputs.inputs_of({"actor": {"model": {"path": str(tmp_path)}}})
    assert list(found["actor.model.path"]) == ["config.json"]


def test_large_files_are_compared_by_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_WHOLE_BYTES", 1_500)
    monkeypatch.setattr(inputs, "_BLOCKS", 4)
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 10)
    mapping = {"actor": {"model": {"path": str(tmp_path)}}}
    whole = tmp_path / "a.safetensors"
    blocks = tmp_path / "b.safetensors"
    whole.write_bytes(bytes(1_000))
    blocks.write_bytes(bytes(1_000))
    before = inputs.inputs_of(mapping)

    def changed(file: Path, place: int) -> bool:
        content = bytearray(1_000)
        content[place] = 1
        file.write_bytes(content)
        found = inputs.changes(before, inputs.inputs_of(mapping))
        file.write_bytes(bytes(1_000))
        return "actor.model.path" in found

    assert [changed(whole, place) for place in (0, 500, 999)] == [True] * 3
    assert [changed(blocks, place) for place in (0, 500, 999)] == [True, False, True]


def test_many_changes_are_cut_short() -> None:
    before = {"env.kwargs.path": {f"{n}.txt": "1 a" for n in range(6)}}
    now = {"env.kwargs.path": {"0.txt": "1 b", "new.txt": "1 a"}}
    (change,) = inputs.changes(before, now).values()
    assert change.what.endswith("3.txt is gone, 3 more")
