"""Sets of whole numbers as ascending ranges, such as the accelerators of a component."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from operator import attrgetter


@dataclasses.dataclass(frozen=True, slots=True)
class Ranges:
    """A set of whole numbers as ascending pieces that neither overlap nor touch; costs grow with the pieces."""

    pieces: tuple[range, ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[range]) -> Ranges:
        """Return the union of `numbers`, which may be in any order."""
        merged: list[range] = []
        for piece in sorted(filter(None, numbers), key=attrgetter("start")):
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
        at = bisect_right(self.pieces, number, key=attrgetter("start"))
        return at > 0 and number in self.pieces[at - 1]

    def __and__(self, other: Ranges) -> Ranges:
        return Ranges(tuple(both for piece in other.pieces for both in self.within(piece).pieces))

    def __or__(self, other: Ranges) -> Ranges:
        return Ranges.of((*self.pieces, *other.pieces))

    def __sub__(self, other: Ranges) -> Ranges:
        if not self.pieces:
            return self
        edges = [self.pieces[0].start, *(e for p in other.pieces for e in (p.start, p.stop)), self.pieces[-1].stop]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return self & Ranges.of(range(a, b) for a, b in gaps)

    def within(self, window: range) -> Ranges:
        """Return the numbers inside `window` without visiting the pieces outside it."""
        at = bisect_right(self.pieces, window.start, key=attrgetter("stop"))
        end = bisect_left(self.pieces, window.stop, key=attrgetter("start"))
        return Ranges(tuple(overlap(piece, window) for piece in self.pieces[at:end]))

    def shifted(self, by: int) -> Ranges:
        return Ranges(tuple(range(p.start + by, p.stop + by) for p in self.pieces))

    def __str__(self) -> str:
        """Write the canonical text, such as `0-2,5`."""
        return ",".join(map(show_range, self.pieces))


def overlap(a: range, b: range) -> range:
    """Return the numbers of both, which may be none."""
    return range(max(a.start, b.start), min(a.stop, b.stop))


def show_range(piece: range) -> str:
    """Write `3` or `0-7`, both ends included."""
    return str(piece.start) if len(piece) == 1 else f"{piece.start}-{piece.stop - 1}"


def named(noun: str, piece: range, verb: str = "", plural: str = "are") -> str:
    """Write `accelerator 3` or `accelerators 0-7`, and `is` or `are` where a verb is given."""
    several = len(piece) > 1
    return f"{noun}{'s' * several} {show_range(piece)}" + f" {plural if several else verb}" * bool(verb)
