"""Rows of data sets that stay in their files: a process holds an index of the file, and reads one row at a time.

::

    rows.jsonl      byte of each line ───────────────▶ read and parsed, one line at a time
    rows.parquet    ── once ──▶ ~/.cache/rlplace/rows/<name>.arrow ──▶ mapped: all processes share its pages
    saved folder    its Arrow files, mapped

Parquet has no access to single rows: it compresses columns in groups of many rows. So a large file is unpacked once
into a file in the user's cache folder.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import os
import struct
import tempfile
import zlib
from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from rlplace.codes import config_error
from rlplace.errors import Source

_KEY = "env.kwargs.path"
# (column -> value, place: line of the file or number of the row)
Row = tuple[Mapping[str, Any], Source]
# A Parquet file with at least this number of rows is unpacked into a file; a smaller one is held in memory
MANY = 10_000
# Rows that are unpacked at once
_BATCH = 4_096
# Most unpacked files; the least recently used one is removed first
_KEPT = 10


class Rows(Sequence[Row]):
    """Rows by number, from 0. A subclass reads one row at a time."""

    @overload
    def __getitem__(self, number: int) -> Row: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Row]: ...

    def __getitem__(self, number: int | slice) -> Row | Sequence[Row]:
        numbers = range(len(self))
        if isinstance(number, slice):
            return [self.row(each) for each in numbers[number]]
        return self.row(numbers[number])

    @abstractmethod
    def row(self, number: int) -> Row:
        """Return row number `number`, which is at least 0 and below the number of rows."""


class LineRows(Rows):
    """The lines of a file, without blank ones. Owns the open file.

    Reading does not use the position of the open file, so threads and forked processes may read at the same time. Lines
    that are added to the file later do not count. Reading a line that was changed raises ConfigError.
    """

    def __init__(
        self, file: Path, parse: Callable[[bytes, Source], Mapping[str, Any]]
    ) -> None:
        """Find the lines of `file`. `parse`: returns the values of a line; its second argument is the line's place."""
        self._path = file
        self._parse = parse
        self._file = file.open("rb")
        # For each row: offset of its first byte, number of its line, and checksum
        self._starts = array("q")
        self._numbers = array("q")
        self._sums = array("L")
        self._lengths = array("L")
        start = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self._starts.append(start)
                self._numbers.append(number)
                self._sums.append(zlib.crc32(line))
                self._lengths.append(len(line))
            start += len(line)

    def __reduce__(self) -> tuple[Any, ...]:
        return (LineRows, (self._path, self._parse))

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, number: int) -> Row:
        """Return the values of a line and its place.

        Raises ConfigError if the line was changed since the start, and the errors of `parse`.
        """
        place = Source(file=str(self._path), line=self._numbers[number])
        file = self._file.fileno()
        line = os.pread(file, self._lengths[number], self._starts[number])
        if zlib.crc32(line) != self._sums[number]:
            raise config_error(
                "no-dataset", _KEY, str(self._path), error="changed", source=place
            )
        return self._parse(line, place), place


class ArrowRows(Rows):
    """The rows of batches of Arrow, which may be in memory or in a mapped file.

    A number of 32 or 16 bits is the shortest decimal that is stored as this number: 0.1, and not 0.10000000149011612.
    """

    def __init__(self, batches: Sequence[Any], file: str) -> None:
        """`batches`: pyarrow.RecordBatch. `file`: name of the file in the places of rows."""
        self._batches = [batch for batch in batches if len(batch)]
        # The number of the first row of each batch, and the number of all rows
        lengths = [len(batch) for batch in self._batches]
        self._starts = list(itertools.accumulate(lengths, initial=0))
        self._file = file
        # Columns with numbers of few bits: name -> type
        self._short: dict[str, Any] = {}
        if self._batches:
            for field in self._batches[0].schema:
                if _has_short_floats(field.type):
                    self._short[field.name] = field.type

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Row:
        at = bisect.bisect_right(self._starts, number) - 1
        batch = self._batches[at].slice(number - self._starts[at], 1)
        (values,) = batch.to_pylist()
        for name, kind in self._short.items():
            values[name] = _as_written(values[name], kind)
        return values, Source(file=self._file, line=number + 1)


# Types of Arrow for short numbers -> format of `struct`, and most decimal digits that are needed
_SHORT_FLOATS: Mapping[str, tuple[str, int]] = {
    "float": ("f", 9),
    "halffloat": ("e", 5),
}


def _has_short_floats(kind: Any) -> bool:
    """Return whether a type of Arrow is a short number, or a list or struct that has some."""
    if str(kind) in _SHORT_FLOATS:
        return True
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return any(map(_has_short_floats, inner))


def _as_written(value: Any, kind: Any) -> Any:
    """Return a value of Arrow in which short numbers are replaced by the shortest decimals. `kind`: its type."""
    if isinstance(value, float) and str(kind) in _SHORT_FLOATS:
        form, most = _SHORT_FLOATS[str(kind)]
        for digits in range(1, most + 1):
            near = float(f"{value:.{digits}g}")
            with contextlib.suppress(OverflowError):
                if struct.unpack(form, struct.pack(form, near))[0] == value:
                    return near
        return value
    if isinstance(value, dict):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        types = {field.name: field.type for field in fields}
        return {name: _as_written(each, types[name]) for name, each in value.items()}
    if isinstance(value, list) and kind.num_fields == 1:
        inner = kind.field(0).type
        return [_as_written(each, inner) for each in value]
    return value


class JoinedRows(Rows):
    """Rows of several data sets, one data set after the other."""

    def __init__(
        self, parts: Sequence[tuple[Sequence[Row], range, str | None]]
    ) -> None:
        """`parts`: for each data set (all its rows, numbers of the rows that are used, value of the column `data_set`).

        The value is None if the rows have no such column.
        """
        self._parts = list(parts)
        lengths = [len(numbers) for _, numbers, _ in parts]
        self._starts = list(itertools.accumulate(lengths, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Row:
        at = bisect.bisect_right(self._starts, number) - 1
        rows, numbers, name = self._parts[at]
        values, place = rows[numbers[number - self._starts[at]]]
        if name is not None:
            values = {"data_set": name, **values}
        return values, place


def parquet_batches(file: Path) -> list[Any]:
    """Return the rows of a Parquet file as batches of Arrow.

    A large file is unpacked into a file in the cache folder, which is mapped. If the cache folder cannot be written,
    the rows are held in memory. Raises pyarrow.ArrowInvalid and OSError for a file that cannot be read.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(file) as packed:
        if packed.metadata.num_rows < MANY:
            return list(packed.read().to_batches())
        unpacked = cache_folder() / f"{_name_of(file)}.arrow"
        try:
            if not unpacked.exists():
                _unpack(packed, unpacked)
            return _mapped(unpacked)
        except _unpack_errors():
            return list(packed.read().to_batches())


def cache_folder() -> Path:
    """Return the folder with unpacked data sets, whether it exists or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "rlplace" / "rows"


def _name_of(file: Path) -> str:
    """Return a name for the content of a file. It depends on the path, size and time of the last change."""
    found = file.stat()
    told = f"{file.absolute()}\n{found.st_size}\n{found.st_mtime_ns}"
    return hashlib.sha256(told.encode()).hexdigest()


def _unpack_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that a cache folder can cause: no room, no permission, or a damaged file."""
    import pyarrow

    return (OSError, pyarrow.ArrowInvalid)


def _unpack(packed: Any, unpacked: Path) -> None:
    """Write the rows of a Parquet file into the file `unpacked`, and remove old unpacked files beside it.

    `packed`: pyarrow.parquet.ParquetFile.
    """
    import pyarrow

    folder = unpacked.parent
    folder.mkdir(parents=True, exist_ok=True)
    # Other ranks may write the same file at this moment
    part, path = tempfile.mkstemp(dir=folder, suffix=".part")
    os.close(part)
    try:
        with (
            pyarrow.OSFile(path, "wb") as out,
            pyarrow.ipc.new_stream(out, packed.schema_arrow) as written,
        ):
            for batch in packed.iter_batches(batch_size=_BATCH):
                written.write_batch(batch)
        os.replace(path, unpacked)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    by_use = sorted(folder.glob("*.arrow"), key=lambda each: each.stat().st_mtime)
    for oldest in by_use[:-_KEPT]:
        oldest.unlink(missing_ok=True)


def _mapped(unpacked: Path) -> list[Any]:
    """Return the batches of an unpacked file, mapped into memory. All processes share the mapped pages."""
    import pyarrow

    # Record the time of the last use
    os.utime(unpacked)
    with pyarrow.ipc.open_stream(pyarrow.memory_map(str(unpacked))) as rows:
        return list(rows)
