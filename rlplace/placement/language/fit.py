"""Check that ranks fit where they are placed: numbers exist and are used once, ranks divide evenly, none is cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from rlplace.errors import one_of
from rlplace.placement.language.grammar import split_at, stripped
from rlplace.placement.language.spec import (
    Parallel,
    Segment,
    parts,
    render_segments,
    spread,
)
from rlplace.placement.language.text import Text
from rlplace.placement.machines.pools import NODE, Interval, Pool
from rlplace.placement.machines.topology import Ranges, named, overlap, show_range
from rlplace.units import counted

MOST_RANKS_EACH = 1024  # on one accelerator; more is a typing mistake


def check_fit(text: Text, segments: Sequence[Segment], pool: Pool) -> bool:
    """Check one written placement; record its problems, one fix per kind. Costs grow with segments, not ranks."""
    if not check_exist(text, segments, pool):
        return False
    before = len(text.problems)
    _check_even(text, segments, pool)
    even = len(text.problems) == before
    _check_duplicates(text, segments, pool)
    _check_rank_order(text, segments)
    if even:
        _check_cut(text, segments, pool)
    return len(text.problems) == before


def check_exist(text: Text, segments: Sequence[Segment], pool: Pool) -> bool:
    """Check that the pool has all these numbers."""
    code = "accelerator-out-of-range"
    if pool.noun == NODE:
        code = "node-out-of-range"
    why = f"ranges include both ends, and {pool.describe()}"
    fix = text.open_line()
    if _ends_with_count(text, segments, pool):
        fix = text.line(show_range(range(pool.count)))
    exist = True
    for segment in segments:
        numbers = segment.accelerators
        if numbers.stop <= pool.count:
            continue
        exist = False
        span = _columns(text, segment, 0)
        if numbers.start < pool.count:
            # Only the last number of the range is wrong.
            span = stripped(text.text, text.text.rindex("-", *span) + 1, span[1])
        missing = range(max(numbers.start, pool.count), numbers.stop)
        what = f"{named(pool.noun, missing, 'does', 'do')} not exist"
        text.reject(code, what, why, fix, span=span)
    return exist


def _ends_with_count(text: Text, segments: Sequence[Segment], pool: Pool) -> bool:
    """Whether the count was taken for the last number, as in `0-8` of eight.

    Other numbers may be of a larger cluster, or counted from 1.
    """
    if len(segments) != 1 or ":" in text.text:
        return False
    return segments[0].accelerators == range(pool.count + 1)


def _columns(text: Text, segment: Segment, index: int) -> tuple[int, int]:
    """Return the columns before (0) or, where there is one, after (1) the colon of a segment."""
    found = list(split_at(text.text, ":", *segment.span))
    return stripped(text.text, *found[min(index, len(found) - 1)])


def _check_even(text: Text, segments: Sequence[Segment], pool: Pool) -> None:
    """Reject numbers of ranks that are too large, or neither a multiple nor a divisor of the accelerators."""
    # Segment -> the nearest numbers of ranks that divide evenly.
    below: dict[Segment, int] = {}
    above: dict[Segment, int] = {}
    for segment in segments:
        ranks = segment.ranks.stop - segment.ranks.start
        accelerators = len(segment.accelerators)
        if ranks > MOST_RANKS_EACH * accelerators:
            what = f"{ranks:,} ranks on {counted(accelerators, pool.noun)}"
            why = f"a rank is a process; more than {MOST_RANKS_EACH:,} on one {pool.noun} are a typing mistake"
            fix = text.line(show_range(segment.accelerators))
            span = _columns(text, segment, 1)
            text.reject("too-many-ranks", what, why, fix, span=span)
        elif ranks > accelerators and ranks % accelerators:
            below[segment] = ranks // accelerators * accelerators
            above[segment] = below[segment] + accelerators
        elif accelerators % ranks and ranks < accelerators:
            below[segment] = largest_divisor(accelerators, ranks)
            above[segment] = _next_divisor(accelerators, ranks)

    # One fix for all: fewer ranks, or more.
    fewer = text.line(_renumbered(segments, below))
    more = text.line(_renumbered(segments, above))
    fix = one_of(dict.fromkeys((fewer, more)))
    why = (
        f"the number of ranks is a multiple or a divisor of the number of {pool.noun}s"
    )
    for segment in below:
        accelerators = len(segment.accelerators)
        what = (
            f"{len(segment.ranks)} ranks do not divide over {accelerators} {pool.noun}s"
        )
        text.reject("uneven-ranks", what, why, fix, span=segment.span)


def _check_duplicates(text: Text, segments: Sequence[Segment], pool: Pool) -> None:
    """Reject numbers that are in two segments."""
    # By their first numbers: a segment overlaps the one that reaches furthest, or none.
    reach, *ordered = sorted(segments, key=lambda s: s.accelerators.start)
    for segment in ordered:
        twice = overlap(segment.accelerators, reach.accelerators)
        if twice:
            what = f"{named(pool.noun, twice, 'is')} given twice"
            why = f"several ranks share one {pool.noun} when they are written as one segment, accelerators:ranks"
            once = Ranges.of(s.accelerators for s in segments)
            fix = text.line(str(once))
            if len(once.pieces) == 1:
                last = 2 * len(once) - 1
                fix += f"        (or two ranks on each: {once}:0-{last})"
            second = max(segment, reach, key=attrgetter("span"))
            span = _columns(text, second, 0)
            text.reject("duplicate-accelerator", what, why, fix, span=span)
        reach = max(segment, reach, key=lambda s: s.accelerators.stop)


def _check_rank_order(text: Text, segments: Sequence[Segment]) -> None:
    """Reject the first ranks that are given twice or left out: all ranks after them are shifted."""
    expected = 0
    for segment in sorted(segments, key=lambda s: s.ranks.start):
        ranks = segment.ranks
        if ranks.start == expected:
            expected = ranks.stop
            continue
        if ranks.start > expected:
            code = "rank-gap"
            left_out = range(expected, ranks.start)
            what = f"{named('rank', left_out, 'is')} left out"
        else:
            code = "duplicate-rank"
            twice = range(ranks.start, min(expected, ranks.stop))
            what = f"{named('rank', twice, 'is')} given twice"
        why = "the ranks of a component are 0, 1, 2, ..., each once"
        fix = text.line(_renumbered(segments, {}))
        text.reject(code, what, why, fix, span=_columns(text, segment, 1))
        return


def _check_cut(text: Text, segments: Sequence[Segment], pool: Pool) -> None:
    """Reject a rank with parts on two nodes, or on accelerators of two products."""
    # The interval begins within a rank
    cut: list[tuple[Segment, Interval]] = []
    fewer: dict[Segment, int] = {}
    counts: dict[Segment, int] = {}
    for segment in segments:
        numbers = segment.accelerators
        after = pool.cut(numbers, segment.accelerators_per_rank)
        if after is not None:
            cut.append((segment, after))
            each = _fewer(numbers, segment.accelerators_per_rank, pool)
            fewer[segment] = each
            counts[segment] = len(numbers) // each

    # One placement with fewer accelerators for each rank mends all segments.
    placed = _renumbered(segments, counts)
    for segment, after in cut:
        before_cut = after.first - segment.accelerators.start
        rank = segment.ranks.start + before_cut // segment.accelerators_per_rank
        held = show_range(segment.accelerators_of(rank))
        code, on, why = cut_between(pool.interval_of(after.first - 1), after, pool)
        what = f"rank {rank} would hold {pool.noun}s {held}, {on}"
        remark = f"{counted(fewer[segment], pool.noun)} for each rank"
        text.reject(code, what, why, text.line(placed, remark), span=segment.span)


def _fewer(numbers: range, each: int, pool: Pool) -> int:
    """Return the most accelerators a rank may have instead of `each`, so that none is cut."""
    return _most_even([numbers], each, pool)


def _most_even(pieces: Sequence[range], each: int, pool: Pool) -> int:
    """Return the largest size below `each` in which ranks fill all pieces and none is cut; 1 always does."""
    for size in range(each - 1, 1, -1):
        if all(
            len(piece) % size == 0 and pool.cut(piece, size) is None for piece in pieces
        ):
            return size
    return 1


def _next_divisor(number: int, least: int) -> int:
    """Return the smallest divisor of `number` from `least` on."""
    size = least
    while number % size:
        size += 1
    return size


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is not above `most`."""
    size = min(number, most)
    while number % size:
        size -= 1
    return size


def cut_between(before: Interval, after: Interval, pool: Pool) -> tuple[str, str, str]:
    """Return (code, what, why) of a rank that lies on both intervals."""
    if before.node == after.node:
        why = f"a rank uses accelerators of one product; on node {after.node} another one starts at {after.first}"
        return "rank-spans-products", "of two products", why
    if pool.noun == NODE:
        why = "a process runs on one node"
        return "rank-spans-nodes", "and a rank is one process", why
    why = f"a rank is one process on one node, and node {after.node} starts at {pool.noun} {after.first}"
    return "rank-spans-nodes", "on two nodes", why


def _renumbered(segments: Sequence[Segment], counts: Mapping[Segment, int]) -> str:
    """Write the placement with consecutive ranks. `counts`: segment -> its new number of ranks."""
    renumbered: list[Segment] = []
    following = 0
    for segment in segments:
        ranks = range(following, following + counts.get(segment, len(segment.ranks)))
        renumbered.append(Segment(accelerators=segment.accelerators, ranks=ranks))
        following = ranks.stop
    return render_segments(renumbered)


def respread(
    text: Text, pieces: Iterable[range], pool: Pool, each: int, sharing: int
) -> tuple[Segment, ...]:
    """Spread ranks of `each` numbers, or `sharing` ranks for each number, over `pieces`.

    Return () where a rank would be cut or left over; the problem is recorded.
    """
    # Neighbouring pieces are one: a rank may lie across their border.
    joined: list[range] = []
    for piece in pieces:
        if joined and joined[-1].stop == piece.start:
            joined[-1] = range(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    for piece in joined:
        after = pool.cut(piece, each)
        if after is not None:
            code, on, why = cut_between(pool.interval_of(after.first - 1), after, pool)
            what = f"a rank of {each} {pool.noun}s would lie on both sides of {pool.noun} {after.first}, {on}"
        elif len(piece) % each:
            code = "uneven-ranks"
            why = f"a rank has {each} neighbours: accelerators_per_rank"
            what = f"{len(piece)} neighbouring {pool.noun}s ({show_range(piece)}) do not divide into ranks of {each}"
        else:
            continue
        size = _most_even(joined, each, pool)
        text.reject(code, what, why, f"accelerators_per_rank: {size}")
        return ()
    return spread(joined, each, sharing)


def check_parallel(
    line: Text, name: str, parallel: Parallel, pool: Pool, segments: Sequence[Segment]
) -> bool:
    """Check that the parallel sizes of a line fit its segments: copies are whole, each on one node."""
    tensor = parallel.tensor_parallel_size
    context = parallel.context_parallel_size
    data = parallel.data_parallel_size
    if parallel.ranks == 1 and data is None:
        return True
    # The sizes as they stand in the line, for the problems.
    tensor_text = line.child("tensor_parallel_size", tensor)
    context_text = line.child("context_parallel_size", context)
    data_text = line.child("data_parallel_size", data)
    total = sum(len(segment.accelerators) for segment in segments)
    sharing = max(segment.ranks_per_accelerator for segment in segments)
    uneven = _uneven_rank(segments, tensor)

    if not pool.holds_accelerators:
        text = data_text
        if tensor > 1:
            text = tensor_text
        elif context > 1:
            text = context_text
        what = f"there are only {pool.noun}s here"
        why = f"a model is sliced over accelerators; {pool.describe()}"
        fix = f"remove {text.leaf}"
    elif sharing > 1 and parallel.ranks > 1:
        text = context_text
        if tensor > 1:
            text = tensor_text
        what = f"{sharing} ranks share each accelerator"
        why = "a sliced copy has each accelerator for itself"
        fix = text.line(1, "or one rank per accelerator")
    elif total % tensor:
        text = tensor_text
        what = f"{total} accelerators do not divide into copies of {tensor}"
        why = f"{name} is on {total} accelerators; each copy takes {tensor} of them"
        larger = total
        if tensor < total:
            larger = _next_divisor(total, tensor)
        sizes = dict.fromkeys((largest_divisor(total, tensor), larger))
        fix = one_of(text.line(size) for size in sizes)
    elif total % parallel.ranks:
        text = context_text
        copies = total // tensor
        what = f"{copies} copies do not divide into {context} for the same tokens"
        why = f"{name} is on {total} accelerators, {tensor} for each copy; so many copies have the tokens between them"
        fix = text.line(largest_divisor(copies, context))
    elif data is not None and data * parallel.ranks != total:
        text = data_text
        each = f"{tensor}"
        if context > 1:
            each = f"{tensor} x {context}"
        asked = data * parallel.ranks
        what = f"{data} copies x {each} = {asked} accelerators, placed on {total}"
        why = (
            f"the copies together use exactly the {total} accelerators that {name} has"
        )
        fix = text.line(total // parallel.ranks)
        if total % data == 0 and context == 1:
            fix = one_of([fix, f"tensor_parallel_size: {total // data}"])
    elif uneven is not None:
        text = tensor_text
        what = f"ranks of {uneven} accelerators do not divide into copies of {tensor}"
        why = "a rank holds whole copies, or a copy is made of whole ranks"
        fix = text.line(uneven)
    elif parallel.across_nodes:
        return True
    else:
        return _copies_on_one_node(tensor_text, tensor, pool, segments)
    text.reject("parallel-sizes", what, why, fix)
    return False


def _uneven_rank(segments: Sequence[Segment], tensor: int) -> int | None:
    """Return the accelerators of a rank that is neither whole copies nor a whole part of one."""
    for segment in segments:
        each = segment.accelerators_per_rank
        if each % tensor and tensor % each:
            return each
    return None


def _copies_on_one_node(
    text: Text, tensor: int, pool: Pool, segments: Sequence[Segment]
) -> bool:
    """Check that no copy of a model lies on two nodes. `text`: of the tensor parallel size."""
    pieces: list[tuple[Interval, range]] = []
    for segment in sorted(segments, key=lambda s: s.ranks.start):
        pieces += parts(segment, pool)
    # Accelerators of the copy under way
    filled = 0
    # Node of the copy under way
    began = -1
    for interval, numbers in pieces:
        if filled and interval.node != began:
            what = f"a copy of {tensor} would lie on nodes {began} and {interval.node}"
            why = f"slices exchange data in every step; node {interval.node} starts at accelerator {interval.first}"
            fewer = tensor - 1
            while any(len(piece) % fewer for _, piece in pieces):
                fewer -= 1
            fix = text.line(fewer, "or accept it: tensor_parallel_across_nodes: true")
            text.reject("copy-spans-nodes", what, why, fix)
            return False
        filled = (filled + len(numbers)) % tensor
        began = interval.node
    return True
