"""Prompts of a data set: JSON lines, Parquet, or a data set saved to disk, each row with its place for errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlplace.envs.registry import needs
from rlplace.envs.text.contract import Message, OneTurn, Split
from rlplace.errors import ConfigError, Source, did_you_mean, suggestion

_ROLES = ("system", "user", "assistant")
_KEY = "env.kwargs.path"


class PromptSet:
    """Rows of a data set; one row is one episode.

    Column `prompt` is asked (a text, or messages with role and content), `answer` is what verifiers compare with.

    All other columns are facts too, by their names. `rows` takes a part, first to before last, such as the part that is
    held out. Relative paths count from where the run was started.
    """

    rewards: ClassVar[Sequence[str]] = ("math_answer",)

    def __init__(
        self,
        *,
        seed: int,
        split: Split,
        path: str,
        prompt: str = "prompt",
        answer: str | None = "answer",
        rows: tuple[int, int] | None = None,
        dataset_split: str | None = None,
    ) -> None:
        self._prompt, self._answer = prompt, answer
        all_rows = read_rows(path, dataset_split)
        self._rows = all_rows if rows is None else all_rows[rows[0] : rows[1]]
        self.size: int | None = len(self._rows)
        for row in self._rows:
            self._check(*row)

    def episode(self, number: int) -> OneTurn:
        values, _ = self._rows[number]
        facts = {name: value for name, value in values.items() if name != self._prompt}
        if self._answer is not None:
            facts["answer"] = values[self._answer]
        return OneTurn(prompt=_as_prompt(values[self._prompt]), known=facts)

    def _check(self, values: Mapping[str, Any], place: Source) -> None:
        """Raise ConfigError with the row's place: a bad row is found before anything starts."""
        for column in (self._prompt, *([] if self._answer is None else [self._answer])):
            if values.get(column) is None:
                what = f"a row has no {column!r}" + suggestion(did_you_mean(column, values))
                why = "every row needs the columns that are asked and compared"
                fix = "kwargs: {prompt: <column>, answer: <column>}        (answer: null where nothing is compared)"
                raise _bad_row(what, "columns: " + ", ".join(values), place, why, fix)
        if _as_prompt(values[self._prompt]) is None:
            got = repr(values[self._prompt])
            why = f"a prompt is a text, or a list of messages with a role ({', '.join(_ROLES)}) and a content"
            fix = f"kwargs: {{prompt: <a column other than {self._prompt}>}}"
            raise _bad_row(f"{self._prompt!r} is no prompt", got, place, why, fix)


def _as_prompt(value: Any) -> Any:
    """Return the value as a Prompt; None where it is none."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not value:
        return None
    messages: list[Message] = []
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            return None
        messages.append(Message(message["role"], str(message.get("content", ""))))
    return messages


def _bad_row(what: str, got: str, place: Source, why: str, fix: str = "correct or remove the line") -> ConfigError:
    return ConfigError.of("bad-row", _KEY, what, got[:200], why, fix, source=place)


Row = tuple[Mapping[str, Any], Source]  # values by column, and the line of the file or the number of the row


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_rows(path: str, dataset_split: str | None = None) -> list[Row]:
    """Read *.jsonl, *.parquet, or a folder written by `datasets`' save_to_disk.

    Raises ConfigError: nothing there, a line that is no JSON object, a file of another kind, a library missing.
    """
    file = Path(path)
    if not file.exists():
        folder = next(parent for parent in file.absolute().parents if parent.is_dir())
        why = f"paths count from {Path.cwd()}; what exists of it is {folder}"
        raise _no_data_set("there is nothing at this path", path, why)
    if file.is_dir():
        return _saved(file, dataset_split)
    if file.suffix in (".jsonl", ".json"):
        return _json_lines(file)
    if file.suffix == ".parquet":
        return _parquet(file)
    why = "data sets are read from *.jsonl, from *.parquet, and from a folder written by save_to_disk"
    raise _no_data_set("a file of this kind is no data set", path, why)


def _json_lines(file: Path) -> list[Row]:
    rows: list[Row] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place, shown = Source(file=str(file), line=number), line.decode("utf-8", "replace").strip()
            try:
                values = json.loads(line)
            except ValueError as error:  # of JSON or of UTF-8
                raise _bad_row("a line is no row", shown, place, f"JSON: {error}") from error
            if not isinstance(values, dict):
                why = 'a line is one object: {"prompt": ..., "answer": ...}'
                raise _bad_row("a line is no row", shown, place, why)
            rows.append((values, place))
    return rows


def _parquet(file: Path) -> list[Row]:
    with needs("pyarrow", got=str(file), extra="text"):
        import pyarrow
        from pyarrow import parquet
    try:
        table = parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        why = f"pyarrow: {error}"
        raise _no_data_set("the file is not Parquet", str(file), why) from error
    return _numbered(table.to_pylist(), str(file))


def _saved(folder: Path, split: str | None) -> list[Row]:
    with needs("datasets", got=str(folder), extra="text"):
        import datasets
    try:
        found = datasets.load_from_disk(str(folder))
    except FileNotFoundError as error:
        why = "a folder is read as what `datasets` writes with save_to_disk"
        raise _no_data_set("the folder is no data set", str(folder), why) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            why = "it has the splits " + ", ".join(found)
            fix = f"kwargs: {{dataset_split: {next(iter(found), 'train')}}}"
            what = "the data set has several splits" if split is None else f"the data set has no split {split!r}"
            raise _no_data_set(what, str(folder), why, fix)
        found = found[split]
    return _numbered(found.to_list(), str(folder))


def _numbered(values: list[dict[str, Any]], path: str) -> list[Row]:
    return [(value, Source(file=f"{path}, row", line=number)) for number, value in enumerate(values, start=1)]


def _no_data_set(what: str, path: str, why: str, fix: str = "path: <a data set>") -> ConfigError:
    return ConfigError.of("no-dataset", _KEY, what, path, why, fix)
