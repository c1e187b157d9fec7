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
    beyond = [
        (s.accelerators, _columns(text, s, 0))
        for s in segments
        if s.accelerators.stop > pool.count
    ]
    # A count taken for the last number; other numbers may be of a larger cluster, or count from 1.
    one = (
        len(segments) == 1
        and ":" not in text.text
        and segments[0].accelerators == range(pool.count + 1)
    )
    fix = text.line(show_range(range(pool.count))) if one else text.open_line()
    code = "node-out-of-range" if pool.noun == NODE else "accelerator-out-of-range"
    why = f"ranges include both ends, and {pool.describe()}"
    for numbers, span in beyond:
        missing = range(max(numbers.start, pool.count), numbers.stop)
        if numbers.start < pool.count:
            span = stripped(text.text, text.text.rindex("-", *span) + 1, span[1])
        text.reject(
            code,
            f"{named(pool.noun, missing, 'does', 'do')} not exist",
            why,
            fix,
            span=span,
        )
    return not beyond


def _columns(text: Text, segment: Segment, index: int) -> tuple[int, int]:
    """Return the columns before (0) or, where there is one, after (1) the colon of a segment."""
    found = list(split_at(text.text, ":", *segment.span))
    return stripped(text.text, *found[min(index, len(found) - 1)])


def _check_even(text: Text, segments: Sequence[Segment], pool: Pool) -> None:
    """Reject numbers of ranks that are too large, or neither a multiple nor a divisor of the accelerators."""
    below: dict[Segment, int] = {}  # the nearest numbers of ranks that divide evenly
    above: dict[Segment, int] = {}
    for segment in segments:
        ranks = segment.ranks.stop - segment.ranks.start
        accelerators = len(segment.accelerators)
        if ranks > MOST_RANKS_EACH * accelerators:
            what = f"{ranks:,} ranks on {counted(accelerators, pool.noun)}"
            why = f"a rank is a process; more than {MOST_RANKS_EACH:,} on one {pool.noun} are a typing mistake"
            fix = text.line(show_range(segment.accelerators))
            text.reject(
                "too-many-ranks", what, why, fix, span=_columns(text, segment, 1)
            )
        elif ranks > accelerators and ranks % accelerators:
            below[segment] = ranks // accelerators * accelerators
            above[segment] = below[segment] + accelerators
        elif accelerators % ranks and ranks < accelerators:
            below[segment] = largest_divisor(accelerators, ranks)
            above[segment] = next(
                n for n in range(ranks, accelerators + 1) if accelerators % n == 0
            )
    low, high = (text.line(_renumbered(segments, counts)) for counts in (below, above))
    why = (
        f"the number of ranks is a multiple or a divisor of the number of {pool.noun}s"
    )
    for segment in below:
        what = f"{len(segment.ranks)} ranks do not divide over {len(segment.accelerators)} {pool.noun}s"
        text.reject(
            "uneven-ranks",
            what,
            why,
            one_of(dict.fromkeys((low, high))),
            span=segment.span,
        )


def _check_duplicates(text: Text, segments: Sequence[Segment], pool: Pool) -> None:
    reach, *ordered = sorted(segments, key=lambda s: s.accelerators.start)
    for segment in ordered:
        if twice := overlap(segment.accelerators, reach.accelerators):
            once = Ranges.of(s.accelerators for s in segments)
            fix = text.line(str(once))
            if len(once.pieces) == 1:
                fix += f"        (or two ranks on each: {once}:0-{2 * len(once) - 1})"
            why = f"several ranks share one {pool.noun} when they are written as one segment, accelerators:ranks"
            span = _columns(text, max(segment, reach, key=attrgetter("span")), 0)
            text.reject(
                "duplicate-accelerator",
                f"{named(pool.noun, twice, 'is')} given twice",
                why,
                fix,
                span=span,
            )
        reach = max(segment, reach, key=lambda s: s.accelerators.stop)


def _check_rank_order(text: Text, segments: Sequence[Segment]) -> None:
    """Reject the first ranks that are given twice or left out; it shifts all that follow."""
    expected = 0
    for segment in sorted(segments, key=lambda s: s.ranks.start):
        ranks = segment.ranks
        if ranks.start != expected:
            code, verb = (
                ("rank-gap", "left out")
                if ranks.start > expected
                else ("duplicate-rank", "given twice")
            )
            wrong = range(expected, ranks.start) or range(
                ranks.start, min(expected, ranks.stop)
            )
            why = "the ranks of a component are 0, 1, 2, ..., each once"
            fix = text.line(_renumbered(segments, {}))
            text.reject(
                code,
                f"{named('rank', wrong, 'is')} {verb}",
                why,
                fix,
                span=_columns(text, segment, 1),
            )
            return
        expected = ranks.stop


def _check_cut(text: Text, segments: Sequence[Segment], pool: Pool) -> None:
    """Reject a rank with parts on two nodes, or on accelerators of two products."""
    cut = [
        (s, after)
        for s in segments
        if (after := pool.cut(s.accelerators, s.accelerators_per_rank)) is not None
    ]
    fewer = {s: _fewer(s.accelerators, s.accelerators_per_rank, pool) for s, _ in cut}
    placed = _renumbered(
        segments, {s: len(s.accelerators) // each for s, each in fewer.items()}
    )
    for segment, after in cut:
        rank = (
            segment.ranks.start
            + (after.first - segment.accelerators.start)
            // segment.accelerators_per_rank
        )
        code, on, why = cut_between(pool.interval_of(after.first - 1), after, pool)
        what = f"rank {rank} would hold {pool.noun}s {show_range(segment.accelerators_of(rank))}, {on}"
        remark = f"{counted(fewer[segment], pool.noun)} for each rank"
        text.reject(code, what, why, text.line(placed, remark), span=segment.span)


def _fewer(numbers: range, each: int, pool: Pool) -> int:
    """Return the most accelerators a rank may have instead of `each`, so that none is cut."""
    return next(
        n
        for n in range(each - 1, 0, -1)
        if len(numbers) % n == 0 and pool.cut(numbers, n) is None
    )


def largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def cut_between(before: Interval, after: Interval, pool: Pool) -> tuple[str, str, str]:
    """Return (code, what, why) of a rank that lies on both intervals."""
    if before.node == after.node:
        why = f"a rank uses accelerators of one product; on node {after.node} another one starts at {after.first}"
        return "rank-spans-products", "of two products", why
    if pool.noun == NODE:
        return (
            "rank-spans-nodes",
            "and a rank is one process",
            "a process runs on one node",
        )
    why = f"a rank is one process on one node, and node {after.node} starts at {pool.noun} {after.first}"
    return "rank-spans-nodes", "on two nodes", why


def _renumbered(segments: Sequence[Segment], counts: Mapping[Segment, int]) -> str:
    """Write the placement with consecutive ranks; `counts` changes how many ranks a segment has."""
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
    """Spread ranks of `each` numbers, or `sharing` per number, over `pieces`; record what does not fit, give none."""
    joined: list[range] = []
    for piece in pieces:
        follows = joined and joined[-1].stop == piece.start
        joined.append(range(joined.pop().start, piece.stop) if follows else piece)
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
        divides = (
            n
            for n in range(each - 1, 0, -1)
            if all(len(p) % n == 0 and pool.cut(p, n) is None for p in joined)
        )
        text.reject(code, what, why, f"accelerators_per_rank: {next(divides)}")
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
    text = line.child("tensor_parallel_size", tensor)
    total = sum(len(s.accelerators) for s in segments)
    sharing = max(s.ranks_per_accelerator for s in segments)
    fix: int | str
    uneven = next(
        (e for s in segments if (e := s.accelerators_per_rank) % tensor and tensor % e),
        None,
    )
    if not pool.holds_accelerators:
        given = (
            (text, tensor),
            (line.child("context_parallel_size", context), context),
        )
        text = next(
            (found for found, size in given if size > 1),
            line.child("data_parallel_size", data),
        )
        what = f"there are only {pool.noun}s here"
        why = f"a model is sliced over accelerators; {pool.describe()}"
        fix = f"remove {text.leaf}"
    elif sharing > 1 and parallel.ranks > 1:
        text = text if tensor > 1 else line.child("context_parallel_size", context)
        what = f"{sharing} ranks share each accelerator"
        why = "a sliced copy has each accelerator for itself"
        fix = text.line(1, "or one rank per accelerator")
    elif total % tensor:
        what = f"{total} accelerators do not divide into copies of {tensor}"
        larger = (
            next(n for n in range(tensor, total + 1) if total % n == 0)
            if tensor < total
            else total
        )
        fix = one_of(
            text.line(n)
            for n in dict.fromkeys((largest_divisor(total, tensor), larger))
        )
        why = f"{name} is on {total} accelerators; each copy takes {tensor} of them"
    elif total % parallel.ranks:
        text = line.child("context_parallel_size", context)
        fix = largest_divisor(total // tensor, context)
        what = (
            f"{total // tensor} copies do not divide into {context} for the same tokens"
        )
        why = f"{name} is on {total} accelerators, {tensor} for each copy; so many copies have the tokens between them"
    elif data is not None and data * parallel.ranks != total:
        text = line.child("data_parallel_size", data)
        sizes = [f"tensor_parallel_size: {total // data}"] * (
            total % data == 0 and context == 1
        )
        fix = (
            one_of([text.line(total // parallel.ranks), *sizes])
            if sizes
            else total // parallel.ranks
        )
        each = f"{tensor} x {context}" if context > 1 else f"{tensor}"
        what = f"{data} copies x {each} = {data * parallel.ranks} accelerators, placed on {total}"
        why = (
            f"the copies together use exactly the {total} accelerators that {name} has"
        )
    elif uneven is not None:
        what = f"ranks of {uneven} accelerators do not divide into copies of {tensor}"
        fix = uneven
        why = "a rank holds whole copies, or a copy is made of whole ranks"
    else:
        return parallel.across_nodes or _copies_on_one_node(
            text, tensor, pool, segments
        )
    text.reject(
        "parallel-sizes", what, why, fix if isinstance(fix, str) else text.line(fix)
    )
    return False


def _copies_on_one_node(
    text: Text, tensor: int, pool: Pool, segments: Sequence[Segment]
) -> bool:
    filled = 0
    began = -1  # accelerators of the copy under way, and the node it is on
    pieces = [
        part
        for s in sorted(segments, key=lambda s: s.ranks.start)
        for part in parts(s, pool)
    ]
    for interval, numbers in pieces:
        if filled and interval.node != began:
            what = f"a copy of {tensor} would lie on nodes {began} and {interval.node}"
            why = f"slices exchange data in every step; node {interval.node} starts at accelerator {interval.first}"
            fewer = next(
                n
                for n in range(tensor - 1, 0, -1)
                if all(len(piece) % n == 0 for _, piece in pieces)
            )
            fix = text.line(fewer, "or accept it: tensor_parallel_across_nodes: true")
            text.reject("copy-spans-nodes", what, why, fix)
            return False
        filled = (filled + len(numbers)) % tensor
        began = interval.node
    return True
