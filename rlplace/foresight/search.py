"""The best plan of a space under a profile: branch and bound, best bound first, and what is known when time is over.

::

    sizes of components ──▶ places ──▶ who stays ──▶ a plan: checks, memory ledger ──▶ predicted seconds
          bound              bound                     bound with its moves

A branch whose bound is not below the best that was found is left out. When none is left, the best is proven under the
profile; when time is over before, the least bound that is left says how much better a plan could be at most.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlplace.config.schema import Config
from rlplace.errors import ProblemsError
from rlplace.foresight.bounds import Bounds
from rlplace.foresight.costs import Costs
from rlplace.foresight.loads import Mode, Size
from rlplace.foresight.predict import Prediction, predict
from rlplace.foresight.profile import ACCELERATOR, COLD, Profile
from rlplace.foresight.space import Cells, Layout, Space
from rlplace.placement.memory.case import memory_case
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan, make_plan
from rlplace.placement.schedule import Schedule

OBJECTIVES = ("seconds", "accelerator_seconds")
_MORE = 24  # plans that are predicted after the best is proven, to know those behind it
_DIVE = 25  # every so many branches
_SAME = 1e-9  # relative: bounds and predictions are sums in another order


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan that holds, with what an iteration of it takes."""

    layout: Layout
    plan: Plan
    case: MemoryCase
    prediction: Prediction
    used: int  # accelerators
    value: float  # of the objective
    margin_bytes: int | None  # of the tightest accelerator; None: not known

    @property
    def seconds(self) -> float:
        return self.prediction.seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a search has found."""

    objective: str
    current: Found | None  # the plan of the config; None where it does not hold
    found: tuple[Found, ...]  # the best first; of plans that take as long, one
    all_found: tuple[Found, ...]
    bound: float  # no plan of the space is below it
    counts: Mapping[str, int]
    refused: Mapping[str, int]  # why plans do not hold -> how many
    nearest: Layout | None  # of the plans that do not fit in memory, that which lacks least
    lacks_bytes: int  # that it lacks, on an accelerator
    lacking: Mapping[str, int]  # cost that the profile lacks -> plans that were left out for it
    proven: bool

    @property
    def best(self) -> Found | None:
        return self.found[0] if self.found else None

    @property
    def gap(self) -> float:
        """Return by which share of its value the best could be improved at most; 0 where it is proven."""
        best = self.best
        return 0.0 if best is None or self.proven else max(0.0, 1.0 - self.bound / best.value)


class _Sizes(NamedTuple):
    mode: Mode
    left: Mapping[str, tuple[Size, ...]]


class _Places(NamedTuple):
    mode: Mode
    sizes: Mapping[str, Size]
    starts: Mapping[str, int]
    cells: Cells


class _Leaf(NamedTuple):
    layout: Layout
    cells: Cells
    key: object
    used: int
    left: int  # of those that stay, the first so many may leave as well


_Node = _Sizes | _Places | _Leaf
_DEPTH: Mapping[type, int] = {_Sizes: 0, _Places: 1, _Leaf: 2}  # of equal bounds the deepest goes first
_PAIR = ("env", "rollout")  # which may share processes
_DIRECT = ("env.run/direct_wait", "env.run/direct_put")
_CHANNELS = ("env.run/wait", "env.run/put", "rollout.generate/wait", "rollout.generate/put")


class Search:
    """Searches a space. What it has predicted is kept, so that a second search of a part of it costs little."""

    def __init__(self, space: Space, profile: Profile) -> None:
        self.space, self.profile = space, profile
        self.predicted: dict[object, Prediction] = {}
        self.bounds = Bounds(space.config, space.plan.topology, Costs(profile))
        self.on_accelerators = any(curve.on == ACCELERATOR for curve in profile.costs.values())

    def run(
        self,
        *,
        objective: str = "seconds",
        most: int | None = None,
        keep: int = 6,
        over: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Return the best plans. `most`: accelerators; `keep`: that many best; `over` tells whether time is over."""
        return _Run(self, objective, most or self.space.most, keep).go(over)

    def bound(self, layout: Layout, schedule: Schedule) -> float:
        return self.bounds.of_plan(schedule, layout.mode, layout.sizes, self.space.spread(layout))

    def lacks(self, schedule: Schedule, mode: Mode) -> list[str]:
        """Return the costs that a plan needs, unlike others, and that the profile lacks."""
        moves = [m for entry in schedule.entries.values() for m in (*entry.releases, *entry.acquires)]
        talk: tuple[str, ...] = ()
        if self.space.config.kind == "mlp":
            talk = _DIRECT if mode.shared else _CHANNELS
        known = {name.replace(COLD, "") for name in self.profile.costs}
        return sorted({*(f"{m.component}.move_{m.after.word}/rest" for m in moves), *talk} - known)

    def predict(self, config: Config, plan: Plan, case: MemoryCase, layout: Layout) -> Prediction:
        """Predict a plan, once for all that take as long."""
        key = self.key(plan.schedule, layout)
        if key not in self.predicted:
            self.predicted[key] = dataclasses.replace(predict(config, plan, case, self.profile), iterations=())
        return self.predicted[key]

    def key(self, schedule: Schedule, layout: Layout) -> object:
        """Return what a prediction depends on: plans with the same key take as long."""
        held = tuple((stage, tuple(sorted(row.items()))) for stage, row in schedule.residency.items())
        spread = self.space.spread(layout).items()
        ranks = tuple(sorted((component, tuple(sorted(there.items()))) for component, there in spread))
        active = tuple((stage, tuple(components)) for stage, components in schedule.active.items())
        at_once = self.space.at_once(layout, schedule) if self.on_accelerators else ()
        return layout.mode, held, active, ranks, at_once


class _Run:
    """One search: the branches that are left, and the best that were found."""

    def __init__(self, search: Search, objective: str, most: int, keep: int) -> None:
        self.search, self.space = search, search.space
        self.objective, self.most, self.keep = objective, most, keep
        self.heap: list[tuple[float, int, int, _Node]] = []
        self.order = itertools.count()
        self.found: dict[tuple[object, int], Found] = {}  # by what is predicted of it, and its accelerators
        self.fewest: dict[object, int] = {}  # accelerators of a plan that takes as long
        self.current: Found | None = None
        self.nearest: tuple[tuple[bool, int], Layout] | None = None  # with what it lacks in bytes
        self.counts, self.refused, self.lacking = Counter[str](), Counter[str](), Counter[str]()

    def go(self, over: Callable[[], bool]) -> Answer:
        self.current = self._check(self.space.current())  # what the config has is predicted, whatever its bound
        for mode in self.space.modes:
            left = self.space.sizes(mode)
            if all(left.values()):
                self._push(self.search.bounds.of_sizes(mode, left), _Sizes(mode, left))
        proven_at = math.inf
        while self.heap and self.heap[0][0] < self._limit(self.keep) * (1 - _SAME) and not over():
            if self.heap[0][0] >= self._limit(1) * (1 - _SAME):
                proven_at = min(proven_at, self.counts["predicted"])
            if self.counts["predicted"] >= proven_at + _MORE:
                break
            bound, _, _, node = heapq.heappop(self.heap)
            self.counts["branches"] += 1
            if self.counts["branches"] % _DIVE == 1:
                self._dive(node, bound)
            else:
                self._expand(node, bound)
        least = self.heap[0][0] if self.heap else math.inf
        proven = least >= self._limit(1) * (1 - _SAME)
        self.counts["left out by bound"] += len(self.heap)
        found = sorted(self.found.values(), key=_rank)
        bound = found[0].value if found and proven else least
        first = {id(f.prediction): f for f in reversed(found)}  # of those that take as long
        return Answer(
            objective=self.objective,
            current=self.current,
            found=tuple(f for f in found if first[id(f.prediction)] is f)[: self.keep],
            all_found=tuple(found),
            bound=bound,
            counts=self.counts,
            refused=self.refused,
            nearest=None if self.nearest is None else self.nearest[1],
            lacks_bytes=0 if self.nearest is None else self.nearest[0][1],
            lacking=self.lacking,
            proven=proven,
        )

    def _expand(self, node: _Node, bound: float) -> None:
        match node:
            case _Sizes():
                self._size(node)
            case _Places():
                self._place(node, bound)
            case _Leaf():
                self._decide(node, bound)

    def _dive(self, node: _Node, bound: float) -> None:
        """Go down to a plan by the least bound each time: the sooner a good one is known, the more is left out."""
        others, at = self.heap, (bound, 0, 0, node)
        while True:
            self.heap, found = [], len(self.found)
            self._expand(at[3], at[0])
            if not self.heap or len(self.found) > found:
                break
            at = heapq.heappop(self.heap)
            others += self.heap
        others += self.heap
        self.heap = others
        heapq.heapify(self.heap)

    def _may_use(self, accelerators: int) -> bool:
        return accelerators <= self.most and (not self.space.counts or accelerators in self.space.counts)

    def _limit(self, number: int) -> float:
        """Return the value of the plan of this number among the best; infinite before so many are found."""
        values = sorted({id(found.prediction): found.value for found in self.found.values()}.values())
        return values[number - 1] if len(values) >= number else math.inf

    def _push(self, bound: float, node: _Node) -> None:
        heapq.heappush(self.heap, (bound, -_DEPTH[type(node)], next(self.order), node))

    def _worth(self, seconds: float, used: int) -> float:
        return seconds * used if self.objective == "accelerator_seconds" else seconds

    def _size(self, node: _Sizes) -> None:
        """Choose the size of one component more, of the one that has most to choose from."""
        open_ = [c for c, sizes in node.left.items() if len(sizes) > 1]
        if not open_:
            sizes = {c: only for c, (only,) in node.left.items()}
            bound = self.search.bounds.of_sizes(node.mode, node.left)
            starts = _Places(node.mode, sizes, {}, self.space.empty)
            self._push(self._worth(bound, max(size.accelerators for size in sizes.values())), starts)
            return
        component = max(open_, key=lambda c: len(node.left[c]))
        for size in node.left[component]:
            left = {**node.left, component: (size,)}
            if node.mode.shared and component in _PAIR:
                left |= {c: (size,) for c in _PAIR if size in node.left[c]}
                if len({left[c] for c in _PAIR}) > 1:
                    continue
            least = max(min(s.accelerators for s in sizes) for sizes in left.values())
            self._push(self._worth(self.search.bounds.of_sizes(node.mode, left), least), _Sizes(node.mode, left))

    def _place(self, node: _Places, bound: float) -> None:
        """Place one component more, the largest that is left; with all placed, choose who stays."""
        left = [c for c in self.space.free if c not in node.starts]
        if not left:
            used = self.space.used(node.cells)
            if self._may_use(used):
                stays = self.space.sharing(node.cells)
                self._leaf(node, stays, len(stays), bound)
            return
        component = max(left, key=lambda c: node.sizes[c].accelerators)
        if node.mode.shared and component in _PAIR and (other := _other(component)) in node.starts:
            places = self.space.again(node.cells, component, other)
            self._push(bound, node._replace(starts={**node.starts, component: node.starts[other]}, cells=places))
            return
        seconds = self.search.bounds.of_sizes(node.mode, {c: (size,) for c, size in node.sizes.items()})
        for start, cells in self.space.places(node.cells, component, node.sizes[component].accelerators):
            used = self.space.used(cells)
            if used <= self.most:
                starts = {**node.starts, component: start}
                self._push(max(bound, self._worth(seconds, used)), node._replace(starts=starts, cells=cells))

    def _leaf(self, node: _Places | _Leaf, stays: tuple[str, ...], left: int, bound: float) -> None:
        """Take a plan into account in which these stay, and with it those in which fewer do: these have more moves."""
        at = node.layout if isinstance(node, _Leaf) else node
        layout = Layout(mode=at.mode, sizes=at.sizes, starts=at.starts, stays=stays)
        schedule, used = self.space.schedule(node.cells, stays), self.space.used(node.cells)
        bound = max(bound, self._worth(self.search.bound(layout, schedule), used))
        if lacking := self.search.lacks(schedule, layout.mode):
            self.lacking.update(lacking)
            self.counts["without costs"] += 1
        elif bound >= self._limit(self.keep) * (1 - _SAME):
            self.counts["left out by bound"] += 1
        else:
            self._push(bound, _Leaf(layout, node.cells, self.search.key(schedule, layout), used, left))

    def _decide(self, node: _Leaf, bound: float) -> None:
        """Check a plan, unless one as good is known, and open those in which one component more leaves."""
        layout = node.layout
        for at in range(node.left):
            self._leaf(node, (*layout.stays[:at], *layout.stays[at + 1 :]), at, bound)
        if node.used < self.fewest.get(node.key, math.inf):
            needed = layout.stays  # without those that need not move in any case
            for component in layout.stays:
                fewer = tuple(c for c in needed if c != component)
                if self.search.key(self.space.schedule(node.cells, fewer), layout) == node.key:
                    needed = fewer
            self._check(dataclasses.replace(layout, stays=needed))

    def _check(self, layout: Layout) -> Found | None:
        """Plan a layout, and predict it if it holds."""
        self.counts["planned"] += 1
        config = self.space.config_of(layout)
        try:
            plan = make_plan(config, self.space.plan.topology)
            case = memory_case(plan, config)
        except ProblemsError as error:
            self.refused.update(set(error.codes))
            self.counts["illegal"] += 1
            return None
        ledger = case.ledger()
        if not ledger.fits:
            self.counts["refused by memory"] += 1
            lacks = -min((account.margin_bytes or 0 for account in ledger.accounts), default=0)
            rank = not self._may_use(len(plan.placement.used)), lacks
            if self.nearest is None or rank < self.nearest[0]:
                self.nearest = rank, layout
            return None
        if lacking := self.search.lacks(plan.schedule, layout.mode):
            self.lacking.update(lacking)
            self.counts["without costs"] += 1
            return None
        before = len(self.search.predicted)
        prediction = self.search.predict(config, plan, case, layout)
        self.counts["predicted"] += len(self.search.predicted) - before
        used, tightest = len(plan.placement.used), ledger.tightest
        found = Found(
            layout=layout,
            plan=plan,
            case=case,
            prediction=prediction,
            used=used,
            value=self._worth(prediction.seconds, used),
            margin_bytes=None if tightest is None else tightest.margin_bytes,
        )
        key = self.search.key(plan.schedule, layout)
        if self._may_use(used):
            self.fewest[key] = min(used, self.fewest.get(key, used))
            if (key, used) not in self.found or _rank(found) < _rank(self.found[key, used]):
                self.found[key, used] = found
        return found


def _rank(found: Found) -> tuple[float, int, int]:
    """Order plans: by value, then the fewer accelerators, then the more memory that is left."""
    return found.value, found.used, -(found.margin_bytes or 0)


def _other(component: str) -> str:
    return _PAIR[1 - _PAIR.index(component)]
