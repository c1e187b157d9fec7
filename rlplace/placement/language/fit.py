"""Do ranks fit where they are placed? Numbers exist and are used once, ranks divide evenly, none is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from rlplace.placement.language.faults import Fault
from rlplace.placement.language.spec import Parallel, Segment, Spread, parts
from rlplace.placement.language.text import Text
from rlplace.placement.machines.pools import NODE, Interval, Pool
from rlplace.placement.machines.topology import overlap

MOST_RANKS_EACH = 1024  # on one accelerator; more is a typing mistake


def has_no_ranks(text: Text, error: str, faults: list[Fault]) -> bool:
    """Return whether a placement text names no ranks, that is, has no ":". If it has a ":", add a fault to `faults`.

    `error`: name of the fault's error message, one of the messages of the error code `bad-placement`.
    """
    at = text.text.find(":")
    if at < 0:
        return True
    faults.append(Fault("bad-placement", text, error, (at, at + 1)))
    return False


def check_fit(
    text: Text, segments: Sequence[Segment], pool: Pool, faults: list[Fault]
) -> bool:
    """Return whether the ranks of `segments` fit on the numbers of the segments. If not, add faults to `faults`.

    A segment is a piece `accelerators:ranks` of a placement text. `text`: the placement as it was written. `pool`: what
    the numbers count. The time grows with the number of segments, not of ranks.
    """
    if not check_exist(text, segments, pool, faults):
        return False
    before = len(faults)
    _check_even(text, segments, pool, faults)
    even = len(faults) == before
    _check_duplicates(text, segments, pool, faults)
    _check_rank_order(text, segments, faults)
    if even:
        _check_cut(text, segments, pool, faults)
    return len(faults) == before


def check_exist(
    text: Text, segments: Sequence[Segment], pool: Pool, faults: list[Fault]
) -> bool:
    """Return whether all accelerator numbers of the segments exist in the pool.

    A segment is a piece `accelerators:ranks` of a placement text. A fault is added to `faults` for each segment with a
    number that does not exist. `text`: the placement as it was written.
    """
    code = "accelerator-out-of-range"
    if pool.noun == NODE:
        code = "node-out-of-range"
    exist = True
    for segment in segments:
        numbers = segment.accelerators
        if numbers.stop <= pool.count:
            continue
        exist = False
        facts = {"segment": segment, "segments": segments, "pool": pool}
        faults.append(Fault(code, text, "in_text", segment.span, facts))
    return exist


def _check_even(
    text: Text, segments: Sequence[Segment], pool: Pool, faults: list[Fault]
) -> None:
    """Add a fault for each segment with too many ranks per accelerator, or with an uneven number of ranks.

    A segment is a piece `accelerators:ranks` of a placement text. The number is uneven if neither the number of ranks
    divides the number of accelerators, nor the reverse. `text`: the placement as it was written.
    """
    uneven: list[Segment] = []
    for segment in segments:
        ranks = segment.ranks.stop - segment.ranks.start
        accelerators = len(segment.accelerators)
        if ranks > MOST_RANKS_EACH * accelerators:
            facts = {"segment": segment, "most": MOST_RANKS_EACH, "pool": pool}
            fault = Fault("too-many-ranks", text, "in_text", segment.span, facts)
            faults.append(fault)
        elif _is_uneven(segment):
            uneven.append(segment)
    for segment in uneven:
        facts = {
            "segment": segment,
            "segments": segments,
            "uneven": uneven,
            "pool": pool,
        }
        faults.append(Fault("uneven-ranks", text, "in_text", segment.span, facts))


def _is_uneven(segment: Segment) -> bool:
    """Return whether a segment's ranks cannot be spread evenly over its accelerators.

    A segment is a piece `accelerators:ranks` of a placement text. An even spread is possible if one of the two numbers
    divides the other.
    """
    ranks = len(segment.ranks)
    accelerators = len(segment.accelerators)
    return bool(ranks % accelerators) and bool(accelerators % ranks)


def _check_duplicates(
    text: Text, segments: Sequence[Segment], pool: Pool, faults: list[Fault]
) -> None:
    """Add a fault for each segment that has an accelerator number which is also in another segment.

    A segment is a piece `accelerators:ranks` of a placement text. `text`: the placement as it was written.
    """
    # By their first numbers: a segment overlaps the one that reaches furthest, or none.
    reach, *ordered = sorted(segments, key=lambda s: s.accelerators.start)
    for segment in ordered:
        twice = overlap(segment.accelerators, reach.accelerators)
        if twice:
            second = max(segment, reach, key=attrgetter("span"))
            facts = {"twice": twice, "segments": segments, "pool": pool}
            fault = Fault("duplicate-accelerator", text, "in_text", second.span, facts)
            faults.append(fault)
        reach = max(segment, reach, key=lambda s: s.accelerators.stop)


def _check_rank_order(
    text: Text, segments: Sequence[Segment], faults: list[Fault]
) -> None:
    """Add a fault if ranks are given twice or left out; only the first such mistake is reported.

    The mistake shifts all later ranks, so further faults would only follow from it.
    """
    expected = 0
    for segment in sorted(segments, key=lambda s: s.ranks.start):
        ranks = segment.ranks
        if ranks.start == expected:
            expected = ranks.stop
            continue
        code = "duplicate-rank"
        wrong = range(ranks.start, min(expected, ranks.stop))
        error = ""
        if ranks.start > expected:
            code = "rank-gap"
            wrong = range(expected, ranks.start)
            error = "left_out"
        facts = {"wrong": wrong, "segments": segments}
        faults.append(Fault(code, text, error, segment.span, facts))
        return


def _check_cut(
    text: Text, segments: Sequence[Segment], pool: Pool, faults: list[Fault]
) -> None:
    """Add a fault for each segment with a rank that would lie on two nodes or on two accelerator models.

    A segment is a piece `accelerators:ranks` of a placement text.
    """
    # A segment, and the interval that begins within one of its ranks
    cut: list[tuple[Segment, Interval]] = []
    for segment in segments:
        after = pool.cut(segment.accelerators, segment.accelerators_per_rank)
        if after is not None:
            cut.append((segment, after))
    for segment, after in cut:
        before = pool.interval_of(after.first - 1)
        facts = {
            "segment": segment,
            "before": before,
            "after": after,
            "segments": segments,
            "cut": [other for other, _ in cut],
            "pool": pool,
        }
        code = crossing(before, after)
        faults.append(Fault(code, text, "in_text", segment.span, facts))


def crossing(before: Interval, after: Interval) -> str:
    """Return the error code for a rank that lies on two intervals: "rank-spans-nodes" or "rank-spans-products".

    `before`, `after`: the intervals, which are on two nodes, or on one node but of two accelerator models.
    """
    if before.node == after.node:
        return "rank-spans-products"
    return "rank-spans-nodes"


def respread(
    text: Text,
    pieces: Iterable[range],
    pool: Pool,
    spread: Spread,
    faults: list[Fault],
) -> tuple[Segment, ...]:
    """Return segments with consecutive ranks, which are spread over `pieces` by the rule `spread`.

    A segment is a piece `accelerators:ranks` of a placement text. `pieces`: numbers of the pool. If a rank would lie on
    two nodes or accelerator models, or numbers would be left over, a fault is added to `faults` and the result is ().
    """
    each = spread.each
    # Neighbouring pieces are one: a rank may lie across their border.
    together: list[range] = []
    for piece in pieces:
        if together and together[-1].stop == piece.start:
            together[-1] = range(together[-1].start, piece.stop)
        else:
            together.append(piece)
    for piece in together:
        after = pool.cut(piece, each)
        facts: dict[str, object] = {
            "piece": piece,
            "pieces": together,
            "each": each,
            "pool": pool,
        }
        code = "uneven-ranks"
        if after is not None:
            before = pool.interval_of(after.first - 1)
            code = crossing(before, after)
            facts["before"] = before
            facts["after"] = after
        elif len(piece) % each == 0:
            continue
        faults.append(Fault(code, text, "spread", facts=facts))
        return ()
    return spread.over(together)


def check_parallel(
    line: Text,
    name: str,
    parallel: Parallel,
    pool: Pool,
    segments: Sequence[Segment],
    faults: list[Fault],
) -> bool:
    """Return whether the parallel sizes of a line fit its segments. If not, add a fault to `faults`.

    A segment is a piece `accelerators:ranks` of a placement text. The sizes fit if the accelerators divide into whole
    copies of the model, and each copy is on one node unless the line allows two nodes. `line`: the line as it was
    written. `name`: the component. `parallel`: the sizes.
    """
    tensor = parallel.tensor_parallel_size
    context = parallel.context_parallel_size
    data = parallel.data_parallel_size
    if parallel.ranks == 1 and data is None:
        return True
    total = sum(len(segment.accelerators) for segment in segments)
    sharing = max(segment.ranks_per_accelerator for segment in segments)
    uneven = _uneven_rank(segments, tensor)

    # The first size that is wrong, if any.
    largest = "data_parallel_size"
    if tensor > 1:
        largest = "tensor_parallel_size"
    elif context > 1:
        largest = "context_parallel_size"
    code = "parallel-sizes"
    facts: dict[str, object] = {"name": name, "total": total, "pool": pool}
    if not pool.holds_accelerators:
        key = largest
        error = "no_accelerators"
    elif sharing > 1 and parallel.ranks > 1:
        key = largest
        error = "shared"
        facts["sharing"] = sharing
    elif total % tensor:
        key = "tensor_parallel_size"
        error = "uneven_copies"
    elif total % parallel.ranks:
        key = "context_parallel_size"
        error = "uneven_context"
    elif data is not None and data * parallel.ranks != total:
        key = "data_parallel_size"
        error = "other_total"
    elif uneven is not None:
        key = "tensor_parallel_size"
        error = "uneven_ranks"
        facts["each"] = uneven
    elif parallel.across_nodes:
        return True
    else:
        crossed = _crossing_copy(tensor, pool, segments)
        if crossed is None:
            return True
        key = "tensor_parallel_size"
        code = "copy-spans-nodes"
        error = ""
        facts |= crossed
    facts["sizes"] = parallel
    faults.append(Fault(code, line.entries[key], error, facts=facts))
    return False


def _uneven_rank(segments: Sequence[Segment], tensor: int) -> int | None:
    """Return the accelerators per rank of the first segment whose ranks do not fit copies of the model; None: all fit.

    A segment is a piece `accelerators:ranks` of a placement text. A rank fits if it has whole copies, or if whole ranks
    make up one copy. `tensor`: accelerators of one copy.
    """
    for segment in segments:
        each = segment.accelerators_per_rank
        if each % tensor and tensor % each:
            return each
    return None


def _crossing_copy(
    tensor: int, pool: Pool, segments: Sequence[Segment]
) -> dict[str, object] | None:
    """Return values for the error message about the first copy of the model that lies on two nodes; None: no copy does.

    `tensor`: accelerators of one copy of the model.
    """
    pieces: list[tuple[Interval, range]] = []
    for segment in sorted(segments, key=lambda s: s.ranks.start):
        pieces += parts(segment, pool)
    # Accelerators of the copy under way
    filled = 0
    # Node of the copy under way
    began = -1
    for interval, numbers in pieces:
        if filled and interval.node != began:
            lengths = [len(piece) for _, piece in pieces]
            return {"began": began, "interval": interval, "lengths": lengths}
        filled = (filled + len(numbers)) % tensor
        began = interval.node
    return None
