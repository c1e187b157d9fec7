"""Bytes in words, for people: GiB where there are many, smaller units where there are few."""

from __future__ import annotations

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def show_gib(size: int) -> str:
    """`62.8 GiB`, `256 MiB`, `12 bytes`; three significant digits."""
    unit, scale = next(((u, s) for u, s in _UNITS if abs(size) >= s), ("bytes", 1))
    return f"{size / scale:.3g} {unit}" if abs(size) < 1000 * scale else f"{size / scale:.0f} {unit}"
