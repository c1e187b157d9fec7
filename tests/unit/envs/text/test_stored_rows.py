"""Rows that stay in their files: memory of a process, files that change meanwhile, the unpacked copy of Parquet."""

from __future__ import annotations

import gc
import json
import pickle
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlplace.envs.text.rows import read_rows
from rlplace.envs.text.stored_rows import MANY, ArrowRows, LineRows, cache_folder
from rlplace.envs.text.tasks import PromptSet
from rlplace.errors import ConfigError, Source

ROWS = MANY + 100


def row(number: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"question {number} " + "x" * 900}]
    return {"prompt": prompt, "answer": str(number), "level": number % 3}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row(n))}\n" for n in range(ROWS)))
    return file


@pytest.fixture
def packed(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Parquet file with the same rows, and an empty cache folder."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "rows.parquet"
    table = pyarrow.Table.from_pylist([row(n) for n in range(ROWS)])
    parquet.write_table(table, file, row_group_size=3_000)
    return file


def held(file: Path) -> int:
    """Bytes of Python that a task holds for its rows."""
    gc.collect()
    tracemalloc.start()
    try:
        task = PromptSet(seed=0, split="train", path=str(file))
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        assert task.size == ROWS
        return size
    finally:
        tracemalloc.stop()


def told(task: PromptSet, number: int) -> tuple[Any, Any, int | None]:
    episode = task.episode(number)
    return episode.prompt, episode.facts(), task.place(number).line


def test_rows_of_lines_are_not_held_in_memory(lines: Path) -> None:
    # Rows are about 1,000 bytes, as Python objects more
    assert lines.stat().st_size > 1_000 * 9_000
    assert held(lines) < 100 * ROWS


def test_rows_of_parquet_are_not_held_in_memory(packed: Path) -> None:
    assert held(packed) < 100 * ROWS


def test_rows_are_the_same_in_any_file(lines: Path, packed: Path) -> None:
    for numbers in ([0, 1, 2_999, 3_000, ROWS - 1], range(0, ROWS, 997)):
        one = PromptSet(seed=0, split="train", path=str(lines))
        other = PromptSet(seed=0, split="train", path=str(packed))
        assert one.size == other.size == ROWS
        for number in numbers:
            assert told(one, number)[:2] == told(other, number)[:2]
            assert one.episode(number).facts()["answer"] == str(number)


def test_a_part_of_the_rows_and_several_files(lines: Path, packed: Path) -> None:
    part = PromptSet(seed=0, split="train", path=str(lines), rows=(5, 9))
    assert part.size == 4
    assert [told(part, n)[2] for n in range(4)] == [6, 7, 8, 9]
    last = PromptSet(seed=0, split="train", path=str(lines), rows=(-2, ROWS))
    assert [last.episode(n).facts()["answer"] for n in range(2)] == [
        str(ROWS - 2),
        str(ROWS - 1),
    ]
    both = PromptSet(seed=0, split="train", path=[str(lines), str(packed)], rows=(0, 3))
    assert [both.episode(n).facts()["answer"] for n in range(6)] == [*"012012"]


def test_sequences_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n  \n{"a": 2}\r\n{"a": 3}')
    rows = read_rows(str(file))
    assert [(values["a"], place.line) for values, place in rows] == [
        (1, 1),
        (2, 4),
        (3, 5),
    ]
    assert rows[-1] == rows[2]
    assert rows[1:] == [rows[1], rows[2]]
    with pytest.raises(IndexError):
        rows[3]
    assert pickle.loads(pickle.dumps(rows))[1] == rows[1]


def test_lines_may_be_added_and_none_may_change(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n')
    rows = read_rows(str(file))
    with file.open("a") as more:
        more.write('{"a": 3}\n')
    assert len(rows) == 2
    assert rows[1][0] == {"a": 2}
    file.write_text('{"a": 1}\n{"a": 7}\n')
    assert rows[0][0] == {"a": 1}
    with pytest.raises(ConfigError) as caught:
        rows[1]
    (found,) = caught.value.problems
    assert found.code == "no-dataset"
    assert "changed" in found.what
    assert str(found.source) == f"{file}:2"


def test_a_line_is_parsed_when_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("a\nb\n")
    parsed: list[bytes] = []

    def parse(line: bytes, place: Source) -> Mapping[str, Any]:
        parsed.append(line)
        return {"line": place.line}

    rows = LineRows(file, parse)
    assert parsed == []
    assert rows[1][0] == {"line": 2}
    assert parsed == [b"b\n"]


def test_a_large_parquet_file_is_unpacked_once(packed: Path) -> None:
    first = read_rows(str(packed))
    (unpacked,) = cache_folder().glob("*")
    assert unpacked.suffix == ".arrow"
    written = unpacked.stat()
    assert read_rows(str(packed))[7] == first[7]
    assert unpacked.stat().st_ino == written.st_ino
    # Another content has a file of its own
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(packed)
    parquet.write_table(table.slice(0, ROWS - 1), packed)
    assert len(read_rows(str(packed))) == ROWS - 1
    assert len(list(cache_folder().glob("*"))) == 2


@pytest.mark.parametrize("broken", ["damaged", "no folder"])
def test_without_the_unpacked_file_rows_are_in_memory(
    packed: Path, broken: str
) -> None:
    expected = read_rows(str(packed))[MANY]
    (unpacked,) = cache_folder().glob("*")
    if broken == "damaged":
        unpacked.write_bytes(b"no arrow" * 9)
    else:
        unpacked.unlink()
        cache_folder().rmdir()
        cache_folder().write_text("no folder")
    rows = read_rows(str(packed))
    assert isinstance(rows, ArrowRows)
    assert rows[MANY] == expected
    assert len(rows) == ROWS
