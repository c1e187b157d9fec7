"""Lines to paste in place of a text of the config that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.config.yaml_text import quote
from rlplace.placement.language.text import Text

LONGEST = 160  # characters of a text that an error repeats; around the mistake where there are more


def lead_of(text: Text) -> str:
    """Return the text that stands before a value in its line: its key, such as `actor: `, or `- ` in a list."""
    if text.leaf == "-":
        return "- "
    return f"{quote(text.leaf)}: "


def line_of(text: Text, value: object, remark: str = "") -> str:
    """Return a line with the key of `text` and a new value, such as `actor: 0-7`.

    `remark`: words that follow the value in parentheses; "" for none.
    """
    line = lead_of(text) + quote(value)
    if remark:
        line += f"        ({remark})"
    return line


def open_line(text: Text, what: str = "numbers, such as 0-3, or all") -> str:
    """Return a line with the key of `text` and a placeholder as its value, such as `actor: <a number>`.

    `what`: the words of the placeholder. Errors use such a line if they do not know which value was meant.
    """
    return f"{lead_of(text)}<{what}>"


def with_part(text: Text, span: tuple[int, int], new: str) -> str:
    """Return the line of a text, with `new` in place of the text in the columns `span`.

    `span`: (first column, column after the last). For a very long text, return words that describe the change.
    """
    start, stop = span
    if len(text.text) > LONGEST:
        return f"write {new} instead of {text.text[start:stop]}"
    changed = text.text[:start] + new + text.text[stop:]
    is_list = isinstance(text.value, Sequence) and not isinstance(text.value, str)
    if is_list:
        return lead_of(text) + changed
    return line_of(text, changed)


def near(text: str, span: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """Return the part of a text around `span`, of about LONGEST characters at most, and the columns of `span` in it."""
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
