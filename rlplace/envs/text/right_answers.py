"""The right answers of a row, what an answer says behind its thoughts, and texts in one form."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

# Signs that are written in several ways, and blanks that are none of ASCII
_ALIKE = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u02bc\uff07", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\uff02", '"'),
        **dict.fromkeys("\u2010\u2011\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000", " "),
        **dict.fromkeys("\u200b\u2060\ufeff", ""),
    }
)

# Names of tags of thoughts, <think> or [THINK], in a regular expression
THOUGHTS = r"(?:think(?:ing)?|thoughts?|reason(?:ing)?|analysis|scratchpad)"
_BEGIN = re.compile(rf"<{THOUGHTS}>|\[{THOUGHTS}\]", re.IGNORECASE)
_END = re.compile(rf"</{THOUGHTS}>|\[/{THOUGHTS}\]", re.IGNORECASE)


def alike(text: str) -> str:
    """Return a text in one form: composed characters (NFC), straight quotes, plain hyphens, plain blanks inside."""
    if text.isascii():
        return text.strip()
    return unicodedata.normalize("NFC", text).translate(_ALIKE).strip()


def written_answers(value: Any) -> list[str]:
    """Return each way in which the right answer `value` may be written: several, if it is a list of right answers.

    Raises ValueError if the value is a mapping, if its bytes are no text, or if there is no right answer.
    """
    if isinstance(value, Mapping):
        names = ", ".join(map(str, value))
        raise ValueError(
            f"the right answer is a mapping with {names}, and no text, number or list of them"
        )
    # Arrays of numpy
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | set | frozenset):
        found = [text for each in value for text in written_answers(each)]
        if not found:
            raise ValueError("the list of right answers is empty")
        return found
    # Columns of Parquet files may have bytes and decimal numbers
    if isinstance(value, bytes):
        try:
            return [value.decode("utf-8")]
        except UnicodeDecodeError:
            raise ValueError(
                "the right answer is bytes that are no text in UTF-8"
            ) from None
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return [str(value), str(int(value))]
    if isinstance(value, bool):
        return ["true" if value else "false", str(value)]
    if isinstance(value, float) and value.is_integer():
        return [str(value), str(int(value))]
    return [str(value)]


def is_empty(value: Any) -> bool:
    """Return whether the right answer `value` is an empty text, or a list without an answer or with an empty one."""
    if isinstance(value, list | tuple):
        return not value or any(is_empty(each) for each in value)
    if value is None or value != value:
        return True
    if isinstance(value, bytes):
        return not value.strip()
    return isinstance(value, str) and not alike(value)


def after_thoughts(answer: str) -> str:
    """Return the part of an answer after its thoughts; "" if thoughts have begun and not ended."""
    ends = [*_END.finditer(answer)]
    said = answer[ends[-1].end() :] if ends else answer
    if _BEGIN.search(said):
        return ""
    return said
