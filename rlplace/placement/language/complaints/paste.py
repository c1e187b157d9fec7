"""Lines to paste in place of a text of the config that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.config.yaml_text import quote
from rlplace.placement.language.text import Text

LONGEST = 160  # characters of a text that an error repeats; around the mistake where there are more


def lead_of(text: Text) -> str:
    """Return what stands before the value: `actor: `, or `- ` in a list."""
    if text.leaf == "-":
        return "- "
    return f"{quote(text.leaf)}: "


def line_of(text: Text, value: object, remark: str = "") -> str:
    """Write the line with another value: `actor: 0-7`. A remark follows in parentheses."""
    line = lead_of(text) + quote(value)
    if remark:
        line += f"        ({remark})"
    return line


def open_line(text: Text, what: str = "numbers, such as 0-3, or all") -> str:
    """Write the line with a description of the value, where the value that is meant is not known."""
    return f"{lead_of(text)}<{what}>"


def with_part(text: Text, span: tuple[int, int], new: str) -> str:
    """Write the line with other text in some columns; of a very long line, only the change."""
    start, stop = span
    if len(text.text) > LONGEST:
        return f"write {new} instead of {text.text[start:stop]}"
    changed = text.text[:start] + new + text.text[stop:]
    is_list = isinstance(text.value, Sequence) and not isinstance(text.value, str)
    if is_list:
        return lead_of(text) + changed
    return line_of(text, changed)


def near(text: str, span: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """Cut a long text around `span`; return it with the columns of the span in it."""
    if len(text) <= LONGEST:
        return text, span
    start, stop = span
    cut = max(0, start - LONGEST // 2)
    end = min(len(text), cut + LONGEST)
    shown = text[cut:end]
    shift = -cut
    if cut > 0:
        shown = f"... {shown}"
        shift += len("... ")
    if end < len(text):
        shown = f"{shown} ..."
    return shown, (start + shift, min(stop, end) + shift)
