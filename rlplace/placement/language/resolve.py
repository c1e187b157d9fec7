"""Lines that depend on each other -> where each of them is placed.

Numbers come first, then counts in written order, then rests, then `same_as` along its chain: the result depends only on
the lines themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlplace.placement.language.faults import Fault
from rlplace.placement.language.fit import respread
from rlplace.placement.language.lines import REST, Line
from rlplace.placement.language.spec import Segment
from rlplace.placement.machines.pools import Pool
from rlplace.placement.machines.topology import Ranges, overlap

Placed = tuple[Pool, tuple[Segment, ...]]


def resolve(
    lines: Sequence[Line], named: Collection[str], faults: list[Fault]
) -> dict[int, Placed]:
    """Return index of a line -> its pool and segments, for the lines that can be placed.

    A segment is a piece `accelerators:ranks` of a placement text. `named`: the components of all lines, also of lines
    with faults, which are not in `lines`. Faults are added to `faults`.
    """
    placed = _settle(lines, faults)
    # Of a component that is placed twice, the first line counts.
    line_of: dict[str, int] = {}
    for i, line in reversed(list(enumerate(lines))):
        line_of |= dict.fromkeys(line.names, i)
    # Lines that depend on a component without a place are left out silently.
    unplaced = {name for name in named if name not in line_of}

    def follow(i: int, chain: Sequence[int]) -> Placed | None:
        """Return the place of line `i`; None if the line cannot be placed.

        If the line takes the place of another component, the line of that component is placed first. `chain`: the lines
        that wait for the place of line `i`.
        """
        line = lines[i]
        target = line.asked
        if i in placed or not isinstance(target, str):
            return placed.get(i)
        # A circle, an unknown name, or a line that is placed before this one.
        if i in chain:
            circle = [lines[j].names[0] for j in (*chain[chain.index(i) :], i)]
            facts: dict[str, object] = {"circle": circle, "line": line}
            faults.append(Fault("circular-placement", line.where, facts=facts))
        elif target not in unplaced and target not in line_of:
            facts = {"name": target, "placed": list(line_of), "line": line}
            faults.append(
                Fault("unknown-component", line.where, "same_as", facts=facts)
            )
        elif target not in unplaced:
            found = follow(line_of[target], [*chain, i])
            if found is not None:
                # The same numbers; ranks of another size are spread over them again.
                pool, segments = found
                if not line.spread.is_plain:
                    numbers = [segment.accelerators for segment in segments]
                    segments = respread(line.where, numbers, pool, line.spread, faults)
                if segments and not unplaced & {*line.names}:
                    placed[i] = (pool, segments)
                    return placed[i]
        unplaced.update(line.names)
        return None

    for i in range(len(lines)):
        follow(i, [])
    return placed


def _settle(lines: Sequence[Line], faults: list[Fault]) -> dict[int, Placed]:
    """Return index of a line -> its place, for all lines without `same_as`.

    Lines with numbers are placed first, then lines with counts, then lines with `rest`.
    """
    placed: dict[int, Placed] = {}
    # Noun of the pool (with its label where it holds no accelerators) -> numbers taken.
    used: dict[str, Ranges] = {}
    for i in sorted(range(len(lines)), key=lambda i: _turn(lines[i])):
        line = lines[i]
        pool = line.pool
        on_accelerators = pool.holds_accelerators
        key = pool.noun
        if not on_accelerators:
            key = f"{pool.noun} {pool.label}"
        taken = used.get(key, Ranges())

        found: tuple[Segment, ...] = ()
        if isinstance(line.asked, tuple):
            found = line.asked
        elif isinstance(line.asked, int):
            # Accelerators are taken by their global numbers, all else by those of the pool.
            here = taken
            if on_accelerators:
                here = pool.inside(taken)
            others = [n for other in lines if other is not line for n in other.names]
            found = _pick(line, line.asked, pool.all - here, others, faults)
        if found:
            placed[i] = (pool, found)
        # Two rests get the same.
        if line.asked != REST:
            used[key] = taken | _global_numbers(pool, found)
    return placed


def _turn(line: Line) -> int:
    """Return the turn in which a line is placed: 0 for numbers or `same_as`, 1 for a count, 2 for `rest`."""
    if line.asked == REST:
        return 2
    return int(isinstance(line.asked, int))


def _global_numbers(pool: Pool, segments: Sequence[Segment]) -> Ranges:
    """Return the numbers of the segments, counted over the whole cluster.

    A segment is a piece `accelerators:ranks` of a placement text. For a pool without accelerators, return the numbers
    of the pool.
    """
    numbers = [segment.accelerators for segment in segments]
    if not pool.holds_accelerators:
        return Ranges.of(numbers)
    found: list[range] = []
    for piece in numbers:
        found += (outside for _, outside in pool.outside(piece))
    return Ranges.of(found)


def _pick(
    line: Line, count: int, free: Ranges, others: Sequence[str], faults: list[Fault]
) -> tuple[Segment, ...]:
    """Return segments on free numbers of a line's pool. If that fails, return () and add a fault to `faults`.

    A unit is the group of numbers that must be on one node. If there are `count` free neighbouring numbers, the first
    of these are used; otherwise, whole free units from the front. `count`: how many numbers; REST: all free numbers.
    `free`: the free numbers of the pool. `others`: the components of the other lines.
    """
    pool = line.pool
    facts: dict[str, object] = {"line": line, "count": count, "pool": pool}
    if count == REST:
        if free:
            return respread(line.where, free.pieces, pool, line.spread, faults)
        faults.append(Fault("nothing-left", line.where, facts=facts))
        return ()

    # How many accelerators belong together on one node.
    unit = line.spread.each
    if not line.parallel.across_nodes:
        unit = max(unit, line.parallel.tensor_parallel_size)
    facts["unit"] = unit
    if count % unit:
        faults.append(Fault("uneven-ranks", line.where, "count", facts=facts))
        return ()
    pieces = _first_fit(free, pool, count, unit)
    if pieces is not None:
        return line.spread.over(pieces)
    facts["free"] = free
    facts["others"] = others
    faults.append(Fault("not-enough-free", line.where, facts=facts))
    return ()


def _first_fit(free: Ranges, pool: Pool, count: int, unit: int) -> list[range] | None:
    """Return `count` free numbers as ranges; None if there are not enough.

    Neighbouring numbers are preferred. If there are too few neighbours, whole units from the front are returned.
    `free`: the free numbers of the pool. `unit`: how many numbers a unit has; all numbers of a unit lie on one node.
    """
    for piece in free.pieces:
        starts = [piece.start]
        if unit > 1:
            starts += [i.first for i in pool.intervals_in(piece)[1:]]
        for start in starts:
            wanted = range(start, start + count)
            if wanted.stop <= piece.stop and pool.cut(wanted, unit) is None:
                return [wanted]

    # Not in one piece: whole units of each interval, from the front.
    taken: list[range] = []
    for piece in free.pieces:
        for interval in pool.intervals_in(piece):
            part = overlap(interval.numbers, piece)
            whole = min(count, len(part)) // unit * unit
            if whole:
                taken.append(part[:whole])
                count -= whole
    if count:
        return None
    return taken
