"""Ranks spread over numbers by a rule: so many numbers for each rank, or so many ranks on each number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlplace.errors import Problem
from rlplace.placement.language.spec import Segment, spread
from rlplace.placement.language.written import Written
from rlplace.placement.machines.pools import Pool
from rlplace.placement.machines.ranges import Mistake, show_range


def respread(
    where: Written, pieces: Iterable[range], pool: Pool, each: int, sharing: int
) -> tuple[tuple[Segment, ...], list[Problem]]:
    """Consecutive ranks over `pieces` in their order; a rank that would not fit is a problem of `where`."""
    joined = joined_pieces(pieces)
    for piece in joined:
        problem = _misfit(where, piece, pool, each)
        if problem is not None:
            return (), [problem]
    return spread(joined, each, sharing), []


def joined_pieces(pieces: Iterable[range]) -> list[range]:
    """Neighbours that follow each other joined, in the given order."""
    joined: list[range] = []
    for piece in pieces:
        if joined and joined[-1].stop == piece.start:
            joined[-1] = range(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return joined


def split_by_stretch(pieces: Sequence[range], pool: Pool) -> list[range]:
    """The pieces cut where a node or product ends, so that no rank can lie across."""
    return [
        range(max(s.first, piece.start), min(s.numbers.stop, piece.stop))
        for piece in pieces
        for s in pool.stretches_in(piece)
    ]


def _misfit(where: Written, piece: range, pool: Pool, each: int) -> Problem | None:
    stretch = pool.cut(piece, each)
    if len(piece) % each == 0 and stretch is None:
        return None
    span = (0, len(where.text))
    if stretch is None:
        what = f"{len(piece)} neighbouring {pool.noun}s ({show_range(piece)}) do not divide into ranks of {each}"
        why = f"a rank has {each} neighbours: accelerators_per_rank"
        return where.problem(
            Mistake(code="uneven-ranks", what=what, span=span, why=why), fix="accelerators_per_rank: 1"
        )
    same = pool.stretch_of(stretch.first - 1).node == stretch.node
    code = "rank-spans-products" if same else "rank-spans-nodes"
    fewer = next(n for n in range(each - 1, 0, -1) if len(piece) % n == 0 and pool.cut(piece, n) is None)
    what = f"a rank of {each} {pool.noun}s would lie on both sides of {pool.noun} {stretch.first}"
    why = f"a rank is one process on one node with accelerators of one product; node {stretch.node} is on the far side"
    return where.problem(Mistake(code=code, what=what, span=span, why=why), fix=f"accelerators_per_rank: {fewer}")
