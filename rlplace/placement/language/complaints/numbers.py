"""Words about numbers that cannot be read, ranks that do not fit on them, and parallel sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlplace.config.yaml_text import show
from rlplace.errors import one_of
from rlplace.placement.language.complaints.meant import (
    meant_line,
    meant_numbers,
    of_machines,
    other_place,
    without_gaps,
)
from rlplace.placement.language.complaints.paste import line_of, open_line, with_part
from rlplace.placement.language.complaints.writer import Facts, Writer, span_of
from rlplace.placement.language.faults import Fault
from rlplace.placement.language.grammar import BASE, split_at, stripped
from rlplace.placement.language.spec import Segment, render_segments
from rlplace.placement.language.text import Text
from rlplace.placement.machines.pools import NODE, Interval, Pool
from rlplace.placement.machines.topology import Ranges, named, show_range
from rlplace.units import counted

_LONGEST_PIECE = 40  # characters that an error repeats


# ── Numbers ─────────────────────────────────────────────────────────────────────────


def _other_type(fault: Fault) -> Facts:
    """Return name -> value for the error message about an item that is neither a number nor a text.

    `kind`: the name of its type.
    """
    item = fault.facts["item"]
    kind = type(item).__name__
    if isinstance(item, Mapping):
        kind = "mapping"
    elif isinstance(item, list | tuple):
        kind = "list"
    return {"kind": kind}


def _other_number(fault: Fault) -> Facts:
    """Return name -> value for the error message about a number that cannot name an accelerator, such as 1.5.

    `number`: the number as text. `article`: "a" or "an", whichever fits the noun of the pool.
    """
    item = fault.facts["item"]
    number = show(item)
    if isinstance(item, float):
        number = f"{item:g}"
    article = "a"
    if fault.facts["pool"].noun[:1] in "aeiou":
        article = "an"
    return {"number": number, "article": article}


def _base_60(fault: Fault) -> Facts:
    """Return name -> value for the error message about text such as 4:7 that YAML has read as one number in base 60.

    `pair`: the text. `first`, `second`: its two numbers. `line`: a corrected line with what was probably meant: rank 0
    on one accelerator, a range, or all.
    """
    pool: Pool = fault.facts["pool"]
    first, second = divmod(fault.facts["value"], BASE)
    pair = f"{first}:{second}"
    if first >= BASE:
        pair = f"{first}:{second:02}"
    if second == 0 and first < pool.count:
        meant = f'"{first}:0"'
        remark = f"rank 0 on that {pool.noun}"
    elif first <= second < pool.count:
        meant = f"{first}-{second}"
        remark = f"{pool.noun}s {first} to {second}"
    else:
        meant = "all"
        remark = f"every {pool.noun}"
    start, stop = span_of(fault)
    text = fault.text.text
    line = f"{text[:start]}{meant}{text[stop:]}        ({remark})"
    return {"pair": pair, "first": first, "second": second, "line": line}


def _reversed(fault: Fault) -> Facts:
    """Return name -> value for the error message about a range such as 7-0.

    `line`: a corrected line with the smaller number first.
    """
    forwards = f"{fault.facts['last']}-{fault.facts['first']}"
    line = meant_line(fault.text)
    return {"line": line or with_part(fault.text, span_of(fault), forwards)}


def _no_part(fault: Fault) -> Facts:
    """Return name -> value for the error message about a share such as `part 2/1`, which does not exist.

    `line`: a corrected line with the share that was probably meant, such as `part 1/2`.
    """
    number = fault.facts["number"]
    parts = fault.facts["parts"]
    if not parts or not fault.facts["count"]:
        meant = "all"
    elif number:
        # The numbers the other way round, or the last part
        meant = f"part {parts}/{number}"
        last = f"part {parts}/{parts}"
        span = span_of(fault)
        lines = [with_part(fault.text, span, each) for each in (meant, last)]
        return {"line": one_of(lines) if parts > 1 else lines[0]}
    else:
        meant = f"part 1/{parts}"
    return {"line": with_part(fault.text, span_of(fault), meant)}


def _slice(fault: Fault) -> Facts:
    """Return name -> value for the error message about a Python slice such as `0:8`.

    `line`: a corrected line with the numbers that Python means, if they exist; else, rank 0 on the first number.
    """
    start = fault.facts["start"]
    stop = fault.facts["stop"]
    pool: Pool = fault.facts["pool"]
    line = line_of(fault.text, f"{start}:0")
    if stop <= pool.count:
        remark = f"or rank 0 on {pool.noun} {start}: {line}"
        line = line_of(fault.text, show_range(range(start, stop)), remark)
    return {"line": line}


def _gaps(fault: Fault) -> Facts:
    """Return name -> value for the error message about empty pieces between commas.

    `line`: a corrected line without these pieces.
    """
    return {"line": without_gaps(fault.text)}


def _all_ranks(fault: Fault) -> Facts:
    """Return name -> value for the error message about the word `all` in place of rank numbers.

    `line`: a corrected line with the rank numbers that follow from the accelerators.
    """
    ranks = show_range(fault.facts["ranks"])
    return {"line": with_part(fault.text, span_of(fault), ranks)}


def _dash(fault: Fault) -> Facts:
    """Return name -> value for the error message about a dash in place of a hyphen.

    `sign`: the dash. `number`: its code point. `line`: a corrected line with hyphens.
    """
    hyphenated = fault.facts["hyphenated"]
    # The first letter that is another one.
    pairs = zip(fault.facts["piece"], hyphenated, strict=True)
    sign = next(old for old, new in pairs if old != new)
    line = with_part(fault.text, span_of(fault), hyphenated)
    return {"sign": sign, "number": ord(sign), "line": line}


def _unreadable(fault: Fault) -> Facts:
    """Return name -> value for the error message about a piece that cannot be read.

    `piece`: the piece. `line`: a corrected line with the piece in the notation of placement texts, if its notation is
    known.
    """
    span = span_of(fault)
    piece = fault.text.text[slice(*span)]
    what = "this"
    if len(piece) <= _LONGEST_PIECE:
        what = repr(piece)
    line = without_gaps(fault.text)
    meant = meant_numbers(piece)
    choices = _choices(piece, fault.facts["pool"].count)
    if choices:
        lines = [with_part(fault.text, span, text) for text in choices]
        return {"piece": what, "line": one_of(lines)}
    machines = of_machines(fault.text.text, fault.facts["pool"])
    if machines:
        line = line_of(fault.text, machines)
    elif meant:
        line = with_part(fault.text, span, meant)
    return {"piece": what, "line": other_place(fault.text) or line}


def _choices(piece: str, count: int) -> list[str]:
    """Return the placement texts that a piece with a number too many or too few may mean; none for another piece.

    Such pieces are `-3`, which counts from the end as in Python or has no first number, and `0-3-5`. `count`: all
    numbers.
    """
    from_end = re.fullmatch(r"\s*-([1-9][0-9]{0,5})\s*", piece)
    if from_end is not None and int(from_end[1]) < count:
        number = int(from_end[1])
        return [str(count - number), show_range(range(number + 1))]
    chain = re.fullmatch(r"\s*([0-9]{1,6})-([0-9]{1,6})-([0-9]{1,6})\s*", piece)
    if chain is None:
        return []
    first, middle, last = (int(number) for number in chain.groups())
    if not first < middle < last < count:
        return []
    return [f"{first}-{middle},{last}", f"{first}-{last}"]


def _without_ranks(fault: Fault) -> Facts:
    """Return name -> value for the error message about rank numbers in a line in which they are not allowed.

    `line`: a corrected line without rank numbers.
    """
    unquoted = re.sub(r'[\[\]"]', "", fault.text.text)
    return {"line": line_of(fault.text, re.sub(r":[^,]*", "", unquoted))}


# ── Ranks that do not fit ───────────────────────────────────────────────────────────


def _missing(fault: Fault) -> Facts:
    """Return name -> value for the error message about numbers that do not exist in the pool.

    `missing`: these numbers, in words. `span`: their columns. `line`: a corrected line.
    """
    pool: Pool = fault.facts["pool"]
    segments: Sequence[Segment] = fault.facts["segments"]
    numbers = fault.facts["segment"].accelerators
    text = fault.text.text
    span = _numbers_span(fault)
    if numbers.start < pool.count:
        # Only the last number of the range is wrong.
        span = stripped(text, text.rindex("-", *span) + 1, span[1])
    line = open_line(fault.text)
    is_alone = len(segments) == 1 and ":" not in fault.text.text
    if is_alone and numbers.stop == pool.count + 1:
        line = _without_last(
            fault.text, numbers.start, pool.count
        ) or _counted_from_one(fault.text, numbers.start, pool.count)
    missing = range(max(numbers.start, pool.count), numbers.stop)
    words = named(pool.noun, missing, "does", "do")
    return {"missing": words, "line": line, "span": span}


def _without_last(text: Text, first: int, count: int) -> str | None:
    """Return the line without the last number of `first-count`, if the count was taken for the last number.

    So it is in `0-8` and in `4-8` of eight. Others may be of a larger cluster, or counted from 1, as in `5-8`: of a
    number of accelerators that divides all, only one of both readings is a share of them. `count`: all accelerators.
    """
    up_to = range(first, count)
    if not up_to:
        return None
    from_one = len(up_to) + 1
    if first == 1 or (first and (count % len(up_to) or count % from_one == 0)):
        return None
    return line_of(text, show_range(up_to))


def _counted_from_one(text: Text, first: int, count: int) -> str:
    """Return the lines for both meanings of `first-count`: numbers that begin with 1, and a last number too many."""
    shifted = line_of(text, show_range(range(first - 1, count)))
    clipped = line_of(text, show_range(range(first, count)))
    return one_of([shifted, clipped]) if 0 < first < count else open_line(text)


def _numbers_span(fault: Fault) -> tuple[int, int]:
    """Return the columns of a segment's accelerators, which are before its colon: (first, after the last).

    A segment is a piece `accelerators:ranks` of a placement text.
    """
    first, *_ = split_at(fault.text.text, ":", *span_of(fault))
    return stripped(fault.text.text, *first)


def _ranks_span(fault: Fault) -> tuple[int, int]:
    """Return the columns of a segment's ranks, which are after its colon: (first, after the last).

    A segment is a piece `accelerators:ranks` of a placement text. Without a colon, return all columns of the segment.
    """
    *_, last = split_at(fault.text.text, ":", *span_of(fault))
    return stripped(fault.text.text, *last)


def _too_many(fault: Fault) -> Facts:
    """Return name -> value for the error message about more ranks than are allowed on a segment's accelerators.

    A segment is a piece `accelerators:ranks` of a placement text. `ranks`: number of ranks. `on`: the number of
    accelerators, in words. `span`: columns of the ranks. `line`: a corrected line with one rank on each accelerator.
    """
    segment: Segment = fault.facts["segment"]
    on = counted(len(segment.accelerators), fault.facts["pool"].noun)
    ranks = segment.ranks.stop - segment.ranks.start
    line = line_of(fault.text, show_range(segment.accelerators))
    return {"ranks": ranks, "on": on, "line": line, "span": _ranks_span(fault)}


def _uneven(fault: Fault) -> Facts:
    """Return name -> value for the error message about ranks that do not divide evenly over their accelerators.

    A segment is a piece `accelerators:ranks` of a placement text. `ranks`, `count`: numbers of ranks and accelerators
    of the segment. `lines`: two corrected lines, which mend all such segments of the text; one has fewer ranks, the
    other has more.
    """
    segments: Sequence[Segment] = fault.facts["segments"]
    segment: Segment = fault.facts["segment"]
    fewer: dict[Segment, int] = {}
    more: dict[Segment, int] = {}
    for uneven in fault.facts["uneven"]:
        ranks = len(uneven.ranks)
        accelerators = len(uneven.accelerators)
        if ranks > accelerators:
            fewer[uneven] = ranks // accelerators * accelerators
            more[uneven] = fewer[uneven] + accelerators
        else:
            fewer[uneven] = _largest_divisor(accelerators, ranks)
            more[uneven] = _next_divisor(accelerators, ranks)
    lines = []
    for counts in (fewer, more):
        lines.append(line_of(fault.text, _renumbered(segments, counts)))
    return {
        "ranks": len(segment.ranks),
        "count": len(segment.accelerators),
        "lines": one_of(dict.fromkeys(lines)),
    }


def _twice(fault: Fault) -> Facts:
    """Return name -> value for the error message about accelerators that are named twice.

    `numbers`: these accelerators, in words. `span`: their columns. `line`: a corrected line that names each accelerator
    once.
    """
    segments: Sequence[Segment] = fault.facts["segments"]
    once = Ranges.of(segment.accelerators for segment in segments)
    line = line_of(fault.text, str(once))
    if len(once.pieces) == 1:
        last = 2 * len(once) - 1
        line += f"        (or two ranks on each: {once}:0-{last})"
    numbers = named(fault.facts["pool"].noun, fault.facts["twice"], "is")
    return {"numbers": numbers, "line": line, "span": _numbers_span(fault)}


def _rank_order(fault: Fault) -> Facts:
    """Return name -> value for the error message about ranks that are given twice or left out.

    `ranks`: these ranks, in words. `span`: the columns of ranks. `line`: a corrected line with consecutive ranks.
    """
    ranks = named("rank", fault.facts["wrong"], "is")
    line = line_of(fault.text, _renumbered(fault.facts["segments"], {}))
    return {"ranks": ranks, "line": line, "span": _ranks_span(fault)}


def _cut_rank(fault: Fault) -> Facts:
    """Return name -> value for the error message about a rank that lies on two nodes or on two accelerator models.

    `rank`: the rank. `held`: its accelerators. `on`, `rule`: words about where it lies, and why that is wrong. `line`:
    a corrected line in which the ranks of all such segments have fewer accelerators.
    """
    pool: Pool = fault.facts["pool"]
    segment: Segment = fault.facts["segment"]
    before: Interval = fault.facts["before"]
    after: Interval = fault.facts["after"]
    counts: dict[Segment, int] = {}
    for cut in fault.facts["cut"]:
        each = _most_even([cut.accelerators], cut.accelerators_per_rank, pool)
        counts[cut] = len(cut.accelerators) // each
    fewer = len(segment.accelerators) // counts[segment]
    remark = f"{counted(fewer, pool.noun)} for each rank"
    at = after.first - segment.accelerators.start
    rank = segment.ranks.start + at // segment.accelerators_per_rank
    on, why = between(before, after, pool)
    return {
        "rank": rank,
        "held": show_range(segment.accelerators_of(rank)),
        "on": on,
        "rule": why,
        "line": line_of(
            fault.text, _renumbered(fault.facts["segments"], counts), remark
        ),
    }


def between(before: Interval, after: Interval, pool: Pool) -> tuple[str, str]:
    """Return (where, why): words for the error message about a rank that lies on both intervals.

    `before`, `after`: the intervals, which are on two nodes, or of two accelerator models. `pool`: what their numbers
    count.
    """
    if before.node == after.node:
        why = f"a rank uses accelerators of one product; on node {after.node} another one starts at {after.first}"
        return "of two products", why
    if pool.noun == NODE:
        return "and a rank is one process", "a process runs on one node"
    why = f"a rank is one process on one node, and node {after.node} starts at {pool.noun} {after.first}"
    return "on two nodes", why


def _spread(fault: Fault) -> Facts:
    """Return name -> value for the error message about ranks that cannot be spread evenly over numbers.

    `count`, `numbers`: how many numbers there are, and which. `size`: the largest number of accelerators per rank that
    fits. `first`, `on`, `rule`: if a rank would lie on two nodes or accelerator models, the number at which the second
    one begins, and words about it.
    """
    pool: Pool = fault.facts["pool"]
    piece: range = fault.facts["piece"]
    facts: Facts = {
        "count": len(piece),
        "numbers": show_range(piece),
        "size": _most_even(fault.facts["pieces"], fault.facts["each"], pool),
    }
    if "after" in fault.facts:
        after: Interval = fault.facts["after"]
        on, why = between(fault.facts["before"], after, pool)
        facts |= {"first": after.first, "on": on, "rule": why}
    return facts


def _renumbered(segments: Sequence[Segment], counts: Mapping[Segment, int]) -> str:
    """Return the segments as placement text, with ranks numbered from 0 without gaps.

    A segment is a piece `accelerators:ranks` of a placement text. `counts`: segment -> its new number of ranks; other
    segments keep their number.
    """
    renumbered: list[Segment] = []
    following = 0
    for segment in segments:
        ranks = range(following, following + counts.get(segment, len(segment.ranks)))
        renumbered.append(Segment(accelerators=segment.accelerators, ranks=ranks))
        following = ranks.stop
    return render_segments(renumbered)


def _most_even(pieces: Sequence[range], each: int, pool: Pool) -> int:
    """Return the largest number of accelerators per rank, below `each`, with which ranks fill all pieces; at least 1.

    No rank may lie on two nodes or accelerator models. `pieces`: numbers of the pool.
    """
    for size in range(each - 1, 1, -1):
        if all(
            len(piece) % size == 0 and pool.cut(piece, size) is None for piece in pieces
        ):
            return size
    return 1


def _next_divisor(number: int, least: int) -> int:
    """Return the smallest divisor of `number` that is at least `least`."""
    size = least
    while number % size:
        size += 1
    return size


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    size = min(number, most)
    while number % size:
        size -= 1
    return size


# ── Parallel sizes ──────────────────────────────────────────────────────────────────


def _uneven_copies(fault: Fault) -> Facts:
    """Return name -> value for the error message about accelerators that do not divide into whole copies of the model.

    `lines`: corrected lines with the nearest smaller and the nearest larger `tensor_parallel_size` that fit.
    """
    total = fault.facts["total"]
    tensor = fault.facts["sizes"].tensor_parallel_size
    larger = total
    if tensor < total:
        larger = _next_divisor(total, tensor)
    sizes = dict.fromkeys((_largest_divisor(total, tensor), larger))
    return {"lines": one_of(line_of(fault.text, size) for size in sizes)}


def _uneven_context(fault: Fault) -> Facts:
    """Return name -> value for the error message about a `context_parallel_size` that does not divide the copies.

    `copies`: the number of copies. `size`: the next smaller size that divides it.
    """
    sizes = fault.facts["sizes"]
    copies = fault.facts["total"] // sizes.tensor_parallel_size
    size = _largest_divisor(copies, sizes.context_parallel_size)
    return {"copies": copies, "size": size}


def _other_total(fault: Fault) -> Facts:
    """Return name -> value for the error message about parallel sizes whose product is not the number of accelerators.

    `each`: the sizes of one copy, as text. `product`: the product. `line`: a corrected line, with another number of
    copies or another size of a copy.
    """
    total = fault.facts["total"]
    sizes = fault.facts["sizes"]
    data = sizes.data_parallel_size
    each = f"{sizes.tensor_parallel_size}"
    if sizes.context_parallel_size > 1:
        each = f"{sizes.tensor_parallel_size} x {sizes.context_parallel_size}"
    fix = line_of(fault.text, total // sizes.ranks)
    if total % data == 0 and sizes.context_parallel_size == 1:
        fix = one_of([fix, f"tensor_parallel_size: {total // data}"])
    return {"each": each, "product": data * sizes.ranks, "line": fix}


def _copy_on_two_nodes(fault: Fault) -> Facts:
    """Return name -> value for the error message about a copy of the model that lies on two nodes.

    `fewer`: the largest smaller `tensor_parallel_size` with which no copy lies on two nodes.
    """
    lengths = fault.facts["lengths"]
    fewer = fault.facts["sizes"].tensor_parallel_size - 1
    while any(length % fewer for length in lengths):
        fewer -= 1
    return {"fewer": fewer}


WRITERS: Mapping[tuple[str, str], Writer] = {
    ("bad-placement", "other_type"): _other_type,
    ("bad-placement", "other_number"): _other_number,
    ("base-60-integer", ""): _base_60,
    ("reversed-range", ""): _reversed,
    ("bad-placement", "no_such_part"): _no_part,
    ("bad-placement", "part_of_none"): _no_part,
    ("rank-gap", "python_slice"): _slice,
    ("bad-placement", "colons"): _gaps,
    ("bad-placement", "no_number"): _gaps,
    ("bad-placement", "all_ranks"): _all_ranks,
    ("not-a-hyphen", ""): _dash,
    ("bad-placement", "unreadable"): _unreadable,
    ("bad-placement", "spread_already"): _without_ranks,
    ("bad-placement", "only_nodes"): _without_ranks,
    ("accelerator-out-of-range", "in_text"): _missing,
    ("node-out-of-range", "in_text"): _missing,
    ("too-many-ranks", "in_text"): _too_many,
    ("uneven-ranks", "in_text"): _uneven,
    ("duplicate-accelerator", "in_text"): _twice,
    ("rank-gap", "left_out"): _rank_order,
    ("duplicate-rank", ""): _rank_order,
    ("rank-spans-products", "in_text"): _cut_rank,
    ("rank-spans-nodes", "in_text"): _cut_rank,
    ("rank-spans-products", "spread"): _spread,
    ("rank-spans-nodes", "spread"): _spread,
    ("uneven-ranks", "spread"): _spread,
    ("parallel-sizes", "uneven_copies"): _uneven_copies,
    ("parallel-sizes", "uneven_context"): _uneven_context,
    ("parallel-sizes", "other_total"): _other_total,
    ("copy-spans-nodes", ""): _copy_on_two_nodes,
}
# Faults that one line mends, where every piece of the text can be translated.
IN_NUMBERS = {
    ("bad-placement", "other_type"),
    ("bad-placement", "other_number"),
    ("base-60-integer", ""),
    ("reversed-range", ""),
    ("bad-placement", "no_such_part"),
    ("bad-placement", "part_of_none"),
    ("rank-gap", "python_slice"),
    ("bad-placement", "colons"),
    ("bad-placement", "no_number"),
    ("bad-placement", "all_ranks"),
    ("not-a-hyphen", ""),
    ("bad-placement", "unreadable"),
}
