"""Values as they are written in YAML, on one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def show(value: object) -> str:
    """A value as it would be written in YAML, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")  # YAML 1.1 reads 5e-06 as text
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(show(v) for v in value) + "]"
    return str(value)
