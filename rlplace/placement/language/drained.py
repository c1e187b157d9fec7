"""Places for the components of a job on the nodes that stay, when a node is to leave. Accelerators keep their numbers.

::

    2 nodes of 4, node 1 leaves            accelerators 0 1 2 3 | 4 5 6 7
      actor: 0-7       its ranks on node 0 stay, as many of them as divide:    0-3, 0-1, 0
      env: 4-5         as many ranks on accelerators that no component uses:   2-3
      rollout: 4-7     none is free: accelerators of other components:         0-3, 0-1, 0

Whether places fit and divide is for the planner to say. The nearest places come first: those that keep most ranks.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Iterator, Sequence

from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec, Segment, Spread
from rlplace.placement.language.without_nodes import ranks_left
from rlplace.placement.machines.topology import Ranges, overlap

# What it costs to share accelerators with more components, beside the share of ranks that are lost
_SHARED = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """Places of one component.

    `cost`: how far they are from its present ones. `place`: as a value for the config. `accelerators`: numbered over
    the cluster.
    """

    cost: float
    place: object
    accelerators: Ranges


def places_without(
    placement: HybridComponentPlacement, gone: Collection[int]
) -> Iterator[dict[str, object]]:
    """Yield component -> its place, for the components that have ranks on nodes that leave, the nearest places first.

    Nothing is yielded if a component has no place elsewhere. `gone`: numbers of the nodes that leave, and of those that
    have left.
    """
    names = []
    for name in placement.components:
        locations = placement.spec(name).locations
        if not set(gone).isdisjoint(locations.node):
            names.append(name)
    used = placement.used
    options = []
    for name in names:
        found = _options(placement.spec(name), gone, used)
        if not found:
            return
        options.append(found)
        # Accelerators that the first choice takes are free for no other component
        used = used | found[0].accelerators
    for chosen in _cheapest_first(options):
        yield {name: option.place for name, option in zip(names, chosen, strict=True)}


def _options(spec: ComponentSpec, gone: Collection[int], used: Ranges) -> list[_Option]:
    """Return places of a component on other nodes, the nearest first.

    `used`: accelerators with ranks of any component.
    """
    kept = ranks_left(spec, gone, renumbered=False)
    whole = spec.world_size
    left = sum(len(segment.ranks) for segment in kept)
    pool = spec.pool
    stays = [interval for interval in pool.intervals if interval.node not in gone]
    elsewhere = Ranges.of(interval.numbers for interval in stays)
    others = elsewhere - Ranges.of(segment.accelerators for segment in kept)
    free = others
    if pool.holds_accelerators:
        free = others - pool.inside(used)
    found: dict[str, _Option] = {}
    shapes = (
        (kept, 0.0),
        (_more(spec, kept, free, whole - left), 0.0),
        (_more(spec, kept, others, whole - left), _SHARED),
    )
    for segments, more in shapes:
        ranks = sum(len(segment.ranks) for segment in segments)
        for count in _counts(ranks, whole):
            cut = _first_ranks(segments, count)
            if not cut:
                continue
            there = dataclasses.replace(spec, written=cut)
            place = there.canonical()
            option = _Option(
                cost=1.0 - there.world_size / whole + more,
                place=place,
                accelerators=there.accelerators,
            )
            found.setdefault(str(place), option)
    return sorted(found.values(), key=lambda option: option.cost)


def _counts(ranks: int, whole: int) -> list[int]:
    """Return numbers of ranks to try, the largest first: all of them, and divisors of the present number."""
    return [
        count for count in range(ranks, 0, -1) if count == ranks or whole % count == 0
    ]


def _more(
    spec: ComponentSpec, kept: Sequence[Segment], numbers: Ranges, count: int
) -> tuple[Segment, ...]:
    """Return `kept` with at most `count` further ranks on `numbers` of the pool, in the shape of the present ranks."""
    shape = spec.written[0]
    spread = Spread(
        each=shape.accelerators_per_rank, sharing=shape.ranks_per_accelerator
    )
    pieces = []
    for piece in numbers.pieces:
        for interval in spec.pool.intervals_in(piece):
            here = overlap(piece, interval.numbers)
            length = len(here) // spread.each * spread.each
            if length:
                pieces.append(here[:length])
    following = sum(len(segment.ranks) for segment in kept)
    added = _first_ranks(spread.over(pieces), count)
    return (*kept, *(segment.moved(0, following) for segment in added))


def _first_ranks(segments: Sequence[Segment], count: int) -> tuple[Segment, ...]:
    """Return the first `count` ranks of segments; fewer if ranks that share a number would be parted."""
    found = []
    left = count
    for segment in segments:
        sharing = segment.ranks_per_accelerator
        numbers = (
            min(left, len(segment.ranks)) // sharing * segment.accelerators_per_rank
        )
        if not numbers:
            break
        start = segment.accelerators.start
        cut = segment.cut_to(range(start, start + numbers))
        found.append(dataclasses.replace(cut, span=(0, 0)))
        left -= len(cut.ranks)
    return tuple(found)


def _cheapest_first(options: Sequence[Sequence[_Option]]) -> Iterator[list[_Option]]:
    """Yield one option of each list, the smallest sum of costs first. Each list begins with its cheapest option."""
    if not options:
        return
    numbered = itertools.count()
    first = (0,) * len(options)
    seen = {first}
    waiting: list[tuple[float, int, tuple[int, ...]]] = []

    def add(chosen: tuple[int, ...]) -> None:
        cost = sum(found[at].cost for found, at in zip(options, chosen, strict=True))
        heapq.heappush(waiting, (cost, next(numbered), chosen))

    add(first)
    while waiting:
        _, _, chosen = heapq.heappop(waiting)
        yield [found[at] for found, at in zip(options, chosen, strict=True)]
        for number, found in enumerate(options):
            if chosen[number] + 1 == len(found):
                continue
            following = (
                *chosen[:number],
                chosen[number] + 1,
                *chosen[number + 1 :],
            )
            if following not in seen:
                seen.add(following)
                add(following)
