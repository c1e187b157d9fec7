"""Rows of cells as aligned lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

INDENT = "  "
_BETWEEN = "   "


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """One line for each row, every column as wide as its widest cell."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [_BETWEEN.join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def indented(lines: Iterable[str]) -> list[str]:
    return [(INDENT + line) if line else "" for line in lines]


def clipped(text: str, longest: int) -> str:
    """`text`, or its beginning and " ..."."""
    return text if len(text) <= longest else text[: longest - 4] + " ..."
