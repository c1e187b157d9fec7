"""Reads rows of data sets: JSON lines, Parquet, and folders written by `datasets`."""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
import random
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlplace.codes import config_error
from rlplace.envs.registry import needs
from rlplace.envs.text.stored_rows import (
    ArrowRows,
    JoinedRows,
    LineRows,
    Row,
    parquet_batches,
)
from rlplace.errors import ConfigError, Problem, Source
from rlplace.json_text import parsed
from rlplace.units import clipped

_KEY = "env.kwargs.path"
# Characters of a row that an error shows
_SHOWN = 200
# Follows the file name in the place of a row, if rows have numbers and no lines
ROW = ", row"
# Greatest weight of a data set: how often each of its rows comes in an epoch
_MOST_OFTEN = 1_000
# Earlier epochs whose orders are kept, since a replacement prompt may belong to another epoch than the newest
_EPOCHS = 4
# Bytes at the beginning of a JSON file that are read to find its form; and most bytes of an object over several lines
_HEAD = 1 << 10
_LONGEST_OBJECT = 64 << 20
# Byte order marks. UTF-32 comes first, since its mark begins with that of UTF-16
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
# Places of further bad rows that an error names
_MORE = 8
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def bad_row(error: str, got: str, place: Source, **facts: Any) -> ConfigError:
    """Return the error about a bad row of a data set.

    `error`: name of the variant of the error's texts. `got`: the row, as text. `place`: file and line of the row.
    `facts`: values for the texts.
    """
    return config_error(
        "bad-row", _KEY, clipped(got, _SHOWN), error=error, source=place, **facts
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One data set of several: its rows, and the number of times that each of them is asked in an epoch.

    `rows`: numbers of the rows, among those of all data sets. `weight`: greater than 0; with 0.5, an epoch asks half of
    the rows, and the next epoch asks the other half.
    """

    rows: Sequence[int]
    weight: float


class Epochs:
    """Decides which row of the data sets each prompt of a run uses. Each epoch has a random order.

    An epoch uses each row of a data set as often as the whole part of the weight says. For the fraction of the weight,
    it uses a part of the rows; the next epoch uses the next part, so that every row is used in turn.
    """

    def __init__(self, shares: Sequence[Share], seed: int) -> None:
        """Prepare the epochs of the data sets `shares`.

        `seed`: seed of the orders of rows within epochs, and of the order in which epochs take turns.
        """
        self._seed = seed
        # Epoch -> order of its rows, for the newest epochs
        self._orders: dict[int, list[int]] = {}
        self._whole: list[int] = []
        # For each weight with a fraction: its rows in a random order, and how many of them an epoch asks
        self._turns: list[tuple[list[int], int]] = []
        for share in shares:
            times, fraction = divmod(float(share.weight), 1.0)
            self._whole += [*share.rows] * int(times)
            if not fraction or not share.rows:
                continue
            order = list(share.rows)
            random.Random(f"{seed}/{order[0]}").shuffle(order)
            count = max(1, round(fraction * len(order)))
            self._turns.append((order, count))

    @property
    def size(self) -> int:
        """Number of rows that each epoch asks."""
        return len(self._whole) + sum(count for _, count in self._turns)

    def row(self, number: int) -> int:
        """Return the number of the row that a prompt uses. `number`: number of the prompt in the run, from 0."""
        epoch, place = divmod(number, self.size)
        if epoch not in self._orders:
            newest = [*self._orders.items()][-_EPOCHS:]
            self._orders = {**dict(newest), epoch: self.rows(epoch)}
        return self._orders[epoch][place]

    def rows(self, epoch: int) -> list[int]:
        """Return the numbers of the rows that an epoch uses, in the order of its prompts. `epoch`: counted from 0."""
        asked = list(self._whole)
        for order, count in self._turns:
            # The next `count` rows behind those of the epoch before, around the end
            first = epoch * count
            asked += [order[at % len(order)] for at in range(first, first + count)]
        random.Random(f"{self._seed}/{epoch}").shuffle(asked)
        return asked


def mixed(
    path: str | Sequence[str] | Mapping[str, float],
    rows: tuple[int, int] | None,
    split: str | None,
) -> tuple[Sequence[Row], list[Share]]:
    """Return (rows of one or several data sets, each row once; a `Share` for each data set).

    Rows stay in their files. A row is read and checked when it is used: a bad row raises ConfigError then.

    `path`: one data set, a list of data sets, or a mapping from data set to weight. A weight is the number of times
    that each row of the data set is asked in an epoch. `rows`: range of rows to take of each data set, (first, last +
    1); None for all. `split`: the split to take of a saved folder. Raises ConfigError for a wrong weight and as
    `read_rows` does.
    """
    if isinstance(path, str):
        alone = _part(path, rows, split)
        return alone, [Share(rows=range(len(alone)), weight=1.0)]
    parts: list[tuple[Sequence[Row], range, str | None]] = []
    shares: list[Share] = []
    first = 0
    names = _names([*path])
    weights = path if isinstance(path, Mapping) else dict.fromkeys(path, 1.0)
    for one, weight in weights.items():
        if not isinstance(weight, int | float) or not 0 < weight <= _MOST_OFTEN:
            got = f"{one}: {weight!r}"
            raise config_error("no-dataset", _KEY, got, error="weight", name=one)
        part = _part(one, rows, split)
        parts.append((part, range(len(part)), names[one]))
        shares.append(Share(rows=range(first, first + len(part)), weight=weight))
        first += len(part)
    return JoinedRows(parts), shares


class RowsOfEpochs:
    """The rows of data sets, one for each prompt of a run; without data sets, each prompt has an empty row.

    Each epoch has all rows as often as the weights of their data sets say, in a random order of its own.
    """

    def __init__(
        self, path: str | Sequence[str] | Mapping[str, float] | None, seed: int
    ) -> None:
        """Read all rows once, to find bad ones before anything starts. Raises ConfigError as `mixed` does.

        `path`: one data set, a list of data sets, or a mapping from data set to weight; None: no data set.
        """
        self._rows: Sequence[Row] = []
        shares: Sequence[Share] = []
        if path is not None:
            self._rows, shares = mixed(path, None, None)
        self._epochs = Epochs(shares, seed)
        each(range(len(self._rows)), self._rows.__getitem__)

    def index(self, number: int) -> int | None:
        """Return the index of the row of prompt number `number`; None without data sets."""
        if not self._rows:
            return None
        return self._epochs.row(number)

    def row(self, number: int) -> Mapping[str, Any]:
        """Return the row of prompt number `number`: name of a column -> value."""
        index = self.index(number)
        if index is None:
            return {}
        return self._rows[index][0]


def content_of(path: str | Iterable[str]) -> str:
    """Return a text that says what data sets contain: path, size and time of the last change of each of their files.

    `path`: one data set, or several.
    """
    lines = []
    for one in [path] if isinstance(path, str) else path:
        place = Path(one).absolute()
        files = [place]
        if place.is_dir():
            files = sorted(file for file in place.rglob("*") if file.is_file())
        for file in files:
            found = file.stat()
            lines.append(f"{file}\t{found.st_size}\t{found.st_mtime_ns}")
    return "\n".join(lines)


def _names(paths: Sequence[str]) -> dict[str, str]:
    """Return path -> a different name for each path: its file name without suffix.

    If file names are equal, names of folders are put before them.
    """
    found = {one: Path(one).stem for one in dict.fromkeys(paths)}
    longest = max((len(Path(one).parts) for one in paths), default=0)
    for parts in range(2, 1 + longest):
        often = Counter(found.values())
        alike = [one for one in found if often[found[one]] > 1]
        for one in alike:
            found[one] = "-".join([*Path(one).parts[-parts:-1], Path(one).stem])
    return found


def _part(path: str, rows: tuple[int, int] | None, split: str | None) -> Sequence[Row]:
    """Return the rows of one data set. `rows`: range of rows to take, (first, last + 1); None for all.

    `split`: the split to take of a saved folder. Raises ConfigError, or ValueError for a wrong range.
    """
    if rows is not None:
        numbers = [isinstance(bound, int) for bound in rows]
        if len(rows) != 2 or not all(numbers):
            raise ValueError(
                f"rows are two whole numbers, the first row and the one behind the last, got {list(rows)}"
            )
    found = read_rows(path, split)
    if rows is None:
        return found
    taken = range(len(found))[rows[0] : rows[1]]
    return JoinedRows([(found, taken, None)])


def read_rows(path: str, dataset_split: str | None = None) -> Sequence[Row]:
    """Return the rows of a file *.jsonl, *.json or *.parquet, or of a folder written by `save_to_disk` of `datasets`.

    Rows stay in the file; only a *.json file that is one list is held in memory. `dataset_split`: the split to take, if
    the folder has several. Raises ConfigError if `path` does not exist or cannot be read, if the kind of file is
    unknown, or if a library is missing. A line that is not a row raises ConfigError when it is read.
    """
    file = Path(path)
    # Name the last existing folder, and whether it may be entered
    if not os.path.exists(path):
        folder = next(
            parent for parent in file.absolute().parents if os.path.isdir(parent)
        )
        missing = "closed"
        if os.access(folder, os.X_OK):
            missing = "nothing"
        here = Path.cwd()
        raise config_error(
            "no-dataset", _KEY, path, error=missing, here=here, folder=folder
        )
    try:
        if file.is_dir():
            return _saved(file, dataset_split)
        if file.suffix in (".jsonl", ".json"):
            return _json_lines(file)
        if file.suffix == ".parquet":
            return _parquet(file)
    except OSError as error:  # no permission, or damaged content
        reason = f"{type(error).__name__}: {error}".strip()
        raise config_error(
            "no-dataset", _KEY, path, error="unread", reason=reason
        ) from error
    raise config_error("no-dataset", _KEY, path, error="kind-of-file")


def _json_lines(file: Path) -> Sequence[Row]:
    """Return the rows of a JSON file, with one object in each line, or with one list of objects.

    Raises ConfigError for an object that is written over several lines, and for UTF-16.
    """
    with file.open("rb") as start:
        head = start.read(_HEAD).removeprefix(codecs.BOM_UTF8)
    encoding = _other_encoding(head)
    if encoding is not None:
        raise config_error(
            "no-dataset",
            _KEY,
            str(file),
            error="encoding",
            encoding=encoding,
            file=shlex.quote(str(file)),
            converted=shlex.quote(str(file.with_suffix(f".utf8{file.suffix}"))),
        )
    if head.lstrip().startswith(b"["):
        return _json_array(file)
    _require_lines(file)
    return LineRows(file, _json_row)


def _other_encoding(head: bytes) -> str | None:
    """Return the name of a JSON file's encoding if it is UTF-16 or UTF-32; else None.

    `head`: the first bytes of the file. JSON begins with an ASCII character; in UTF-16 and UTF-32, its other bytes are
    zeros. Without a byte order mark, the name includes the order of the bytes.
    """
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    order = "BE" if head.startswith(b"\0") else "LE"
    if head[:4].count(0) == 3:
        return f"UTF-32{order}"
    if 0 in head[:2]:
        return f"UTF-16{order}"
    return None


def _require_lines(file: Path) -> None:
    """Raise ConfigError if the first object of a JSON file is written over several lines.

    If the first line is not the beginning of such an object, the line is bad, and reading it raises the error.
    """
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
        try:
            parsed(first)
        except ValueError:
            more = lines.read(_LONGEST_OBJECT)
        else:
            return
    text = (
        (first + more).removeprefix(codecs.BOM_UTF8).decode(errors="replace").lstrip()
    )
    try:
        found, stop = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(found, dict) or "\n" not in text[:stop]:
        return
    # Rows may be a list within the object
    lists = [
        name
        for name, value in found.items()
        if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    error = "object-of-rows" if lists else "object-in-lines"
    shown = shlex.quote(str(file))
    raise config_error(
        "no-dataset",
        _KEY,
        str(file),
        error=error,
        column=lists[0] if lists else "",
        file=shown,
        lines=shlex.quote(str(file.with_suffix(".lines.jsonl"))),
    )


def _json_row(line: bytes, place: Source) -> Mapping[str, Any]:
    """Return the values of one line of a file. Raises ConfigError if the line is not a valid JSON object.

    `place`: file and line, for the error.
    """
    shown = line.decode("utf-8", "replace").strip()
    try:
        values = parsed(line, _of_pairs)
    except ValueError as error:  # bad JSON or UTF-8
        raise bad_row("line", shown, place, reason=error) from error
    if not isinstance(values, dict):
        raise bad_row("no-object", shown, place)
    return _of_text(values, line, place)


def _of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the (name, value) pairs of a JSON object as a dict. Raises ValueError if a name comes twice."""
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
    """Return `values` unchanged if all its texts are valid Unicode.

    Raises ConfigError if a text contains half of a character (a surrogate). `written`: the JSON text of the values.
    `place`: file and line, for the error.
    """
    if b"\\ud" in written.lower():
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise bad_row("surrogate", ascii(values), place) from error
    return values


def _json_array(file: Path) -> list[Row]:
    """Return the rows of a JSON file that consists of one list of objects. Raises ConfigError."""
    written = file.read_bytes()
    try:
        rows = parsed(written, _of_pairs)
    except ValueError as error:
        place = Source(file=str(file), line=getattr(error, "lineno", 1))
        raise bad_row("no-list", str(file), place, reason=error) from error
    return each(
        _numbered(rows, str(file)),
        lambda row: (_entry(row[0], written, row[1]), row[1]),
    )


def _entry(values: object, written: bytes, place: Source) -> Mapping[str, Any]:
    """Return the entry `values` of a list of rows. Raises ConfigError if it is not an object with valid texts.

    `written`: the JSON text of the list. `place`: file and number of the entry, for the error.
    """
    if not isinstance(values, dict):
        raise bad_row("entry", repr(values), place)
    return _of_text(values, written, place)


def _parquet(file: Path) -> Sequence[Row]:
    """Return the rows of a Parquet file. Raises ConfigError if it cannot be read."""
    with needs("pyarrow", got=str(file), extra="text"):
        import pyarrow
    try:
        batches = parquet_batches(file)
    except pyarrow.ArrowInvalid as error:
        raise config_error(
            "no-dataset", _KEY, str(file), error="parquet", reason=error
        ) from error
    return ArrowRows(batches, f"{file}{ROW}")


def _saved(folder: Path, split: str | None) -> Sequence[Row]:
    """Return the rows of a folder written by `save_to_disk` of `datasets`. Raises ConfigError if it cannot be read.

    `split`: the split to take, if the folder has several.
    """
    with needs("datasets", got=str(folder), extra="text"):
        import datasets
    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, LookupError, TypeError) as error:
        # The error depends on which file is missing or damaged
        raise config_error(
            "no-dataset", _KEY, str(folder), error="folder", reason=error
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            which = "no-split"
            if split is None:
                which = "several-splits"
            raise config_error(
                "no-dataset",
                _KEY,
                str(folder),
                error=which,
                split=split,
                splits=", ".join(found),
                first=next(iter(found), "train"),
            )
        found = found[split]
    # Older versions of the library save indices, which give the order of the rows
    if getattr(found, "_indices", None) is not None:
        return _numbered(found.to_list(), str(folder))
    return ArrowRows(found.data.table.to_batches(), f"{folder}{ROW}")


def _numbered(values: list[dict[str, Any]], path: str) -> list[Row]:
    """Return rows with a place: the path, and the number of the row, counted from 1."""
    return [
        (value, Source(file=f"{path}{ROW}", line=number))
        for number, value in enumerate(values, start=1)
    ]


def each(rows: Iterable[_Given], make: Callable[[_Given], _Made]) -> list[_Made]:
    """Return `make(row)` for each row.

    If `make` raises ConfigError for some rows, all rows are tried; then the error of the first bad row is raised, with
    the places of further bad rows.
    """
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
        verb = "rows are" if len(others) > 1 else "row is"
        more = f"{len(others)} more {verb} wrong: {places}"
        if len(others) > _MORE:
            more += ", ..."
        first = dataclasses.replace(first, why=f"{first.why}\n{more}")
        raise ConfigError([first])
    if problems:
        raise ConfigError(problems)
    return made
