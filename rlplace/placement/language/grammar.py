"""Placement text -> segments of ranks, with the column of every mistake.

::

    value   := pieces | YAML list of pieces
    pieces  := segment ("," segment)*                   blanks are free
    segment := numbers [":" ranks]
    numbers := "all" | NUMBER | NUMBER "-" NUMBER       both ends included; ranks likewise, without "all"

A segment spreads its ranks evenly over its accelerators, in either direction. Without ranks it goes on after the
highest rank so far, one rank per accelerator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction

from rlplace.config.show import show
from rlplace.placement.language.spec import Segment
from rlplace.placement.language.text import Text
from rlplace.placement.machines.pools import Pool
from rlplace.placement.machines.ranges import show_range

_PIECE = re.compile(r"([0-9]{1,12})(?:\s*-\s*([0-9]{1,12}))?")
_SEGMENT = r"\s*(?:all|[0-9]{1,12}(?:\s*-\s*[0-9]{1,12})?)(?:\s*:\s*[0-9]{1,12}(?:\s*-\s*[0-9]{1,12})?)?\s*"
_READABLE = re.compile(rf"{_SEGMENT}(?:,{_SEGMENT})*")
# What people type, or paste from a document, where a hyphen belongs.
_NOT_HYPHENS = re.compile(r"[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
_OTHER_RANGES = re.compile(r"\s*(?:\.\.+|~|\bto\b|…)\s*")
_DEVICE_NAMES = re.compile(r"\b(?:cuda|gpus?|npus?|devices?|accelerators?)[\s:_]*(?=[0-9])", re.IGNORECASE)
_SLICE = re.compile(r"\s*([0-9]{1,12})\s*:\s*([0-9]{1,12})\s*")
_PERCENT = re.compile(r"\s*([0-9]{1,3})\s*%\s*")
_BASE = 60  # YAML 1.1 reads an unquoted 4:7 as 4 * 60 + 7
WHY = "a placement is all, a number, or first-last with both ends included, joined by commas"


def read_segments(text: Text, pool: Pool) -> tuple[Segment, ...] | None:
    """The segments of one value in the numbers of `pool`; None where problems were recorded."""
    if text.value is None or not text.text.strip() or not text.items:
        why = "every component of the algorithm needs at least one rank"
        text.reject("empty-placement", f"has no {pool.noun}s", why, text.line("all"), got=f"{text.leaf}: {text.text}")
        return None
    before = len(text.problems)
    segments: list[Segment] = []
    following = 0
    for start, stop, item in text.items:
        if isinstance(item, bool) or not isinstance(item, (int, str)):
            _reject_type(text, (start, stop), item, pool)
        elif isinstance(item, int) and item >= max(_BASE, pool.count):
            _reject_base_60(text, (start, stop), item, pool)
        else:
            for columns in split_at(text.text, ",", start, stop):
                segment = _segment(text, stripped(text.text, *columns), following, pool)
                if segment is not None:
                    segments.append(segment)
                    following = max(following, segment.ranks.stop)
    return tuple(segments) if len(text.problems) == before else None


def _segment(text: Text, span: tuple[int, int], following: int, pool: Pool) -> Segment | None:
    parts = list(split_at(text.text, ":", *span))
    if len(parts) > 2 and _PIECE.fullmatch(text.text[slice(*parts[0])].strip()):
        why = "a segment is accelerators:ranks"
        text.reject("bad-placement", "more than one colon", why, _fix(text), span=(parts[2][0] - 1, span[1]))
        return None
    if not _PIECE.match(text.text[slice(*parts[0])].strip()) and text.text[slice(*parts[0])].strip() != "all":
        _reject_unreadable(text, span)  # with what stands behind the colon: cuda:0-7
        return None
    numbers = _range(text, parts[0], pool.count)
    if numbers is None:
        return None
    if len(parts) == 1:
        return Segment(accelerators=numbers, ranks=range(following, following + len(numbers)), span=span)
    at = stripped(text.text, *parts[1])
    if text.text[slice(*at)] == "all":
        why = "a segment is accelerators:ranks, and ranks have no number of their own to stop at"
        ranks = show_range(range(following, following + max(1, len(numbers))))
        text.reject("bad-placement", "all is no range of ranks", why, text.with_part(at, ranks), span=at)
        return None
    ranks_range = _range(text, parts[1], pool.count)
    if ranks_range is None:
        return None
    slice_ = _SLICE.fullmatch(text.text)
    if slice_ and following == 0 and int(slice_[1]) < int(slice_[2]) and len(text.items) == 1:
        _reject_slice(text, range(int(slice_[1]), int(slice_[2])), pool)
        return None
    return Segment(accelerators=numbers, ranks=ranks_range, span=span)


def _range(text: Text, columns: tuple[int, int], count: int) -> range | None:
    """The numbers in these columns; "all" is 0..count-1. Numbers beyond `count` are kept."""
    span = stripped(text.text, *columns)
    piece = text.text[slice(*span)]
    if piece == "all":
        return range(count)
    match = _PIECE.fullmatch(piece)
    if match is None:
        _reject_unreadable(text, span)
        return None
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        what, why = f"the range runs backwards, from {first} down to {last}", "the smaller number comes first"
        text.reject("reversed-range", what, why, text.with_part(span, f"{last}-{first}"), span=span)
        return None
    return range(first, last + 1)


def _reject_unreadable(text: Text, span: tuple[int, int]) -> None:
    piece = text.text[slice(*span)]
    if not piece.strip():
        text.reject("bad-placement", "a number is missing", WHY, _fix(text), span=span)
        return
    hyphenated = _NOT_HYPHENS.sub("-", piece)
    wrong = _NOT_HYPHENS.search(piece)
    if wrong is not None and _READABLE.fullmatch(hyphenated):
        what = f"the dash here is not a hyphen but {wrong[0]!r} (U+{ord(wrong[0]):04X})"
        why = "a range is written with the plain hyphen of the keyboard; documents often replace it by a longer dash"
        text.reject("not-a-hyphen", what, why, text.with_part(span, hyphenated), span=span)
        return
    what = f"cannot read {piece!r}" if len(piece) <= 40 else "cannot read this"
    guess = _meant(piece)
    text.reject("bad-placement", what, WHY, text.with_part(span, guess) if guess else _fix(text), span=span)


def _meant(piece: str) -> str | None:
    """The same numbers in the form that is read, where another form was recognised: `cuda:0-7`, `0..7`, `0-3;4-7`."""
    guess = _NOT_HYPHENS.sub("-", piece.lower())
    guess = re.sub(r"\s*[;|]\s*", ",", _OTHER_RANGES.sub("-", _DEVICE_NAMES.sub("", guess)))
    if percent := _PERCENT.fullmatch(guess):
        share = Fraction(int(percent[1]), 100)
        return f"{share.numerator}/{share.denominator}" if 0 < share < 1 else "all" if share == 1 else None
    return guess if _READABLE.fullmatch(guess) else None


def _fix(text: Text) -> str:
    """The line without empty pieces where the others are readable; else all numbers, as a place to start."""
    pieces = [text.text[a:b].strip() for a, b in split_at(text.text, ",", 0, len(text.text))]
    rest = ",".join(p for p in pieces if p)
    if "" in pieces and _READABLE.fullmatch(rest):
        return text.line(rest)
    return text.line("all", "or the numbers that are meant, such as 0-3")


def _reject_type(text: Text, span: tuple[int, int], item: object, pool: Pool) -> None:
    if isinstance(item, int | float):
        number = f"{item:g}" if isinstance(item, float) else show(item)
        what = f"{number} is not the number of {'an' if pool.noun[:1] in 'aeiou' else 'a'} {pool.noun}"
    else:
        kind = "mapping" if isinstance(item, Mapping) else "list" if isinstance(item, list | tuple) else "value"
        what = f"expected numbers or text here, not a {type(item).__name__ if kind == 'value' else kind}"
    text.reject("bad-placement", what, WHY, text.line("all"), span=span)


def _reject_slice(text: Text, numbers: range, pool: Pool) -> None:
    """`0:8`, a slice in Python, is rank 8 on accelerator 0 here."""
    start, stop = numbers.start, numbers.stop
    rank_0 = text.line(f"{start}:0")
    fix = text.line(show_range(numbers), f"or rank 0 on {pool.noun} {start}: {rank_0}")
    what = f"this is rank {stop} on {pool.noun} {start}, and ranks begin with 0"
    why = f"a colon separates {pool.noun}s from ranks; a range is first-last with both ends included"
    text.reject("rank-gap", what, why, fix if stop <= pool.count else rank_0)


def _reject_base_60(text: Text, span: tuple[int, int], value: int, pool: Pool) -> None:
    """An integer that no cluster of this size has, and that an unquoted `accelerators:ranks` turns into."""
    first, second = divmod(value, _BASE)
    pair = f"{first}:{second:02}" if first >= _BASE else f"{first}:{second}"
    if second == 0 and first < pool.count:
        meant, remark = f'"{first}:0"', f"rank 0 on that {pool.noun}"
    elif first <= second < pool.count:
        meant, remark = f"{first}-{second}", f"{pool.noun}s {first} to {second}"
    else:
        meant, remark = "all", f"every {pool.noun}"
    what = f"{pool.noun} {value} does not exist; YAML reads an unquoted {pair} as {value}"
    why = f"YAML 1.1 takes digits:digits for a base-60 number, {pair} = {first} x 60 + {second};\n{pool.describe()}"
    fix = f"{text.leaf}: {text.text[: span[0]]}{meant}{text.text[span[1] :]}        ({remark})"
    text.reject("base-60-integer", what, why, fix, span=span)


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
