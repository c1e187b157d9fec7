"""Prompts of a data set: JSON lines, Parquet, or a data set that was saved to disk; one row is one episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlplace.envs.text.contract import Message, OneTurn, Prompt, Split
from rlplace.envs.text.rows import Row, read_rows
from rlplace.errors import ConfigError, Problem, did_you_mean

_ROLES = ("system", "user", "assistant")


class PromptSet:
    """Column `prompt` is asked (a text, or messages with role and content), `answer` is what verifiers compare with.

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
        for row in self._rows:
            self._check(row)

    @property
    def size(self) -> int | None:
        return len(self._rows)

    def episode(self, number: int) -> OneTurn:
        values = self._rows[number].values
        facts = {name: value for name, value in values.items() if name != self._prompt}
        if self._answer is not None:
            facts["answer"] = values[self._answer]
        return OneTurn(prompt=_as_prompt(values[self._prompt]), known=facts)

    def _check(self, row: Row) -> None:
        """Raises ConfigError with the row's place: a bad row is found before anything starts."""
        for column in (self._prompt, *([] if self._answer is None else [self._answer])):
            if row.values.get(column) is None:
                raise ConfigError([_no_column(row, column)])
        if _as_prompt(row.values[self._prompt]) is None:
            raise ConfigError([_bad_prompt(row, self._prompt)])


def _as_prompt(value: Any) -> Any:
    """A Prompt; None where the value is none."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not value:
        return None
    messages: list[Message] = []
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            return None
        messages.append(Message(message["role"], str(message.get("content", ""))))
    prompt: Prompt = messages
    return prompt


def _no_column(row: Row, column: str) -> Problem:
    near = did_you_mean(column, row.values)
    return Problem(
        code="bad-row",
        key="env.kwargs.path",
        what=f"a row has no {column!r}" + (f", did you mean {near!r}?" if near else ""),
        got="columns: " + ", ".join(row.values),
        source=row.place,
        why="every row needs the columns that are asked and compared",
        fix="kwargs: {prompt: <column>, answer: <column>}        (answer: null where nothing is compared)",
    )


def _bad_prompt(row: Row, column: str) -> Problem:
    return Problem(
        code="bad-row",
        key="env.kwargs.path",
        what=f"{column!r} is no prompt",
        got=repr(row.values[column])[:200],
        source=row.place,
        why="a prompt is a text, or a list of messages with a role (" + ", ".join(_ROLES) + ") and a content",
        fix=f"kwargs: {{prompt: <a column other than {column}>}}",
    )
