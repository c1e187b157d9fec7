"""Placement text -> segments, with the column of every mistake.

::

    value   := pieces | YAML list of pieces
    pieces  := segment ("," segment)*
    segment := accelerators [":" ranks]         both as in `ranges`; "all" is every accelerator

A segment spreads its ranks evenly over its accelerators, in either direction. Without ranks it goes on after the
highest rank so far, one rank per accelerator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlplace.errors import Problem
from rlplace.placement.language.spec import Segment
from rlplace.placement.language.written import Written
from rlplace.placement.machines.pools import Pool
from rlplace.placement.machines.ranges import Mistake, read_piece, show_range, split_at, stripped
from rlplace.structure import show

MOST_MISTAKES = 8  # told of one value; whoever made more made one many times
_BASE = 60  # YAML 1.1 reads an unquoted 4:7 as 4 * 60 + 7


def read_segments(written: Written, pool: Pool) -> tuple[tuple[Segment, ...], list[Problem]]:
    """One written value's segments in the numbers of `pool`; those after a mistake have guessed ranks."""
    if written.value is None or not written.text.strip() or not written.items:
        return (), [empty(written, pool)]
    segments: list[Segment] = []
    problems: list[Problem] = []
    following = 0
    for start, stop, item in written.items:
        if isinstance(item, bool) or not isinstance(item, (int, str)):
            problems.append(_wrong_type(written, (start, stop), item, pool))
        elif isinstance(item, int) and item >= max(_BASE, pool.count):
            problems.append(_base_60(written, (start, stop), item, pool))
        else:
            for columns in split_at(written.text, ",", start, stop):
                segment = _segment(written.text, stripped(written.text, *columns), following, pool.count)
                if isinstance(segment, Segment):
                    segments.append(segment)
                    following = max(following, segment.ranks.stop)
                elif len(problems) < MOST_MISTAKES:
                    fix = None if segment.replacement else written.line(_readable(written.text, start, stop))
                    problems.append(written.problem(segment, fix=fix))
    return tuple(segments), problems[:MOST_MISTAKES]


def _readable(text: str, start: int, stop: int) -> str:
    """What is left of a text when pieces that cannot be read are left out; "all" when nothing is."""
    pieces = [text[a:b].strip() for a, b in split_at(text, ",", start, stop)]
    return ",".join(p for p in pieces if re.fullmatch(r"[0-9]+(-[0-9]+)?(:[0-9]+(-[0-9]+)?)?", p)) or "all"


def _segment(text: str, span: tuple[int, int], following: int, count: int) -> Segment | Mistake:
    parts = list(split_at(text, ":", *span))
    accelerators = read_piece(text, *parts[0], count)
    if isinstance(accelerators, Mistake):
        return accelerators
    if len(parts) == 1:
        return Segment(accelerators=accelerators, ranks=range(following, following + len(accelerators)), span=span)
    if len(parts) > 2:
        return Mistake(
            code="bad-placement",
            what="more than one colon",
            span=(parts[2][0] - 1, span[1]),
            why="a segment is accelerators:ranks",
        )
    at = stripped(text, *parts[1])
    if text[at[0] : at[1]] == "all":
        return Mistake(
            code="bad-placement",
            what="all does not say which ranks",
            span=at,
            why="a segment is accelerators:ranks, and ranks have no number of their own to stop at",
            replacement=show_range(range(following, following + max(1, len(accelerators)))),
        )
    ranks = read_piece(text, *parts[1], count)
    return ranks if isinstance(ranks, Mistake) else Segment(accelerators=accelerators, ranks=ranks, span=span)


def empty(written: Written, pool: Pool) -> Problem:
    """A value that names nothing."""
    return Problem(
        code="empty-placement",
        key=written.key,
        what=f"says no {pool.noun}s",
        got=f"{written.leaf}: {written.text}",
        source=written.source,
        why="every component of the algorithm needs at least one rank",
        fix=f"{written.leaf}: all",
    )


def _wrong_type(written: Written, span: tuple[int, int], item: object, pool: Pool) -> Problem:
    if isinstance(item, int | float):
        number = f"{item:g}" if isinstance(item, float) else show(item)
        what = f"{number} is not the number of {'an' if pool.noun[:1] in 'aeiou' else 'a'} {pool.noun}"
    else:
        kind = "mapping" if isinstance(item, Mapping) else "list" if isinstance(item, Sequence) else type(item).__name__
        what = f"expected numbers or text here, not a {kind}"
    return written.problem(Mistake(code="bad-placement", what=what, span=span), fix=f"{written.leaf}: all")


def _base_60(written: Written, span: tuple[int, int], value: int, pool: Pool) -> Problem:
    """An integer that no cluster of this size has, and that an unquoted `accelerators:ranks` turns into."""
    count = pool.count
    accelerator, second = divmod(value, _BASE)
    pair = f"{accelerator}:{second:02}" if accelerator >= _BASE else f"{accelerator}:{second}"
    if second == 0 and accelerator < count:
        meant, remark = f'"{accelerator}:0"', f"rank 0 on that {pool.noun}"
    elif accelerator <= second < count:
        meant, remark = f"{accelerator}-{second}", f"{pool.noun}s {accelerator} to {second}"
    else:
        meant, remark = "all", f"every {pool.noun}"
    text = written.text[: span[0]] + meant + written.text[span[1] :]
    mistake = Mistake(
        code="base-60-integer",
        what=f"{pool.noun} {value} does not exist; YAML reads an unquoted {pair} as {value}",
        span=span,
        why=f"YAML 1.1 takes digits:digits for a base-60 number, {pair} = {accelerator} x 60 + {second};\n"
        f"{pool.describe()}",
    )
    return written.problem(mistake, fix=f"{written.leaf}: {text}        ({remark})")
