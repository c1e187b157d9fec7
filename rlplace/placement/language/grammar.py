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

import dataclasses
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction

from rlplace.config.yaml_text import show
from rlplace.placement.language.spec import Segment
from rlplace.placement.language.text import LONGEST, Text
from rlplace.placement.machines.pools import Pool
from rlplace.placement.machines.topology import show_range

_RANGE = r"[0-9]{1,12}(?:\s*-\s*[0-9]{1,12})?"
_SHARE = re.compile(
    r"(?:all|part\s*([0-9]{1,9})\s*/\s*([0-9]{1,9}))(?:\s*of\s*([0-9]{1,9}))?"
)
# The same without groups, to be a part of other patterns.
_SHARE_TEXT = re.sub(r"\((?!\?)", "(?:", _SHARE.pattern)
_SEGMENT = re.compile(rf"\s*({_SHARE_TEXT}|{_RANGE})\s*(?::\s*({_RANGE})\s*)?")
_SEGMENTS = re.compile(rf"{_SEGMENT.pattern}(?:,{_SEGMENT.pattern})*")
# Signs that are typed, or pasted from a document, where a hyphen belongs.
_NOT_HYPHENS = re.compile(r"[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
_OTHER_RANGES = re.compile(r"\s*(?:\.\.+|~|\bto\b|…)\s*")
_DEVICE_NAMES = re.compile(
    r"\b(?:cuda|gpus?|npus?|devices?|accelerators?)[\s:_]*(?=[0-9])", re.IGNORECASE
)
_PYTHON_RANGE = re.compile(
    r"(?:list\()?range\(\s*(?:([0-9]{1,9})\s*,\s*)?([0-9]{1,9})\s*\)\)?"
)
_BASE = 60  # YAML 1.1 reads an unquoted 4:7 as 4 * 60 + 7
_LONGEST_PIECE = 40  # characters that an error repeats
WHY = "a placement is all, a number, or first-last with both ends included, joined by commas"


def read_segments(text: Text, pool: Pool) -> tuple[Segment, ...] | None:
    """Read the segments of one value in the numbers of `pool`; None where problems were recorded."""
    if text.value is None or not text.text.strip() or not text.items:
        what = f"has no {pool.noun}s"
        got = f"{text.leaf}: {text.text}"
        why = f"a component has at least one rank; all stands for every {pool.noun}, cpu for none"
        text.reject("empty-placement", what, why, text.open_line(), got=got)
        return None
    before = len(text.problems)
    segments: list[Segment] = []
    # The rank after the highest so far
    following = 0
    for start, stop, item in text.items:
        if isinstance(item, bool) or not isinstance(item, (int, str)):
            _reject_type(text, (start, stop), item, pool)
        elif isinstance(item, int) and item >= max(_BASE, pool.count):
            _reject_base_60(text, (start, stop), item, pool)
        else:
            for columns in split_at(text.text, ",", start, stop):
                segment = _read_segment(text, columns, following, pool)
                if segment is not None:
                    segments.append(segment)
                    following = max(following, segment.ranks.stop)
    found = text.problems[before:]
    if not found:
        return tuple(segments)

    # One fix for all mistakes in one text.
    if not _SEGMENTS.fullmatch(text.text):
        whole = _as_a_whole(text)
        if whole is not None:
            fixed = [dataclasses.replace(problem, fix=whole) for problem in found]
            text.problems[before:] = fixed
    return None


def _as_a_whole(text: Text) -> str | None:
    """Write the line with every piece in the form of this module.

    None where the value is not one text, or a piece cannot be translated.
    """
    if not isinstance(text.value, str) or len(text.text) > LONGEST:
        return None
    meant = _meant(text.text)
    if meant is None:
        pieces = []
        for piece in re.split("[,;|]", text.text):
            piece = piece.strip()
            if not piece:
                continue
            if not _SEGMENTS.fullmatch(piece):
                translated = _meant(piece)
                if translated is None:
                    return None
                piece = translated
            pieces.append(piece)
        if not pieces:
            return None
        meant = ",".join(pieces)
    return text.line(re.sub(r"([0-9]+)\s*-\s*([0-9]+)", _forwards, meant))


def _forwards(match: re.Match[str]) -> str:
    """Write a range with its smaller number first."""
    first, last = sorted((int(match[1]), int(match[2])))
    return f"{first}-{last}"


def _read_segment(
    text: Text, columns: tuple[int, int], following: int, pool: Pool
) -> Segment | None:
    """Read one segment; None where a problem was recorded. `following`: its first rank by default."""
    span = stripped(text.text, *columns)
    match = _SEGMENT.fullmatch(text.text, *columns)
    if match is None:
        _reject_segment(text, span, following, pool)
        return None
    numbers = _read_range(text, match[1], match.span(1), pool)
    if numbers is None:
        return None
    if not match[2]:
        # Without ranks: one on each, after the highest so far.
        ranks = range(following, following + len(numbers))
        return Segment(accelerators=numbers, ranks=ranks, span=span)
    written = _read_range(text, match[2], match.span(2), pool)
    if written is None:
        return None

    # `0:8`, a slice in Python, is rank 8 on accelerator 0 here.
    alone = columns == (0, len(text.text))
    plain = match[1].isdecimal() and match[2].isdecimal()
    if alone and plain and numbers.start < written.start:
        _reject_slice(text, numbers.start, written.start, pool)
        return None
    return Segment(accelerators=numbers, ranks=written, span=span)


def _read_range(
    text: Text, piece: str, span: tuple[int, int], pool: Pool
) -> range | None:
    """Read numbers of accelerators or of ranks; None where a problem was recorded."""
    share = _SHARE.fullmatch(piece)
    if share is not None:
        number = int(share[1] or 1)
        parts = int(share[2] or 1)
        count = min(int(share[3] or pool.count), pool.count)
        if not count or not 1 <= number <= parts:
            _reject_share(text, span, number, parts, count, pool)
            return None
        # A part begins and ends at whole accelerators: neighbours may share one.
        first = (number - 1) * count // parts
        last = -(-number * count // parts) - 1
    else:
        first = int(piece.partition("-")[0])
        last = int(piece.rpartition("-")[2])
    if first > last:
        what = f"the range runs backwards, from {first} down to {last}"
        why = "the smaller number comes first"
        fix = _as_a_whole(text) or text.with_parts((span, f"{last}-{first}"))
        text.reject("reversed-range", what, why, fix, span=span)
        return None
    return range(first, last + 1)


def _reject_share(
    text: Text, span: tuple[int, int], number: int, parts: int, count: int, pool: Pool
) -> None:
    """Reject a part that does not exist. `count`: how many the parts are of, maybe 0."""
    what = f"there is no part {number} of {parts}"
    if not count:
        what = f"none of the {pool.noun}s"
    if not parts or not count:
        meant = "all"
    elif number:
        meant = f"part {parts}/{number}"
    else:
        meant = f"part 1/{parts}"
    fix = text.with_parts((span, meant))
    text.reject("bad-placement", what, "parts are counted from 1", fix, span=span)


def _reject_slice(text: Text, start: int, stop: int, pool: Pool) -> None:
    """Reject `start:stop`, which is a single rank with a number above 0."""
    what = f"this is rank {stop} on {pool.noun} {start}, and ranks begin with 0"
    why = f"a colon separates {pool.noun}s from ranks; a range is first-last with both ends included"
    fix = text.line(f"{start}:0")
    if stop <= pool.count:
        remark = f"or rank 0 on {pool.noun} {start}: {fix}"
        fix = text.line(show_range(range(start, stop)), remark)
    text.reject("rank-gap", what, why, fix)


def _reject_segment(
    text: Text, span: tuple[int, int], following: int, pool: Pool
) -> None:
    """Reject the part of a segment that cannot be read: its accelerators, its ranks, or all of it, as in `cuda:0-7`."""
    columns = list(split_at(text.text, ":", *span))
    parts = [stripped(text.text, *part) for part in columns]
    head = text.text[slice(*parts[0])]
    if _SEGMENT.fullmatch(head):
        if len(parts) > 2:
            at = (text.text.index(":", parts[1][1]), span[1])
            why = "a segment is accelerators:ranks"
            text.reject(
                "bad-placement", "more than one colon", why, _fix(text), span=at
            )
            return
        span = parts[1]
    elif re.match("all|[0-9]", head):
        span = parts[0]

    piece = text.text[slice(*span)]
    if piece == "all":
        _reject_all_ranks(text, parts[0], span, following, pool)
        return
    code = "bad-placement"
    what = "cannot read this"
    if len(piece) <= _LONGEST_PIECE:
        what = f"cannot read {piece!r}"
    why = WHY
    fix = _fix(text)
    meant = _meant(piece)
    if meant:
        fix = text.with_parts((span, meant))

    # A number that is missing, or a longer dash, has a text of its own.
    hyphenated = _NOT_HYPHENS.sub("-", piece)
    wrong = _NOT_HYPHENS.search(piece)
    if not piece.strip():
        what = "a number is missing"
        fix = _fix(text)
    elif wrong is not None and _SEGMENTS.fullmatch(hyphenated):
        code = "not-a-hyphen"
        what = f"the dash here is not a hyphen but {wrong[0]!r} (U+{ord(wrong[0]):04X})"
        why = "a range is written with the plain hyphen of the keyboard; documents often replace it by a longer dash"
        fix = text.with_parts((span, hyphenated))
    text.reject(code, what, why, fix, span=span)


def _reject_all_ranks(
    text: Text,
    head: tuple[int, int],
    span: tuple[int, int],
    following: int,
    pool: Pool,
) -> None:
    """Reject `0-3:all`. `head`: columns of the accelerators; `span`: of the ranks."""
    numbers = _read_segment(text, head, following, pool)
    # And is rejected
    if numbers is None:
        return
    what = "all is no range of ranks"
    why = "a segment is accelerators:ranks, and ranks have no last number"
    fix = text.with_parts((span, show_range(numbers.ranks)))
    text.reject("bad-placement", what, why, fix, span=span)


def _meant(piece: str) -> str | None:
    """Translate other forms of the same numbers: `cuda:0-7`, `0..7`, `0-3;4-7`, `50%`, `range(0,8)`; else None."""
    guess = _NOT_HYPHENS.sub("-", piece.lower()).strip()
    if guess in ("*", "everything", "all"):
        return "all"
    python_range = _PYTHON_RANGE.fullmatch(guess)
    if python_range is not None:
        start = int(python_range[1] or 0)
        stop = int(python_range[2])
        if start < stop:
            return show_range(range(start, stop))
        return None

    # Without brackets and names of devices, with plain hyphens and commas.
    guess = re.sub(r"^\[(.*)\]$|^\((.*)\)$|^\{(.*)\}$", r"\1\2\3", guess)
    guess = _OTHER_RANGES.sub("-", _DEVICE_NAMES.sub("", guess))
    guess = re.sub(r"\s*[;|]\s*|(?<=[0-9])\s+(?=[0-9])", ",", guess)
    percent = re.fullmatch(r"\s*([0-9]{1,3})\s*%\s*", guess)
    if percent is not None:
        share = Fraction(int(percent[1]), 100)
        if 0 < share < 1:
            return f"{share.numerator}/{share.denominator}"
        if share == 1:
            return "all"
        return None
    if _SEGMENTS.fullmatch(guess):
        return guess
    return None


def _fix(text: Text) -> str:
    """Write the line without its empty pieces where the others are readable; else leave the numbers open."""
    pieces = [piece.strip() for piece in text.text.split(",")]
    rest = ",".join(filter(None, pieces))
    if "" in pieces and _SEGMENTS.fullmatch(rest):
        return text.line(rest)
    return text.open_line()


def _reject_type(text: Text, span: tuple[int, int], item: object, pool: Pool) -> None:
    """Reject an item of a list that is no whole number and no text."""
    if isinstance(item, int | float):
        number = show(item)
        if isinstance(item, float):
            number = f"{item:g}"
        article = "an" if pool.noun[:1] in "aeiou" else "a"
        what = f"{number} is not the number of {article} {pool.noun}"
    else:
        kind = type(item).__name__
        if isinstance(item, Mapping):
            kind = "mapping"
        elif isinstance(item, list | tuple):
            kind = "list"
        what = f"expected numbers or text here, not a {kind}"
    text.reject("bad-placement", what, WHY, text.open_line(), span=span)


def _reject_base_60(text: Text, span: tuple[int, int], value: int, pool: Pool) -> None:
    """Reject an integer that no cluster of this size has, and that YAML makes of an unquoted `accelerators:ranks`."""
    first, second = divmod(value, _BASE)
    pair = f"{first}:{second}"
    if first >= _BASE:
        pair = f"{first}:{second:02}"

    # The pair may be a rank on an accelerator, or a range.
    if second == 0 and first < pool.count:
        meant = f'"{first}:0"'
        remark = f"rank 0 on that {pool.noun}"
    elif first <= second < pool.count:
        meant = f"{first}-{second}"
        remark = f"{pool.noun}s {first} to {second}"
    else:
        meant = "all"
        remark = f"every {pool.noun}"
    what = (
        f"{pool.noun} {value} does not exist; YAML reads an unquoted {pair} as {value}"
    )
    why = (
        "YAML 1.1 takes digits:digits for a base-60 number, "
        f"{pair} = {first} x 60 + {second};\n{pool.describe()}"
    )
    before = text.text[: span[0]]
    after = text.text[span[1] :]
    fix = f"{text.leaf}: {before}{meant}{after}        ({remark})"
    text.reject("base-60-integer", what, why, fix, span=span)


def split_at(
    text: str, separator: str, start: int, stop: int
) -> Iterator[tuple[int, int]]:
    """Yield the columns of the parts of text[start:stop] between one-character separators."""
    at = text.find(separator, start, stop)
    while at >= 0:
        yield start, at
        start = at + 1
        at = text.find(separator, start, stop)
    yield start, stop


def stripped(text: str, start: int, stop: int) -> tuple[int, int]:
    """Return the columns of text[start:stop] without the blanks around it; an empty part keeps its place."""
    inner = text[start:stop].strip()
    if not inner:
        return start, stop
    at = text.index(inner, start)
    return at, at + len(inner)
