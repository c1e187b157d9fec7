"""Lines that depend on other lines: counts take what is free, `rest` what is left, `same_as` what another one has.

Numbers are settled first, then counts in written order, then rests, then `same_as` along its chain; so the answer does
not depend on anything but the lines themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlplace.errors import Problem, did_you_mean
from rlplace.placement.language.lines import Count, Line, Numbers, Rest, SameAs
from rlplace.placement.language.spec import Segment, spread
from rlplace.placement.language.spreading import respread, split_by_stretch
from rlplace.placement.machines.pools import Pool
from rlplace.placement.machines.ranges import Ranges

Answer = tuple[Pool, tuple[Segment, ...]]


class Resolution:
    """Answers lines one kind after the other. Owns the answers and problems it collects."""

    def __init__(self, lines: Sequence[Line], broken: Collection[str] = ()) -> None:
        """`broken` are components whose own line has problems; what depends on them stays unanswered without one."""
        self.answers: dict[int, Answer] = {}  # by index of the line
        self.problems: list[Problem] = []
        self._lines = lines
        self._broken = frozenset(broken)
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
        self.answers[i] = (line.pool, found)
        if not isinstance(line.asked, Rest):  # two rests get the same
            self._take(line.pool, Ranges.of(s.accelerators for s in found))

    def _take(self, pool: Pool, numbers: Ranges) -> None:
        if pool.holds_accelerators:
            numbers = Ranges.of(outside for piece in numbers.pieces for _, outside in pool.outside(piece))
        key = _key(pool)
        self._used[key] = self._used.get(key, Ranges()) | numbers

    def _free(self, pool: Pool) -> Ranges:
        used = self._used.get(_key(pool), Ranges())
        return pool.all - (pool.inside(used) if pool.holds_accelerators else used)

    def _pick(self, line: Line, count: int, why: str) -> tuple[Segment, ...]:
        """The first free neighbours that are enough; else whole units from the front, wherever they are free."""
        unit = line.unit
        if count % unit:
            fix = f"{line.where.leaf}: {-(-count // unit) * unit}"
            why = f"{why}, in units of {unit} (accelerators_per_rank or tensor_parallel_size)"
            what = f"{count} {line.pool.noun}s do not divide into units of {unit}"
            self.problems.append(line.where.whole("uneven-ranks", what, why, fix))
            return ()
        free = self._free(line.pool)
        pieces = _first_fit(free, line.pool, count, unit)
        if pieces is None:
            what = f"{count} {line.pool.noun}s are not free"
            left = f"{free} ({len(free)})" if free else "none"
            why = f"{why}; free are {left}" + (f", in units of {unit} on one node" if unit > 1 else "")
            why += f"; {line.pool.describe()}"
            others = [n for other in self._lines if other is not line for n in other.names]
            fix = f"{line.whole.leaf}: " + (f"{{same_as: {others[0]}}}" if others else "all")
            self.problems.append(line.where.whole("not-enough-free", what, why, fix))
            return ()
        return spread(pieces, line.each, line.sharing)

    def _leftover(self, line: Line) -> tuple[Segment, ...]:
        free = self._free(line.pool)
        if not free:
            why = f"the other components use every {line.pool.noun}; {line.pool.describe()}"
            fix = f"{line.whole.leaf}: all"
            self.problems.append(line.where.whole("nothing-left", "there is no rest", why, fix))
            return ()
        return self._spread(line, free.pieces, line.pool)

    def _spread(self, line: Line, pieces: Sequence[range], pool: Pool) -> tuple[Segment, ...]:
        segments, problems = respread(line.where, pieces, pool, line.each, line.sharing)
        self.problems += problems
        return segments

    def _follow(self, i: int) -> None:
        """Answers the lines from `i` along its chain, the last one first."""
        chain: list[int] = []
        while isinstance(asked := self._lines[i].asked, SameAs) and i not in self.answers:
            if i in chain:
                self.problems.append(self._circle([*chain[chain.index(i) :], i]))
            elif asked.component not in {*self._line_of, *self._broken}:
                self.problems.append(self._unknown(self._lines[i], asked.component))
            else:
                chain.append(i)
                if asked.component in self._broken:
                    break
                i = self._line_of[asked.component]
                continue
            self._broken |= {*self._lines[i].names}
            break
        for at in reversed(chain):
            self._copy(at, self.answers.get(i))
            i = at

    def _copy(self, i: int, found: Answer | None) -> None:
        line = self._lines[i]
        if found is None or self._broken & {*line.names}:
            self._broken |= {*line.names}
            return
        pool, segments = found
        if line.each * line.sharing > 1:
            segments = self._spread(line, [s.accelerators for s in segments], pool)
        if segments:
            self.answers[i] = (pool, segments)

    def _unknown(self, line: Line, target: str) -> Problem:
        others = [n for n in self._line_of if n not in line.names]
        near = did_you_mean(target, others)
        what = f"no component is called {target!r}" + (f", did you mean {near!r}?" if near else "")
        why = "placed are " + (", ".join(others) or "no others")
        fix = f"same_as: {near or others[0]}" if others else f"{line.whole.leaf}: all"
        return line.where.whole("unknown-component", what, why, fix)

    def _circle(self, circle: Sequence[int]) -> Problem:
        first = self._lines[circle[0]]
        names = " -> ".join(self._lines[i].names[0] for i in circle)
        why = "one of them has to say where it is in numbers"
        return first.where.whole("circular-placement", f"goes in a circle: {names}", why, f"{first.whole.leaf}: all")


def _key(pool: Pool) -> str:
    return pool.noun if pool.holds_accelerators else f"{pool.noun} {pool.label}"


def _first_fit(free: Ranges, pool: Pool, count: int, unit: int) -> list[range] | None:
    for piece in free.pieces:
        starts = [piece.start, *(s.first for s in pool.stretches_in(piece)[1:])] if unit > 1 else [piece.start]
        for start in starts:
            wanted = range(start, start + count)
            if wanted.stop <= piece.stop and pool.cut(wanted, unit) is None:
                return [wanted]
    taken: list[range] = []
    for piece in split_by_stretch(free.pieces, pool):
        whole = min(count, len(piece)) // unit * unit
        if whole:
            taken.append(piece[:whole])
            count -= whole
    return None if count else taken
