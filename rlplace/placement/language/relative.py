"""Lines that depend on other lines: counts take what is free, `rest` what is left, `same_as` copies another line.

Numbers are settled first, then counts in written order, then rests, then `same_as` along its chain; so the result
depends only on the lines themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from rlplace.errors import did_you_mean, suggestion
from rlplace.placement.language.fit import respread
from rlplace.placement.language.spec import Parallel, Segment, spread
from rlplace.placement.language.text import Text
from rlplace.placement.machines.pools import Pool
from rlplace.placement.machines.ranges import Ranges

Placed = tuple[Pool, tuple[Segment, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """That many numbers that no other component has; `why` names the source of the count."""

    count: int | None  # None, for `rest`: all that no component with numbers or a count of its own has
    why: str = ""


REST = Count(count=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of `component_placement`, read."""

    names: tuple[str, ...]
    whole: Text  # key and value as they stand in `component_placement`
    where: Text  # the part that places
    pool: Pool
    asked: tuple[Segment, ...] | Count | str  # these ranks on these numbers; that many; as the component of this name
    each: int  # accelerators_per_rank
    sharing: int  # ranks_per_accelerator
    parallel: Parallel
    shares_process: bool  # with the other lines of the same place that share theirs


def resolve(lines: Sequence[Line], broken: Collection[str] = ()) -> dict[int, Placed]:
    """Place the lines that can be placed, by index; problems go to the texts of the others.

    `broken` are components whose own line has problems; lines that depend on them are left out silently.
    """
    placed: dict[int, Placed] = {}
    used: dict[str, Ranges] = {}  # noun, and the label of pools without accelerators -> numbers taken
    unplaced = {*broken}
    line_of = {name: i for i, line in reversed(list(enumerate(lines))) for name in line.names}
    for i, line in sorted(
        enumerate(lines), key=lambda entry: isinstance(entry[1].asked, Count) + (entry[1].asked == REST)
    ):
        pool, asked = line.pool, line.asked
        if isinstance(asked, str):
            continue
        on_accelerators = pool.holds_accelerators
        key = pool.noun if on_accelerators else f"{pool.noun} {pool.label}"
        taken = used.get(key, Ranges())
        if isinstance(asked, Count):
            free = pool.all - (pool.inside(taken) if on_accelerators else taken)
            found = _pick(line, asked, free, [n for other in lines if other is not line for n in other.names])
        else:
            found = asked
        if not found:
            continue
        placed[i] = (pool, found)
        if asked != REST:  # two rests get the same
            numbers = Ranges.of(s.accelerators for s in found)
            if on_accelerators:
                numbers = Ranges.of(outside for piece in numbers.pieces for _, outside in pool.outside(piece))
            used[key] = taken | numbers

    def follow(i: int, chain: Sequence[int]) -> Placed | None:
        """Place line `i` after the line whose place it takes; the lines of `chain` wait for it."""
        line, target = lines[i], lines[i].asked
        if i in placed or not isinstance(target, str):
            return placed.get(i)
        others = [n for n in line_of if n not in line.names]
        if i in chain:
            names = " -> ".join(lines[j].names[0] for j in [*chain[chain.index(i) :], i])
            why = "one of them has to be placed in numbers"
            line.where.reject("circular-placement", f"goes in a circle: {names}", why, line.whole.line("all"))
        elif target not in unplaced and target not in line_of:
            near = did_you_mean(target, others)
            what = f"no component is called {target!r}" + suggestion(near)
            fix = line.where.line(near or others[0]) if others else line.whole.line("all")
            line.where.reject("unknown-component", what, "placed are " + (", ".join(others) or "no others"), fix)
        elif target not in unplaced and (found := follow(line_of[target], [*chain, i])) is not None:
            pool, segments = found
            if line.each * line.sharing > 1:
                segments = respread(line.where, [s.accelerators for s in segments], pool, line.each, line.sharing)
            if segments and not unplaced & {*line.names}:
                placed[i] = (pool, segments)
                return placed[i]
        unplaced.update(line.names)
        return None

    for i in range(len(lines)):
        follow(i, [])
    return placed


def _pick(line: Line, asked: Count, free: Ranges, others: Sequence[str]) -> tuple[Segment, ...]:
    """The first free neighbours that are enough; else whole units from the front, wherever they are free."""
    pool, noun, count = line.pool, line.pool.noun, asked.count
    if count is None:
        if free:
            return respread(line.where, free.pieces, pool, line.each, line.sharing)
        why = f"the other components use every {noun}; {pool.describe()}"
        line.where.reject("nothing-left", "there is no rest", why, line.whole.line("all"))
        return ()
    # How many accelerators belong together on one node.
    unit = max(line.each, 1 if line.parallel.across_nodes else line.parallel.tensor_parallel_size)
    if count % unit:
        what = f"{count} {noun}s do not divide into units of {unit}"
        why = f"{asked.why}, in units of {unit} (accelerators_per_rank or tensor_parallel_size)"
        line.where.reject("uneven-ranks", what, why, line.where.line(-(-count // unit) * unit))
        return ()
    pieces = _first_fit(free, pool, count, unit)
    if pieces is not None:
        return spread(pieces, line.each, line.sharing)
    left = f"{free} ({len(free)})" if free else "none"
    why = f"{asked.why}; free are {left}" + (f", in units of {unit} on one node" if unit > 1 else "")
    fix = line.whole.line({"same_as": others[0]} if others else "all")
    line.where.reject("not-enough-free", f"{count} {noun}s are not free", f"{why}; {pool.describe()}", fix)
    return ()


def _first_fit(free: Ranges, pool: Pool, count: int, unit: int) -> list[range] | None:
    for piece in free.pieces:
        starts = [piece.start, *(s.first for s in pool.intervals_in(piece)[1:])] if unit > 1 else [piece.start]
        for start in starts:
            wanted = range(start, start + count)
            if wanted.stop <= piece.stop and pool.cut(wanted, unit) is None:
                return [wanted]
    taken: list[range] = []
    for piece in free.pieces:
        for interval in pool.intervals_in(piece):  # no rank lies across two of them
            part = range(max(interval.first, piece.start), min(interval.numbers.stop, piece.stop))
            if whole := min(count, len(part)) // unit * unit:
                taken.append(part[:whole])
                count -= whole
    return None if count else taken
