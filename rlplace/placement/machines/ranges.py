"""The grammar of number ranges ("0-2,5,7"), the sets of numbers they mean, and the column of every mistake.

::

    ranges := piece ("," piece)*        blanks are free
    piece  := "all" | NUMBER | NUMBER "-" NUMBER        both ends included
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator

ALL = "all"
_PIECE = re.compile(r"([0-9]{1,12})(?:\s*-\s*([0-9]{1,12}))?")
# What people type, or paste from a document, where a hyphen belongs.
_NOT_HYPHENS = re.compile(r"[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
_OTHER_RANGES = re.compile(r"\s*(?:\.\.+|~|\bto\b|…|/)\s*")
WHY_RANGES = "a placement is all, a number, or first-last with both ends included, joined by commas"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One thing wrong in a text. `replacement` is what should stand in columns `span`, where that is known."""

    code: str
    what: str
    span: tuple[int, int]
    why: str = WHY_RANGES
    replacement: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Ranges:
    """A set of whole numbers as ascending pieces that neither overlap nor touch; costs grow with the pieces."""

    pieces: tuple[range, ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[range]) -> Ranges:
        """The union of `numbers`, in any order."""
        merged: list[range] = []
        for piece in sorted((p for p in numbers if p), key=lambda p: p.start):
            if merged and piece.start <= merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(merged[-1].stop, piece.stop))
            else:
                merged.append(piece)
        return cls(tuple(merged))

    def __iter__(self) -> Iterator[int]:
        for piece in self.pieces:
            yield from piece

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.pieces, number, key=lambda p: p.start)
        return at > 0 and number in self.pieces[at - 1]

    def __and__(self, other: Ranges) -> Ranges:
        both: list[range] = []
        mine, theirs = 0, 0
        while mine < len(self.pieces) and theirs < len(other.pieces):
            a, b = self.pieces[mine], other.pieces[theirs]
            if overlap := range(max(a.start, b.start), min(a.stop, b.stop)):
                both.append(overlap)
            if a.stop <= b.stop:
                mine += 1
            else:
                theirs += 1
        return Ranges(tuple(both))

    def __or__(self, other: Ranges) -> Ranges:
        return Ranges.of((*self.pieces, *other.pieces))

    def __sub__(self, other: Ranges) -> Ranges:
        if not self.pieces:
            return self
        edges = [self.pieces[0].start, *(e for p in other.pieces for e in (p.start, p.stop)), self.pieces[-1].stop]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return self & Ranges.of(range(a, b) for a, b in gaps)

    def within(self, window: range) -> Ranges:
        """The numbers inside `window`, found without visiting the pieces outside it."""
        at = max(0, bisect_right(self.pieces, window.start, key=lambda p: p.start) - 1)
        found: list[range] = []
        while at < len(self.pieces) and self.pieces[at].start < window.stop:
            piece = self.pieces[at]
            if cut := range(max(piece.start, window.start), min(piece.stop, window.stop)):
                found.append(cut)
            at += 1
        return Ranges(tuple(found))

    def shifted(self, by: int) -> Ranges:
        return Ranges(tuple(range(p.start + by, p.stop + by) for p in self.pieces))

    def __str__(self) -> str:
        """The canonical text; `parse_ranges(str(x))` gives x back."""
        return ",".join(map(show_range, self.pieces))


def show_range(piece: range) -> str:
    """`3` or `0-7`, both ends included."""
    return str(piece.start) if len(piece) == 1 else f"{piece.start}-{piece.stop - 1}"


def parse_ranges(text: str, count: int) -> tuple[Ranges, tuple[Mistake, ...]]:
    """The numbers `text` means where 0..count-1 exist, and what is wrong with it. Numbers beyond `count` are kept."""
    good: list[range] = []
    mistakes: list[Mistake] = []
    for start, stop in split_at(text, ",", 0, len(text)):
        piece = read_piece(text, start, stop, count)
        if isinstance(piece, Mistake):
            mistakes.append(piece)
        else:
            good.append(piece)
    return Ranges.of(good), tuple(mistakes)


def split_at(text: str, separator: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Columns of the parts of text[start:stop] between one-character separators."""
    while (at := text.find(separator, start, stop)) >= 0:
        yield start, at
        start = at + 1
    yield start, stop


def stripped(text: str, start: int, stop: int) -> tuple[int, int]:
    """The columns without the blanks around text[start:stop]; an empty part keeps its place."""
    inner = text[start:stop].strip()
    if not inner:
        return start, stop
    at = text.index(inner, start)
    return at, at + len(inner)


def read_piece(text: str, start: int, stop: int, count: int) -> range | Mistake:
    """The piece in columns start..stop-1; "all" is 0..count-1."""
    span = stripped(text, start, stop)
    piece = text[span[0] : span[1]]
    if piece == ALL:
        return range(count)
    match = _PIECE.fullmatch(piece)
    if match is not None:
        first, last = int(match[1]), int(match[2] or match[1])
        if first <= last:
            return range(first, last + 1)
        return Mistake(
            code="reversed-range",
            what=f"the range runs backwards, from {first} down to {last}",
            span=span,
            why="a range is written first-last, the smaller number first",
            replacement=f"{last}-{first}",
        )
    return _unreadable(piece, span)


def _unreadable(piece: str, span: tuple[int, int]) -> Mistake:
    if not piece.strip():
        return Mistake(code="bad-placement", what="a number is missing", span=span)
    hyphenated = _NOT_HYPHENS.sub("-", piece)
    if hyphenated != piece and _PIECE.fullmatch(hyphenated):
        wrong = _NOT_HYPHENS.search(piece)
        assert wrong is not None
        return Mistake(
            code="not-a-hyphen",
            what=f"the dash here is not a hyphen but {wrong[0]!r} (U+{ord(wrong[0]):04X})",
            span=span,
            why="a range is written with the plain hyphen of the keyboard; documents often replace it by a longer dash",
            replacement=hyphenated,
        )
    guess = ALL if piece.lower() == ALL else _OTHER_RANGES.sub("-", hyphenated)
    known = guess == ALL or _PIECE.fullmatch(guess) is not None
    return Mistake(
        code="bad-placement",
        what=f"cannot read {piece!r}" if len(piece) <= 40 else "cannot read this",
        span=span,
        replacement=guess if known else None,
    )
