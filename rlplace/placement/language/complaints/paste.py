"""Lines to paste in place of a text of the config that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.config.yaml_text import quote
from rlplace.placement.language.text import Text

LONGEST = 160  # characters of a text that an error repeats; around the mistake where there are more


def lead_of(text: Text) -> str:
    """Return the text before the value of a line: `actor: `, or `- ` in a list."""
    if text.leaf == "-":
        return "- "
    return f"{quote(text.leaf)}: "


def line_of(text: Text, value: object, remark: str = "") -> str:
    """Return the line of a text with another value, such as `actor: 0-7`.

    `remark`: words that follow in parentheses; "" for none.
    """
    line = lead_of(text) + quote(value)
    if remark:
        line += f"        ({remark})"
    return line


def open_line(text: Text, what: str = "numbers, such as 0-3, or all") -> str:
    """Return the line of a text with a description in place of its value: `actor: <a number>`.

    This is for errors that do not know which value was meant.
    """
    return f"{lead_of(text)}<{what}>"


def with_part(text: Text, span: tuple[int, int], new: str) -> str:
    """Return the line of a text with `new` in the columns `span`; if the text is very long, words about the change."""
    start, stop = span
    if len(text.text) > LONGEST:
        return f"write {new} instead of {text.text[start:stop]}"
    changed = text.text[:start] + new + text.text[stop:]
    is_list = isinstance(text.value, Sequence) and not isinstance(text.value, str)
    if is_list:
        return lead_of(text) + changed
    return line_of(text, changed)


def near(text: str, span: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """Return at most about LONGEST characters of a text around `span`, and the columns of `span` in them."""
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
