"""Tables and chapters of plain text, with which all commands print their output."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Sequence

GAP = 3  # spaces between two columns


def table(
    rows: Iterable[Sequence[str]],
    *,
    gap: int = GAP,
    right: Collection[int] = (),
    most: int | None = None,
) -> list[str]:
    """Return one line of text for each row of a table. Each column is as wide as its widest cell.

    `rows`: the cells of each row; all rows need the same number of cells. `gap`: number of spaces between columns.
    `right`: indices of the columns to align to the right; all further columns are aligned to the left. `most`: greatest
    width of a column in characters; None: no limit. A longer cell shifts the cells after it to the right. Lines have no
    trailing spaces.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if most is not None:
        widths = [min(most, width) for width in widths]
    lines = []
    for row in rows:
        cells = []
        for at, cell in enumerate(row):
            if at in right:
                cells.append(cell.rjust(widths[at]))
            else:
                cells.append(cell.ljust(widths[at]))
        lines.append((" " * gap).join(cells).rstrip())
    return lines


def with_whole_word(head: str, word: str, *, indent: int = 0, joined: str = "") -> str:
    """Return `head` and `word`, such as a path, in one line; in two lines if that keeps the terminal from breaking it.

    `indent`: number of spaces before a word in a second line; none if the word has no room behind them. `joined`: what
    ends the first of two lines, such as the backslash of a command.
    """
    columns = shutil.get_terminal_size().columns
    if len(f"{head} {word}") <= columns or len(word) > columns:
        return f"{head} {word}"
    if indent + len(word) > columns:
        indent = 0
    return f"{head.rstrip()}{joined}\n{' ' * indent}{word}"


def chapter(title: str, lines: Iterable[str]) -> str:
    """Return a text that consists of the title and, below it, the lines, indented by two spaces."""
    return "\n".join([title, *indented(lines)])


def indented(lines: Iterable[str]) -> list[str]:
    """Return the lines indented by two spaces; an empty line stays empty."""
    found = []
    for line in lines:
        if line:
            line = f"  {line}"
        found.append(line)
    return found
