"""Sizes and counts as text, and long texts cut short, for plans, errors and summaries."""

from __future__ import annotations

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def show_bytes(size: int) -> str:
    """Return a size as text with three significant digits, in the largest unit that fits: `62.8 GiB`, `12 bytes`."""
    unit, scale = next(((u, s) for u, s in _UNITS if abs(size) >= s), ("bytes", 1))
    if abs(size) < 1000 * scale:
        return f"{size / scale:.3g} {unit}"
    return f"{size / scale:.0f} {unit}"


def exact_bytes(size: int) -> str:
    """Return a size as text with the exact number, `1.5 GiB (1610612736)`, for sizes that differ by little."""
    if abs(size) >= 1 << 10:
        return f"{show_bytes(size)} ({size})"
    return show_bytes(size)


def clipped(text: str, longest: int, mark: str = " ...") -> str:
    """Return `text`, shortened to `longest` characters if it has more.

    A shortened text consists of the beginning of `text` and of `mark`.
    """
    if len(text) <= longest:
        return text
    return text[: longest - len(mark)] + mark


def byte_unit(most: int) -> tuple[int, str]:
    """Return the bytes and the name of a unit, such as (1 << 30, "GiB"), for a table of sizes.

    `most`: the largest size in the table, in bytes.
    """
    return next(
        ((scale, unit) for unit, scale in _UNITS[1:] if most >= scale), (1, "bytes")
    )


def plural(count: int, noun: str) -> str:
    """Return the noun in the form for `count` things: `rank` for 1, `ranks` for all other counts."""
    if count == 1:
        return noun
    return f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Return the number with its noun: `1 rank`, `3 ranks`."""
    return f"{count} {plural(count, noun)}"


def verb(count: int, base: str) -> str:
    """Return the verb for `count` subjects: `needs` for 1, `need` for all other counts."""
    if count == 1:
        return f"{base}s"
    return base
