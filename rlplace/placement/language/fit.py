"""Whether one component's segments fit their pool: they exist, are used once, divide evenly, and no rank is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import attrgetter

from rlplace.errors import Problem
from rlplace.placement.language.grammar import MOST_MISTAKES
from rlplace.placement.language.spec import Segment, render_segments
from rlplace.placement.language.written import Written
from rlplace.placement.machines.pools import NODE, Pool, Stretch
from rlplace.placement.machines.ranges import Mistake, Ranges, show_range

RULE_RANKS = "the ranks of a component are 0, 1, 2, ..., each given exactly once"
MOST_RANKS_EACH = 1024  # on one accelerator; more is a typing mistake


def check_fit(written: Written, segments: Sequence[Segment], pool: Pool) -> list[Problem]:
    """Every problem of one written placement. Linear in segments and the nodes they cover, whatever the ranks."""
    if problems := check_exist(written, segments, pool):
        return problems  # what follows would be said about numbers that are not there
    wrong = (p for s in segments if (p := _too_many(written, s, pool) or _uneven(written, s, segments, pool)))
    uneven = list(islice(wrong, MOST_MISTAKES))
    problems = uneven + _duplicates(written, segments, pool)[:MOST_MISTAKES] + _rank_order(written, segments)
    if not uneven:
        cut = (p for s in segments if (p := _cut(written, s, segments, pool)) is not None)
        problems += islice(cut, MOST_MISTAKES)
    return problems


def check_exist(written: Written, segments: Sequence[Segment], pool: Pool) -> list[Problem]:
    """Numbers that the pool does not have."""
    missing = (p for s in segments if (p := _out_of_range(written, s, pool)) is not None)
    return list(islice(missing, MOST_MISTAKES))


def _out_of_range(written: Written, segment: Segment, pool: Pool) -> Problem | None:
    total, numbers = pool.count, segment.accelerators
    code = "node-out-of-range" if pool.noun == NODE else "accelerator-out-of-range"
    if numbers.stop <= total:
        return None
    span = written.part(segment.span, 0)
    missing = range(max(numbers.start, total), numbers.stop)
    replacement = None
    if numbers.start < total:
        dash = written.text.rindex("-", *span)
        replacement = written.text[: span[0]] + show_range(range(numbers.start, total)) + written.text[span[1] :]
        at = dash + 1
        while written.text[at] == " ":
            at += 1
        span = (at, span[1])
    many = len(missing) > 1
    mistake = Mistake(
        code=code,
        what=f"{pool.noun}{'s' if many else ''} {show_range(missing)} do{'' if many else 'es'} not exist",
        span=span,
        why=f"ranges include both ends, and {pool.describe()}",
    )
    everything = f"{written.leaf}: all"
    # A segment with ranks of its own would become uneven when its accelerators are cut.
    if replacement is None or ":" in written.text:
        return written.problem(mistake, fix=everything)
    return written.problem(mistake, fix=f"{written.line(replacement)}        (or: {everything})")


def _too_many(written: Written, segment: Segment, pool: Pool) -> Problem | None:
    accelerators = len(segment.accelerators)
    most = MOST_RANKS_EACH * accelerators
    if len(segment.ranks) <= most:
        return None
    mistake = Mistake(
        code="too-many-ranks",
        what=f"{len(segment.ranks):,} ranks on {accelerators} {pool.noun}{'s' * (accelerators > 1)}",
        span=written.part(segment.span, 1),
        why=f"a rank is a process; more than {MOST_RANKS_EACH:,} on one {pool.noun} are taken for a typing mistake",
    )
    return written.problem(mistake, fix=written.line(show_range(segment.accelerators)))


def _uneven(written: Written, segment: Segment, segments: Sequence[Segment], pool: Pool) -> Problem | None:
    ranks, accelerators = len(segment.ranks), len(segment.accelerators)
    if ranks % accelerators == 0 or accelerators % ranks == 0:
        return None
    below, above = _even_counts(ranks, accelerators)
    low, high = (_renumbered(segments, {segment: n}) for n in (below, above))
    mistake = Mistake(
        code="uneven-ranks",
        what=f"{ranks} ranks do not divide over {accelerators} {pool.noun}s",
        span=segment.span,
        why=f"ranks spread evenly: their number is a multiple or a divisor of the number of {pool.noun}s",
    )
    return written.problem(mistake, fix=f"{written.line(low)}        (or: {written.line(high)})")


def _even_counts(ranks: int, accelerators: int) -> tuple[int, int]:
    """The nearest numbers of ranks below and above that divide evenly."""
    if ranks > accelerators:
        below = ranks // accelerators * accelerators
        return below, below + accelerators
    below = next(n for n in range(ranks, 0, -1) if accelerators % n == 0)
    above = next(n for n in range(ranks, accelerators + 1) if accelerators % n == 0)
    return below, above


def _duplicates(written: Written, segments: Sequence[Segment], pool: Pool) -> list[Problem]:
    problems: list[Problem] = []
    ordered = sorted(segments, key=lambda s: s.accelerators.start)
    reach = ordered[0] if ordered else None
    for segment in ordered[1:]:
        assert reach is not None
        twice = range(segment.accelerators.start, min(segment.accelerators.stop, reach.accelerators.stop))
        if twice:
            later = max(segment, reach, key=attrgetter("span"))
            numbers = f"{pool.noun}{'s' * (len(twice) > 1)} {show_range(twice)}"
            mistake = Mistake(
                code="duplicate-accelerator",
                what=f"{numbers} {'are' if len(twice) > 1 else 'is'} given twice",
                span=written.part(later.span, 0),
                why=f"several ranks share one {pool.noun} when they are written as one segment, accelerators:ranks",
            )
            once = Ranges.of(s.accelerators for s in segments)
            fix = written.line(str(once))
            if len(once.pieces) == 1:
                fix += f"        (or two ranks on each: {once}:0-{2 * len(once) - 1})"
            problems.append(written.problem(mistake, fix=fix))
        if segment.accelerators.stop > reach.accelerators.stop:
            reach = segment
    return problems


def _rank_order(written: Written, segments: Sequence[Segment]) -> list[Problem]:
    """Ranks given twice or left out."""
    problems: list[Problem] = []
    expected = 0
    for segment in sorted(segments, key=lambda s: s.ranks.start):
        ranks = segment.ranks
        if ranks.start != expected:
            wrong = range(expected, ranks.start) or range(ranks.start, min(expected, ranks.stop))
            code, verb = ("rank-gap", "left out") if ranks.start > expected else ("duplicate-rank", "given twice")
            many = len(wrong) > 1
            mistake = Mistake(
                code=code,
                what=f"rank{'s' if many else ''} {show_range(wrong)} {'are' if many else 'is'} {verb}",
                span=written.part(segment.span, 1),
                why=RULE_RANKS,
            )
            problems.append(written.problem(mistake, fix=written.line(_renumbered(segments, {}))))
        expected = max(expected, ranks.stop)
    return problems[:1]  # the first one shifts all that follow


def _cut(written: Written, segment: Segment, segments: Sequence[Segment], pool: Pool) -> Problem | None:
    """A rank with parts on two nodes, or on accelerators of two products."""
    each = segment.accelerators_per_rank
    stretch = pool.cut(segment.accelerators, each)
    if stretch is None:
        return None
    rank = segment.ranks.start + (stretch.first - segment.accelerators.start) // each
    fewer = next(n for n in range(each - 1, 0, -1) if each % n == 0 and pool.cut(segment.accelerators, n) is None)
    held = f"rank {rank} would hold {pool.noun}s {show_range(segment.accelerators_of(rank))}"
    code, what, why = _cut_between(pool.stretch_of(stretch.first - 1), stretch, pool)
    mistake = Mistake(code=code, what=f"{held}, {what}", span=segment.span, why=why)
    text = _renumbered(segments, {segment: len(segment.accelerators) // fewer})
    return written.problem(
        mistake, fix=f"{written.line(text)}        ({fewer} {pool.noun}{'s' * (fewer > 1)} for each rank)"
    )


def _cut_between(before: Stretch, after: Stretch, pool: Pool) -> tuple[str, str, str]:
    """(code, what, why) of a rank that lies on both."""
    if before.node == after.node:
        why = f"a rank uses accelerators of one product; on node {after.node} another one starts at {after.first}"
        return "rank-spans-products", "of two products", why
    if pool.noun == NODE:
        return "rank-spans-nodes", "and a rank is one process", "a process runs on one node"
    why = f"a rank is one process on one node, and node {after.node} starts at {pool.noun} {after.first}"
    return "rank-spans-nodes", "on two nodes", why


def _renumbered(segments: Sequence[Segment], counts: dict[Segment, int]) -> str:
    """The placement with consecutive ranks in the written order; `counts` changes how many ranks a segment has."""
    renumbered: list[Segment] = []
    following = 0
    for segment in segments:
        count = counts.get(segment, len(segment.ranks))
        renumbered.append(Segment(accelerators=segment.accelerators, ranks=range(following, following + count)))
        following += count
    return render_segments(renumbered)
