"""Placement text -> segments of ranks, with the column of every mistake.

::

    value   := pieces | YAML list of pieces
    pieces  := segment ("," segment)*                   blanks are free
    segment := numbers [":" ranks]
    numbers := share ["of" NUMBER] | NUMBER | NUMBER "-" NUMBER      both ends included; ranks likewise, without shares
    share   := "all" | "part" NUMBER "/" NUMBER

`part 1/2` and `part 2/2` are the halves of whatever there is: 0-3 and 4-7 of eight accelerators. Parts that do not come
out even share the accelerator at their border, 0-1 and 1-2 of three; a single accelerator is in each. A share `of 8` is
of the first eight, or of all where there are fewer.

A segment spreads its ranks evenly over its accelerators, in either direction. Without ranks it goes on after the
highest rank so far, one rank per accelerator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlplace.placement.language.faults import Fault
from rlplace.placement.language.spec import Segment
from rlplace.placement.language.text import Text
from rlplace.placement.machines.pools import Pool

_RANGE = r"[0-9]{1,12}(?:\s*-\s*[0-9]{1,12})?"
_SHARE = re.compile(
    r"(?:all|part\s*([0-9]{1,9})\s*/\s*([0-9]{1,9}))(?:\s*of\s*([0-9]{1,9}))?"
)
# The same without groups, to be a part of other patterns.
_SHARE_TEXT = re.sub(r"\((?!\?)", "(?:", _SHARE.pattern)
SEGMENT = re.compile(rf"\s*({_SHARE_TEXT}|{_RANGE})\s*(?::\s*({_RANGE})\s*)?")
SEGMENTS = re.compile(rf"{SEGMENT.pattern}(?:,{SEGMENT.pattern})*")
# Signs that are typed, or pasted from a document, where a hyphen belongs.
DASHES = re.compile(r"[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
BASE = 60  # YAML 1.1 reads an unquoted 4:7 as 4 * 60 + 7


def read_segments(
    text: Text, pool: Pool, faults: list[Fault]
) -> tuple[Segment, ...] | None:
    """Return the segments (pieces `accelerators:ranks`) of a placement text; None if any part cannot be read.

    `pool`: the things that the numbers in the text count, such as accelerators. Faults are added to `faults`.
    """
    facts = {"pool": pool}
    if text.value is None or not text.text.strip() or not text.items:
        faults.append(Fault("empty-placement", text, "no_numbers", facts=facts))
        return None
    before = len(faults)
    segments: list[Segment] = []
    # The rank after the highest so far
    following = 0
    for start, stop, item in text.items:
        span = (start, stop)
        if isinstance(item, bool) or not isinstance(item, (int, str)):
            wrong = {"pool": pool, "item": item}
            error = "other_type"
            if isinstance(item, int | float):
                error = "other_number"
            faults.append(Fault("bad-placement", text, error, span, wrong))
        elif isinstance(item, int) and item >= max(BASE, pool.count):
            wrong = {"pool": pool, "value": item}
            faults.append(Fault("base-60-integer", text, "", span, wrong))
        else:
            for columns in split_at(text.text, ",", start, stop):
                segment = _read_segment(text, columns, following, pool, faults)
                if segment is not None:
                    segments.append(segment)
                    following = max(following, segment.ranks.stop)
    if len(faults) > before:
        return None
    return tuple(segments)


def _read_segment(
    text: Text,
    columns: tuple[int, int],
    following: int,
    pool: Pool,
    faults: list[Fault],
) -> Segment | None:
    """Return one segment of a placement text; None if it cannot be read.

    A segment is a piece `accelerators:ranks` of a placement text. `columns`: (first column, column after the last) of
    the segment. `following`: the rank with which the segment begins if it names no ranks. `pool`: what the numbers
    count. Faults are added to `faults`.
    """
    span = stripped(text.text, *columns)
    match = SEGMENT.fullmatch(text.text, *columns)
    if match is None:
        _read_in_part(text, span, following, pool, faults)
        return None
    numbers = _read_range(text, match[1], match.span(1), pool, faults)
    if numbers is None:
        return None
    if not match[2]:
        # Without ranks: one on each, after the highest so far.
        ranks = range(following, following + len(numbers))
        return Segment(accelerators=numbers, ranks=ranks, span=span)
    written = _read_range(text, match[2], match.span(2), pool, faults)
    if written is None:
        return None

    # `0:8`, a slice in Python, is rank 8 on accelerator 0 here.
    alone = columns == (0, len(text.text))
    plain = match[1].isdecimal() and match[2].isdecimal()
    if alone and plain and numbers.start < written.start:
        facts = {"start": numbers.start, "stop": written.start, "pool": pool}
        faults.append(Fault("rank-gap", text, "python_slice", facts=facts))
        return None
    return Segment(accelerators=numbers, ranks=written, span=span)


def _read_range(
    text: Text, piece: str, span: tuple[int, int], pool: Pool, faults: list[Fault]
) -> range | None:
    """Return the numbers of accelerators or ranks for which `piece` stands; None if it stands for no numbers.

    `piece`: a number, a range, or a share such as `part 1/2`. `span`: its columns in the text. `pool`: what the numbers
    count. Faults are added to `faults`.
    """
    share = _SHARE.fullmatch(piece)
    if share is not None:
        number = int(share[1] or 1)
        parts = int(share[2] or 1)
        count = min(int(share[3] or pool.count), pool.count)
        if not count or not 1 <= number <= parts:
            error = "no_such_part"
            if not count:
                error = "part_of_none"
            facts = {"number": number, "parts": parts, "count": count, "pool": pool}
            faults.append(Fault("bad-placement", text, error, span, facts))
            return None
        # A part begins and ends at whole accelerators: neighbours may share one.
        first = (number - 1) * count // parts
        last = -(-number * count // parts) - 1
    else:
        first = int(piece.partition("-")[0])
        last = int(piece.rpartition("-")[2])
    if first > last:
        facts = {"first": first, "last": last}
        faults.append(Fault("reversed-range", text, "", span, facts))
        return None
    return range(first, last + 1)


def _read_in_part(
    text: Text,
    span: tuple[int, int],
    following: int,
    pool: Pool,
    faults: list[Fault],
) -> None:
    """Find which part of an unreadable segment is wrong, and add a fault for that part to `faults`.

    A segment is a piece `accelerators:ranks` of a placement text. The wrong part is the accelerators, the ranks, or the
    whole segment, as in `cuda:0-7`. `span`: columns of the segment. `following`: the rank with which the segment begins
    if it names no ranks.
    """
    columns = list(split_at(text.text, ":", *span))
    parts = [stripped(text.text, *part) for part in columns]
    head = text.text[slice(*parts[0])]
    if SEGMENT.fullmatch(head):
        if len(parts) > 2:
            at = (text.text.index(":", parts[1][1]), span[1])
            faults.append(Fault("bad-placement", text, "colons", at))
            return
        span = parts[1]
    elif re.match("all|[0-9]", head):
        span = parts[0]

    piece = text.text[slice(*span)]
    hyphenated = DASHES.sub("-", piece)
    if piece == "all":
        # `0-3:all`
        numbers = _read_segment(text, parts[0], following, pool, faults)
        if numbers is not None:
            ranks = {"ranks": numbers.ranks}
            faults.append(Fault("bad-placement", text, "all_ranks", span, ranks))
    elif not piece.strip():
        faults.append(Fault("bad-placement", text, "no_number", span))
    elif hyphenated != piece and SEGMENTS.fullmatch(hyphenated):
        facts = {"piece": piece, "hyphenated": hyphenated}
        faults.append(Fault("not-a-hyphen", text, "", span, facts))
    else:
        counted = {"pool": pool}
        faults.append(Fault("bad-placement", text, "unreadable", span, counted))


def split_at(
    text: str, separator: str, start: int, stop: int
) -> Iterator[tuple[int, int]]:
    """Yield (first column, column after the last) of each part of text[start:stop] between separators.

    `separator`: one character that separates the parts.
    """
    at = text.find(separator, start, stop)
    while at >= 0:
        yield start, at
        start = at + 1
        at = text.find(separator, start, stop)
    yield start, stop


def stripped(text: str, start: int, stop: int) -> tuple[int, int]:
    """Return start and stop of text[start:stop] without the blanks at its ends.

    If it has only blanks, return `start` and `stop` unchanged.
    """
    inner = text[start:stop].strip()
    if not inner:
        return start, stop
    at = text.index(inner, start)
    return at, at + len(inner)
