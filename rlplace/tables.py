"""Tables and chapters of plain text, with which all commands print their output."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

GAP = 3  # spaces between two columns


def table(
    rows: Iterable[Sequence[str]],
    *,
    gap: int = GAP,
    right: Collection[int] = (),
    most: int | None = None,
) -> list[str]:
    """Return one line of text for each row; each column is as wide as its widest cell.

    `rows`: all have the same number of cells. `gap`: number of spaces between columns. `right`: numbers of the columns,
    from 0, that are aligned to the right; the others are aligned to the left. `most`: greatest width of a column, in
    characters; a longer cell pushes the rest of its line to the right; None for no limit. Lines have no spaces at
    their ends.
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


def chapter(title: str, lines: Iterable[str]) -> str:
    """Return a text: the title, and below it the lines, each indented by two spaces."""
    return "\n".join([title, *indented(lines)])


def indented(lines: Iterable[str]) -> list[str]:
    """Return the lines indented by two spaces; an empty line stays empty."""
    found = []
    for line in lines:
        if line:
            line = f"  {line}"
        found.append(line)
    return found
