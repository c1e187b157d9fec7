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
class Numbers:
    """These ranks on these numbers."""

    segments: tuple[Segment, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """That many numbers that no other component has; `why` names the source of the count."""

    count: int
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """All numbers that no component with numbers or a count of its own has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SameAs:
    """The place of another component."""

    component: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of `component_placement`, read."""

    names: tuple[str, ...]
    whole: Text  # key and value as they stand in `component_placement`
    where: Text  # the part that places
    pool: Pool
    asked: Numbers | Count | Rest | SameAs
    each: int = 1  # accelerators_per_rank
    sharing: int = 1  # ranks_per_accelerator
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    shares_process: bool = False  # with the other lines of the same place that share theirs

    @property
    def unit(self) -> int:
        """How many accelerators belong together on one node."""
        return max(self.each, 1 if self.parallel.across_nodes else self.parallel.tensor_parallel_size)

    def instead(self, value: object) -> str:
        """The line with another value, to paste."""
        return self.whole.line(value)


class Resolution:
    """Places lines, one kind after the other. Owns the places it found; problems go to the texts of the lines."""

    def __init__(self, lines: Sequence[Line], broken: Collection[str] = ()) -> None:
        """`broken` are components whose own line has problems; lines that depend on them are left out silently."""
        self.placed: dict[int, Placed] = {}  # by index of the line
        self._lines = lines
        self._broken = {*broken}
        self._used: dict[str, Ranges] = {}  # noun, and the label of pools without accelerators -> numbers taken
        self._line_of = {name: i for i, line in reversed(list(enumerate(lines))) for name in line.names}
        for kind in (Numbers, Count, Rest):
            for i, line in enumerate(lines):
                if isinstance(line.asked, kind):
                    self._settle(i, line)
        for i in range(len(lines)):
            self._follow(i)

    def _settle(self, i: int, line: Line) -> None:
        match line.asked:
            case Numbers(segments=segments):
                found = segments
            case Count(count=count, why=why):
                found = self._pick(line, count, why)
            case _:
                found = self._leftover(line)
        if not found:
            return
        self.placed[i] = (line.pool, found)
        if isinstance(line.asked, Rest):  # two rests get the same
            return
        numbers = Ranges.of(s.accelerators for s in found)
        if line.pool.holds_accelerators:
            numbers = Ranges.of(outside for piece in numbers.pieces for _, outside in line.pool.outside(piece))
        key = _key(line.pool)
        self._used[key] = self._used.get(key, Ranges()) | numbers

    def _free(self, pool: Pool) -> Ranges:
        used = self._used.get(_key(pool), Ranges())
        return pool.all - (pool.inside(used) if pool.holds_accelerators else used)

    def _pick(self, line: Line, count: int, why: str) -> tuple[Segment, ...]:
        """The first free neighbours that are enough; else whole units from the front, wherever they are free."""
        unit, noun = line.unit, line.pool.noun
        if count % unit:
            what = f"{count} {noun}s do not divide into units of {unit}"
            why = f"{why}, in units of {unit} (accelerators_per_rank or tensor_parallel_size)"
            line.where.reject("uneven-ranks", what, why, line.where.line(-(-count // unit) * unit))
            return ()
        free = self._free(line.pool)
        pieces = _first_fit(free, line.pool, count, unit)
        if pieces is not None:
            return spread(pieces, line.each, line.sharing)
        left = f"{free} ({len(free)})" if free else "none"
        why = f"{why}; free are {left}" + (f", in units of {unit} on one node" if unit > 1 else "")
        others = [n for other in self._lines if other is not line for n in other.names]
        fix = line.instead({"same_as": others[0]} if others else "all")
        line.where.reject("not-enough-free", f"{count} {noun}s are not free", f"{why}; {line.pool.describe()}", fix)
        return ()

    def _leftover(self, line: Line) -> tuple[Segment, ...]:
        if free := self._free(line.pool):
            return respread(line.where, free.pieces, line.pool, line.each, line.sharing)
        why = f"the other components use every {line.pool.noun}; {line.pool.describe()}"
        line.where.reject("nothing-left", "there is no rest", why, line.instead("all"))
        return ()

    def _follow(self, i: int) -> None:
        """Place the lines from `i` along its chain of `same_as`, the last one first."""
        chain: list[int] = []
        while isinstance(asked := self._lines[i].asked, SameAs) and i not in self.placed:
            if i in chain:
                line = self._lines[i]
                names = " -> ".join(self._lines[j].names[0] for j in [*chain[chain.index(i) :], i])
                why = "one of them has to be placed in numbers"
                line.where.reject("circular-placement", f"goes in a circle: {names}", why, line.instead("all"))
            elif asked.component in self._line_of and asked.component not in self._broken:
                chain.append(i)
                i = self._line_of[asked.component]
                continue
            elif asked.component not in self._broken:
                self._reject_unknown(self._lines[i], asked.component)
            self._broken |= {*self._lines[i].names}
            break
        for at in reversed(chain):
            self._copy(at, self.placed.get(i))
            i = at

    def _copy(self, i: int, found: Placed | None) -> None:
        line = self._lines[i]
        if found is None or self._broken & {*line.names}:
            self._broken |= {*line.names}
            return
        pool, segments = found
        if line.each * line.sharing > 1:
            segments = respread(line.where, [s.accelerators for s in segments], pool, line.each, line.sharing)
        if segments:
            self.placed[i] = (pool, segments)

    def _reject_unknown(self, line: Line, target: str) -> None:
        others = [n for n in self._line_of if n not in line.names]
        near = did_you_mean(target, others)
        what = f"no component is called {target!r}" + suggestion(near)
        fix = line.where.line(near or others[0]) if others else line.instead("all")
        line.where.reject("unknown-component", what, "placed are " + (", ".join(others) or "no others"), fix)


def _key(pool: Pool) -> str:
    return pool.noun if pool.holds_accelerators else f"{pool.noun} {pool.label}"


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
