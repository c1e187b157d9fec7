"""Rows of data sets: files of JSON lines, of Parquet, and folders that `datasets` writes."""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlplace.envs.registry import needs
from rlplace.errors import ConfigError, Problem, Source

_KEY = "env.kwargs.path"
ROW = ", row"  # behind the file of a row that has no line
_MOST_OFTEN = 1_000  # that a row is asked in an epoch
_MORE = 8  # places of further bad rows in an error
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")
# Values by column, and the line of the file or the number of the row
Row = tuple[Mapping[str, Any], Source]


def bad_row(
    what: str,
    got: str,
    place: Source,
    why: str,
    fix: str = "correct or remove the line",
) -> ConfigError:
    return ConfigError.of("bad-row", _KEY, what, got[:200], why, fix, source=place)


def mixed(
    path: str | Sequence[str] | Mapping[str, float],
    rows: tuple[int, int] | None,
    split: str | None,
    seed: int,
) -> list[Row]:
    """Return the rows of an epoch. ConfigError as `read_rows`, and for a weight that is no positive number."""
    if isinstance(path, str):
        return _part(path, rows, split)
    epoch: list[Row] = []
    names = _names([*path])
    for one, weight in (
        path if isinstance(path, Mapping) else dict.fromkeys(path, 1.0)
    ).items():
        if not isinstance(weight, int | float) or not 0 < weight <= _MOST_OFTEN:
            what = "a data set has no such weight"
            why = "it is how often each of its rows is asked in an epoch"
            raise _no_data_set(what, f"{one}: {weight!r}", why, f"path: {{{one}: 1}}")
        named = [
            ({"data_set": names[one], **values}, place)
            for values, place in _part(one, rows, split)
        ]
        whole, part = divmod(float(weight), 1.0)
        epoch += named * int(whole) + random.Random(f"{seed}/{one}").sample(
            named, round(part * len(named))
        )
    return epoch


def _names(paths: Sequence[str]) -> dict[str, str]:
    """Name each data set by its file, those whose files have one name by their folders too: gsm8k-train, math-train."""
    found = {one: Path(one).stem for one in dict.fromkeys(paths)}
    for parts in range(2, 1 + max((len(Path(one).parts) for one in paths), default=0)):
        often = Counter(found.values())
        alike = [one for one in found if often[found[one]] > 1]
        found |= {
            one: "-".join([*Path(one).parts[-parts:-1], Path(one).stem])
            for one in alike
        }
    return found


def _part(path: str, rows: tuple[int, int] | None, split: str | None) -> list[Row]:
    if rows is not None and (
        len(rows) != 2 or not all(isinstance(bound, int) for bound in rows)
    ):
        raise ValueError(
            f"rows are two whole numbers, the first row and the one behind the last, got {list(rows)}"
        )
    found = read_rows(path, split)
    if rows is None:
        return found
    return found[rows[0] : rows[1]]


def read_rows(path: str, dataset_split: str | None = None) -> list[Row]:
    """Read *.jsonl, *.parquet, or a folder written by `datasets`' save_to_disk.

    Raises ConfigError: nothing there, a line that is no JSON object, a file of another kind, a library missing.
    """
    file = Path(path)
    # A folder that may not be entered holds nothing, either
    if not os.path.exists(path):
        folder = next(
            parent for parent in file.absolute().parents if os.path.isdir(parent)
        )
        closed = "" if os.access(folder, os.X_OK) else ", which may not be entered"
        why = f"paths count from {Path.cwd()}; what exists of it is {folder}{closed}"
        raise _no_data_set("there is nothing at this path", path, why)
    try:
        if file.is_dir():
            return _saved(file, dataset_split)
        if file.suffix in (".jsonl", ".json"):
            return _json_lines(file)
        if file.suffix == ".parquet":
            return _parquet(file)
    except OSError as error:  # no permission, or a file whose content is damaged
        raise _no_data_set(
            "the data set cannot be read",
            path,
            f"{type(error).__name__}: {error}".strip(),
        ) from error
    why = "data sets are read from *.jsonl, from *.parquet, and from a folder written by save_to_disk"
    raise _no_data_set("a file of this kind is no data set", path, why)


def _json_lines(file: Path) -> list[Row]:
    with file.open("rb") as start:
        if start.read(1 << 10).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            return _json_array(file)
    with file.open("rb") as lines:
        written = (
            (line, Source(file=str(file), line=n))
            for n, line in enumerate(lines, start=1)
            if line.strip()
        )
        return each(written, lambda row: (_json_row(*row), row[1]))


def _json_row(line: bytes, place: Source) -> Mapping[str, Any]:
    shown = line.decode("utf-8", "replace").strip()
    try:
        values = json.loads(line, object_pairs_hook=_of_pairs)
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise bad_row("a line is no row", shown, place, f"JSON: {error}") from error
    if not isinstance(values, dict):
        why = 'a line is one object: {"prompt": ..., "answer": ...}'
        raise bad_row("a line is no row", shown, place, why)
    return _of_text(values, line, place)


def _of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        often = Counter(name for name, _ in pairs)
        raise ValueError(
            f"{max(values, key=often.__getitem__)!r} is there more than once, and all but the last are lost"
        )
    return values


def _of_text(
    values: Mapping[str, Any], written: bytes, place: Source
) -> Mapping[str, Any]:
    """Return the values. Raises ConfigError for half of a character, which only an escape in `written` can be."""
    if b"\\ud" in written.lower():
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            why = r"\ud83d without the \ude00 behind it is half of a character, and no text"
            raise bad_row(
                "a row has half of a character", ascii(values), place, why
            ) from error
    return values


def _json_array(file: Path) -> list[Row]:
    try:
        rows = json.loads(written := file.read_bytes(), object_pairs_hook=_of_pairs)
    except (ValueError, RecursionError) as error:
        place = Source(file=str(file), line=getattr(error, "lineno", 1))
        raise bad_row(
            "the file is no list of rows", str(file), place, f"JSON: {error}"
        ) from error
    return each(
        _numbered(rows, str(file)),
        lambda row: (_entry(row[0], written, row[1]), row[1]),
    )


def _entry(values: object, written: bytes, place: Source) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        why = 'a row is one object: {"prompt": ..., "answer": ...}'
        raise bad_row("an entry of the list is no row", repr(values), place, why)
    return _of_text(values, written, place)


def _parquet(file: Path) -> list[Row]:
    with needs("pyarrow", got=str(file), extra="text"):
        import pyarrow
        from pyarrow import parquet
    try:
        table = parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        why = f"pyarrow: {error}"
        raise _no_data_set(
            "the file cannot be read as Parquet", str(file), why
        ) from error
    return _numbered(table.to_pylist(), str(file))


def _saved(folder: Path, split: str | None) -> list[Row]:
    with needs("datasets", got=str(folder), extra="text"):
        import datasets
    try:
        found = datasets.load_from_disk(str(folder))
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
    ) as error:
        # Whichever of its files is missing or damaged
        why = f"a folder is read as what `datasets` writes with save_to_disk: {error}"
        raise _no_data_set("the folder is no data set", str(folder), why) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            why = "it has the splits " + ", ".join(found)
            fix = f"kwargs: {{dataset_split: {next(iter(found), 'train')}}}"
            what = (
                "the data set has several splits"
                if split is None
                else f"the data set has no split {split!r}"
            )
            raise _no_data_set(what, str(folder), why, fix)
        found = found[split]
    return _numbered(found.to_list(), str(folder))


def _numbered(values: list[dict[str, Any]], path: str) -> list[Row]:
    return [
        (value, Source(file=f"{path}{ROW}", line=number))
        for number, value in enumerate(values, start=1)
    ]


def _no_data_set(
    what: str, path: str, why: str, fix: str = "path: <a data set>"
) -> ConfigError:
    return ConfigError.of("no-dataset", _KEY, what, path, why, fix)


def each(rows: Iterable[_Given], make: Callable[[_Given], _Made]) -> list[_Made]:
    """Return what is made of each row. Raises the ConfigError of the first bad one, with the places of the others."""
    made = list[_Made]()
    problems = list[Problem]()
    for row in rows:
        try:
            made.append(make(row))
        except ConfigError as error:
            problems += error.problems
    if len(problems) > 1:
        first, *others = problems
        places = ", ".join(str(problem.source) for problem in others[:_MORE])
        more = f"{len(others)} more row{'s are' if len(others) > 1 else ' is'} wrong: {places}"
        first = dataclasses.replace(
            first, why=f"{first.why}\n{more}{', ...' if len(others) > _MORE else ''}"
        )
        raise ConfigError([first])
    if problems:
        raise ConfigError(problems)
    return made
