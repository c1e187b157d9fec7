"""A plain mapping as YAML text that every reader of YAML, 1.1 or 1.2, reads back as the same values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

_PLAIN = re.compile(r"[A-Za-z_/.][\w/.@ +-]*|[0-9]+-[0-9]+(?:,[0-9]+(?:-[0-9]+)?)*")
_MEANINGFUL = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "none", "~", ".inf", ".nan", "-.inf"}


def to_yaml(mapping: Mapping[str, object]) -> str:
    return "\n".join(_lines(mapping, "")) + "\n"


def _lines(mapping: Mapping[str, object], indent: str) -> Iterator[str]:
    for key, value in mapping.items():
        name = _text(str(key))
        if isinstance(value, Mapping) and value and not _is_short(value):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {flow(value)}"


def _is_short(value: Mapping[str, object]) -> bool:
    """A placement in the long form and the like: one line says it better than four."""
    return "placement" in value or "same_as" in value or "accelerators" in value


def flow(value: object) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(str(k))}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(flow(v) for v in value) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _number(value)
    return str(value) if isinstance(value, int) else _text(str(value))


def _number(value: float) -> str:
    """With a point, without which YAML 1.1 reads 1e-06 as text."""
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}.0e{power}" if exponent and "." not in mantissa else text


def _text(value: str) -> str:
    plain = _PLAIN.fullmatch(value) and value.lower() not in _MEANINGFUL and value == value.strip()
    if plain and not re.fullmatch(r"[.][0-9eE_+-]*|[0-9]+-[0-9]{1,2}-[0-9]{1,2}.*", value):
        return value
    return '"' + "".join(map(_letter, value)) + '"'


def _letter(letter: str) -> str:
    if letter in '\\"':
        return "\\" + letter
    return letter if letter.isprintable() else f"\\U{ord(letter):08x}"
