"""Sizes and counts as text, and long texts cut short, for plans, errors and summaries."""

from __future__ import annotations

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def show_bytes(size: int) -> str:
    """Return a size in bytes as text, with three significant digits and a unit: `62.8 GiB`, `12 bytes`.

    The unit is the largest one that is not larger than the size.
    """
    unit, scale = next(((u, s) for u, s in _UNITS if abs(size) >= s), ("bytes", 1))
    if abs(size) < 1000 * scale:
        return f"{size / scale:.3g} {unit}"
    return f"{size / scale:.0f} {unit}"


def exact_bytes(size: int) -> str:
    """Return a size in bytes as text with a unit and the exact number of bytes: `1.5 GiB (1610612736)`."""
    if abs(size) >= 1 << 10:
        return f"{show_bytes(size)} ({size})"
    return show_bytes(size)


def clipped(text: str, longest: int, mark: str = " ...") -> str:
    """Return `text`. If it has more than `longest` characters, return its beginning and `mark`, `longest` in total."""
    if len(text) <= longest:
        return text
    return text[: longest - len(mark)] + mark


def with_length(text: str, longest: int) -> str:
    """Return `text`. If it has more than `longest` characters, return so many of them, and how many it has in total."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]} ... ({len(text)} characters)"


def byte_unit(most: int) -> tuple[int, str]:
    """Return (bytes, name) of the unit for a table of sizes, such as (1 << 30, "GiB").

    `most`: the largest size in the table, in bytes. The unit is GiB, MiB, KiB or bytes: the largest one that is not
    larger than `most`.
    """
    return next(
        ((scale, unit) for unit, scale in _UNITS[1:] if most >= scale), (1, "bytes")
    )


def plural(count: int, noun: str) -> str:
    """Return the noun in singular if `count` is 1, else in plural: `rank`, `ranks`; `launch`, `launches`."""
    if count == 1:
        return noun
    if noun.endswith(("ch", "sh", "s", "x")):
        return f"{noun}es"
    return f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Return the number and the noun, in singular or plural: `1 rank`, `3 ranks`."""
    return f"{count} {plural(count, noun)}"


def verb(count: int, base: str) -> str:
    """Return the form of a verb for `count` subjects: `needs` if `count` is 1, else `need`. `base`: such as `need`."""
    if count == 1:
        return f"{base}s"
    return base
