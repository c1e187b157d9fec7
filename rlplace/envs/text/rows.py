"""Reads the rows of a data set into memory, each with the place where it stands, for errors to name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplace.errors import ConfigError, Problem, Source

_KEY = "env.kwargs.path"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    values: Mapping[str, Any]
    place: Source  # the line of a file; in binary files the number of the row


def read_rows(path: str, dataset_split: str | None = None) -> list[Row]:
    """By what the path is: *.jsonl, *.parquet, or a folder written by `datasets`' save_to_disk.

    Raises ConfigError: nothing there, a line that is no JSON object, a file of another kind, a library missing.
    """
    file = Path(path)
    if not file.exists():
        raise ConfigError([_problem("no-dataset", "there is nothing at this path", path, why=_nearest(file))])
    if file.is_dir():
        return _saved(file, dataset_split)
    if file.suffix in (".jsonl", ".json"):
        return _json_lines(file)
    if file.suffix == ".parquet":
        return _parquet(file)
    why = "data sets are read from *.jsonl, from *.parquet, and from a folder written by save_to_disk"
    raise ConfigError([_problem("no-dataset", "a file of this kind is no data set", path, why=why)])


def _json_lines(file: Path) -> list[Row]:
    rows: list[Row] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = Source(file=str(file), line=number)
            try:
                values = json.loads(line)
            except ValueError as error:  # of JSON or of UTF-8
                raise ConfigError([_malformed(line, place, f"JSON says: {error}")]) from error
            if not isinstance(values, dict):
                raise ConfigError([_malformed(line, place, 'a line is one object: {"prompt": ..., "answer": ...}')])
            rows.append(Row(values, place))
    return rows


def _parquet(file: Path) -> list[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError([_missing(str(file), error)]) from error
    try:
        table = parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        why = f"pyarrow says: {error}"
        raise ConfigError([_problem("no-dataset", "the file is not Parquet", str(file), why=why)]) from error
    return _numbered(table.to_pylist(), str(file))


def _saved(folder: Path, split: str | None) -> list[Row]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError([_missing(str(folder), error)]) from error
    try:
        found = datasets.load_from_disk(str(folder))
    except FileNotFoundError as error:
        why = "a folder is read as what `datasets` writes with save_to_disk"
        raise ConfigError([_problem("no-dataset", "the folder is no data set", str(folder), why=why)]) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            why = "it has the splits " + ", ".join(found)
            fix = f"kwargs: {{dataset_split: {next(iter(found), 'train')}}}"
            what = "the data set has several splits" if split is None else f"the data set has no split {split!r}"
            raise ConfigError([_problem("no-dataset", what, str(folder), why=why, fix=fix)])
        found = found[split]
    return _numbered(found.to_list(), str(folder))


def _numbered(values: list[dict[str, Any]], path: str) -> list[Row]:
    return [Row(value, Source(file=f"{path}, row", line=number)) for number, value in enumerate(values, start=1)]


def _problem(code: str, what: str, path: str, *, why: str | None, fix: str | None = None) -> Problem:
    return Problem(code=code, key=_KEY, what=what, got=path, why=why, fix=fix or "path: <a data set>")


def _malformed(line: bytes, place: Source, why: str) -> Problem:
    got = line.decode("utf-8", "replace").strip()[:200]
    fix = "correct or remove the line"
    return Problem(code="bad-row", key=_KEY, what="a line is no row", got=got, source=place, why=why, fix=fix)


def _nearest(file: Path) -> str:
    folder = next(parent for parent in file.absolute().parents if parent.is_dir())
    return f"paths count from {Path.cwd()}; what exists of it is {folder}"


def _missing(path: str, error: ModuleNotFoundError) -> Problem:
    return Problem(
        code="missing-library",
        key="env.task",
        what="a library that reads this data set is not installed",
        got=path,
        why=f"there is no module {error.name}",
        fix="pip install 'rlplace[text]'",
    )
