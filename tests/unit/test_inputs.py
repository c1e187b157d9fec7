"""Files that a run reads, and what has changed of them."""

from __future__ import annotations

import json
import os
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


def test_only_what_certainly_is_a_file_or_folder_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.jsonl").write_text("")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "metrics.jsonl").write_text("")
    (tmp_path / "robot.xml").write_text("")
    (tmp_path / "human").write_text("")
    kwargs = {
        "mode": ".",
        "above": "..",
        "split": "train",
        "render_mode": "human",
        "prompt": "a long text. " * 1_000 + "/",
        "odd": "nothing\0.txt",
        "log_dir": "train",
        "output_file": "robot.xml",
    }
    runner = {"output_dir": "runs"}
    mapping = {"env": {"kwargs": kwargs}, "runner": runner}
    assert inputs.inputs_of(mapping) == {}
    # By the name of the key, or as a file with a suffix
    kwargs |= {"data_dir": "train", "xml": "robot.xml", "meshFile": "human"}
    found = inputs.inputs_of(mapping)
    assert {key: list(files) for key, files in found.items()} == {
        "env.kwargs.data_dir": ["a.jsonl"],
        "env.kwargs.xml": ["robot.xml"],
        "env.kwargs.meshFile": ["human"],
    }
    # What the run writes into a folder of data does not count
    whole = {"env": {"kwargs": {"path": "."}}, "runner": runner}
    names = list(inputs.inputs_of(whole)["env.kwargs.path"])
    assert names == ["human", "robot.xml", "train/a.jsonl"]


def test_a_folder_has_bounds_and_they_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_MOST_FILES", 6)
    monkeypatch.setattr(inputs, "_WHOLE_BYTES", 2_000)
    monkeypatch.setattr(inputs, "_MOST_BYTES", 2_500)
    for name in "hgfedcba":
        (tmp_path / name).write_bytes(bytes(1_000))
    mapping = {"env": {"kwargs": {"path": str(tmp_path)}}}
    found = inputs.inputs_of(mapping)
    files = found["env.kwargs.path"]
    # The same ones in every process, whatever the order on the disk
    assert list(files) == list("abcdef")
    read = [name for name, value in files.items() if "not read" not in value]
    assert read == ["a", "b"]
    assert inputs.shown(found) == "env.kwargs.path (the first 6 files, 5.86 KiB)"
    (tmp_path / "f").write_bytes(bytes(1_001))
    (change,) = inputs.changes(found, inputs.inputs_of(mapping)).values()
    assert change.what == "f has 1,001 bytes instead of 1,000"


def test_the_text_about_compared_files_is_short() -> None:
    one = {"a": "1024 hash"}
    assert inputs.shown({}) == ""
    assert inputs.shown({"env.kwargs.path": one}) == "env.kwargs.path (1 file, 1 KiB)"
    many = {f"key{n}": one for n in range(9)}
    assert inputs.shown(many).endswith("key5 (1 file, 1 KiB), 3 more keys")


def test_large_files_are_compared_by_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_WHOLE_MODEL_BYTES", 1_500)
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
        return "actor.model.path" in found and found["actor.model.path"].certain

    assert [changed(whole, place) for place in (0, 500, 999)] == [True] * 3
    assert [changed(blocks, place) for place in (0, 500, 999)] == [True, False, True]


def test_many_changes_are_cut_short() -> None:
    before = {"env.kwargs.path": {f"{n}.txt": "1 a" for n in range(6)}}
    now = {"env.kwargs.path": {"0.txt": "1 b", "new.txt": "1 a"}}
    (change,) = inputs.changes(before, now).values()
    assert change.what.endswith("3.txt is gone, 3 more")


def test_a_large_file_that_was_written_again_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_WHOLE_BYTES", 500)
    monkeypatch.setattr(inputs, "_BLOCKS", 4)
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 10)
    data = tmp_path / "rows.jsonl"
    mapping = {"env": {"kwargs": {"path": str(data)}}}
    data.write_bytes(bytes(1_000))
    before = json.loads(inputs.written(inputs.inputs_of(mapping)))
    assert inputs.changes(before, inputs.inputs_of(mapping)) == {}
    # No compared block has the place of the change
    content = bytearray(1_000)
    content[500] = 1
    data.write_bytes(content)
    os.utime(data, ns=(0, 5))
    (change,) = inputs.changes(before, inputs.inputs_of(mapping)).values()
    assert not change.certain
    assert change.what == (
        "rows.jsonl may have other content: it was written again, and only a part of it is compared"
    )
    # Other bytes within a block
    content[0] = 1
    data.write_bytes(content)
    (change,) = inputs.changes(before, inputs.inputs_of(mapping)).values()
    assert change.certain
    assert change.what == "rows.jsonl has other content"


def test_a_data_set_is_compared_as_a_whole_up_to_gigabytes(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    mapping = {"env": {"kwargs": {"path": str(data)}}}
    with data.open("wb") as content:
        content.truncate(300 << 20)
    before = inputs.inputs_of(mapping)
    with data.open("r+b") as content:
        content.seek(151 << 20)
        content.write(b"x")
    (change,) = inputs.changes(before, inputs.inputs_of(mapping)).values()
    assert change.certain


def test_files_that_code_names_are_told(
    code: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    (code / "graders_of_mine" / "lists").mkdir()
    for name in (
        "graders_of_mine/lists/nouns.txt",
        "graders_of_mine/verbs.txt",
        "graders_of_mine/table.json",
        "runs/log.txt",
        "words",
    ):
        (code / name).write_text("some")
    (code / "graders_of_mine" / "words.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "NOUNS = Path(__file__).parent / 'lists' / 'nouns.txt'\n"
        "VERBS = os.path.join(os.path.dirname(__file__), 'verbs.txt')\n"
        f"TABLE = open({str(code / 'graders_of_mine' / 'table.json')!r}).read()\n"
        "LOG = open('runs/log.txt', 'a')\n"
        "OTHERS = ['words', 'none.txt', 'score.py', 'odd\\0.txt', 'a / long text.']\n"
    )
    mapping = config(code)
    mapping["runner"]["output_dir"] = "runs"
    found = inputs.inputs_of(mapping)
    key = f"env.rewards.name{inputs.NAMED}"
    assert [Path(name).name for name in found[key]] == [
        "table.json",
        "nouns.txt",
        "verbs.txt",
    ]
    # The code may write them itself
    assert not inputs.affects_learning(key)
    (code / "graders_of_mine" / "verbs.txt").write_text("another")
    (code / "graders_of_mine" / "lists" / "nouns.txt").unlink()
    (change,) = inputs.changes(found, inputs.inputs_of(mapping)).values()
    assert change.what == "lists/nouns.txt is gone, verbs.txt has 7 bytes instead of 4"
    for file in ("table.json", "verbs.txt"):
        (code / "graders_of_mine" / file).unlink()
    (change,) = inputs.changes(found, inputs.inputs_of(mapping)).values()
    assert change.what.count("is gone") == 3
