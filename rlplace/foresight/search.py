"""Find the best plan of a search space under a profile, by best-first branch and bound, until a deadline.

::

    sizes of components ──▶ places ──▶ residents ──▶ a plan: checks, memory ledger ──▶ predicted seconds
          bound              bound                     bound with its moves

"residents" is the choice of components that stay resident on accelerators that they share. A branch is left out if its
bound is not below the best value so far. When no branch is left, the best plan is proven to be the best under the
profile. When time runs out before, the smallest bound of the open branches limits how much better a plan can be.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlplace.contract.planning import make_plan, memory_case
from rlplace.errors import ProblemsError
from rlplace.foresight.alike import Alike, StageKey, seconds_of
from rlplace.foresight.bounds import Bounds
from rlplace.foresight.costs import Costs
from rlplace.foresight.loads import Mode, Size
from rlplace.foresight.model import StageBound, sizes_of
from rlplace.foresight.predict import Prediction, predict, predict_stages
from rlplace.foresight.profile import COLD, Profile
from rlplace.foresight.space import Cells, Layout, Space
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Schedule

OBJECTIVES = ("seconds", "accelerator_seconds")
_MORE = 24  # plans to predict after the best is proven, to know the runners-up
_DIVE = 25
_FAR = 0.02  # every _DIVE branches, dive to a plan while the best may improve by this share
_SAME = 1e-9  # relative tolerance of sums in another order


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A valid plan that a search has found, with its prediction.

    `space`: the search space of the plan. `layout`: sizes and places of its components. `case`: inputs of its memory
    calculation. `used`: number of accelerators that the plan uses.
    `value`: value of the objective, in seconds or accelerator seconds.
    `margin_bytes`: free memory of the fullest accelerator; None: not known.
    """

    space: Space
    layout: Layout
    plan: Plan
    case: MemoryCase
    prediction: Prediction
    used: int
    value: float
    margin_bytes: int | None

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def changes(self) -> dict[str, Any]:
        """Config key -> new value, for all keys in which the plan differs from the config that the user wrote.

        A value of None means that the key is removed.
        """
        return self.space.changes(self.layout)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a search.

    `objective`: what was minimised, one of OBJECTIVES. `current`: the config's own plan; None if it is not valid.
    `found`: the best plans, best first; of plans that take equally long, only one.
    `all_found`: all plans that were predicted and may be used, best first.
    `bound`: lower bound of the value of all plans of the space.
    `counts`: name -> number, such as the number of plans that were predicted. `refused`: error code -> number of plans
    with this error.
    `nearest`: of the plans that need more memory than there is, the one that lacks the fewest bytes. `lacks_bytes`: how
    many bytes it lacks on one accelerator.
    `lacking`: cost that the profile lacks -> number of plans that were left out because of it.
    `proven`: whether no plan of the space can be better than the best plan.
    """

    objective: str
    current: Found | None
    found: tuple[Found, ...]
    all_found: tuple[Found, ...]
    bound: float
    counts: Mapping[str, int]
    refused: Mapping[str, int]
    nearest: tuple[Space, Layout] | None
    lacks_bytes: int
    lacking: Mapping[str, int]
    proven: bool

    @property
    def best(self) -> Found | None:
        if self.found:
            return self.found[0]
        return None

    @property
    def gap(self) -> float:
        """The most by which another plan could still be better than the best plan, as a share of the best plan's value.

        0 if the best plan is proven to be the best.
        """
        best = self.best
        if best is None or self.proven:
            return 0.0
        return max(0.0, 1.0 - self.bound / best.value)


def merged(answers: Sequence[Answer], keep: int = 6) -> Answer:
    """Merge the answers of several search spaces into one answer, and return it.

    The first answer has to be that of the unchanged config. `keep`: the most plans in `found`.
    """
    found = sorted((one for answer in answers for one in answer.all_found), key=_rank)
    first = {_rounded(one.value): one for one in reversed(found)}
    failed = [answer for answer in answers if answer.nearest is not None]
    nearest = min(failed, key=lambda answer: answer.lacks_bytes, default=answers[0])
    bound = min(answer.bound for answer in answers)
    return dataclasses.replace(
        answers[0],
        found=tuple(map(completed, tuple(first.values())[::-1][:keep])),
        all_found=tuple(found),
        bound=bound,
        counts=sum((Counter(answer.counts) for answer in answers), Counter[str]()),
        refused=sum((Counter(answer.refused) for answer in answers), Counter[str]()),
        nearest=nearest.nearest,
        lacks_bytes=nearest.lacks_bytes,
        lacking=sum((Counter(answer.lacking) for answer in answers), Counter[str]()),
        proven=bool(found) and bound >= found[0].value * (1 - _SAME),
    )


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
    keys: tuple[object, ...]  # keys of its stages
    least: tuple[float, ...]  # lower bound of the seconds of each stage
    used: int


_Node = _Sizes | _Places | _Leaf
# Among equal bounds, the deepest branch is opened first
_DEPTH: Mapping[type, int] = {
    _Sizes: 0,
    _Places: 1,
    _Leaf: 2,
}


class Search:
    """Searches one space under one profile. Predictions are cached, so a second search does not repeat them."""

    def __init__(self, space: Space, profile: Profile) -> None:
        self.space = space
        self.profile = profile
        self.predicted: dict[tuple[object, ...], Prediction] = {}
        self._measured = {name.replace(COLD, "") for name in profile.costs}
        # Predicted seconds by stage key
        self._known: dict[object, float] = {}
        # Lower bounds by stage key
        self._least: dict[object, float] = {}
        self._alike = Alike(space, profile)
        self._bound = space.model.stage_bound(space, profile)
        self.bounds = Bounds(space.config, space.plan, Costs(profile))

    def run(
        self,
        *,
        objective: str = "seconds",
        most: int | None = None,
        keep: int = 6,
        rivals: Sequence[Found] = (),
        over: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Search the space until the best plan is proven or time has run out, and return the answer.

        `objective`: what is minimised, one of OBJECTIVES. `most`: the most accelerators that a plan may use; None: as
        many as the space allows. `keep`: the most plans in the answer's `found`. `rivals`: plans of other spaces;
        branches that cannot be better than the best of them are left out. `over`: returns True when time has run out.
        """
        return _Run(self, objective, most or self.space.most, keep, rivals, over).go()

    def unmeasured(self) -> dict[str, Sequence[int]]:
        """Return component -> measured numbers of ranks, for components that may get a number that was not measured."""
        asked: dict[str, set[int]] = {}
        for mode in self.space.modes:
            for component, sizes in self.space.sizes(mode).items():
                asked.setdefault(component, set()).update(s.ranks for s in sizes)
        model = self.space.model
        return model.unmeasured(self.space.config, self.space.plan, self.profile, asked)

    def ranged(self, found: Found) -> Prediction | None:
        """Return the prediction of a plan with its least and most seconds.

        The least and most seconds cover all assumptions about how costs scale with the number of ranks. Return None if
        nothing is assumed.
        """
        config = found.space.config_of(found.layout)
        prediction = predict(config, found.plan, found.case, self.profile, ranged=True)
        if prediction.least_s is None:
            return None
        return prediction

    def least(
        self, layout: Layout, schedule: Schedule, keys: Sequence[object]
    ) -> tuple[float, ...]:
        """Return a lower bound of the seconds of each stage of a plan.

        If generation runs ahead, so that stages overlap, return one bound, for the whole iteration. `layout`,
        `schedule`: layout and schedule of the plan. `keys`: the plan's stage keys, from `Search.keys`.
        """
        if not all(key in self._least for key in keys):
            plan = schedule, layout.mode, layout.sizes, self.space.spread(layout)
            if schedule.needs.ahead:
                found = [self.bounds.of_iteration(*plan)]
            else:
                found = self.bounds.of_stages(*plan)
            self._least.update(zip(keys, found, strict=True))
        stages = [self._least[key] for key in keys]
        if schedule.needs.ahead:
            return tuple(stages)
        if self._bound is not None:
            stage = self._bound.stage
            components = self._bound.components
            at = schedule.stages.index(stage)
            acquired = schedule.between(schedule.stages[at - 1], stage).acquires
            moved = frozenset(
                move.component for move in acquired if move.component in components
            )
            known = self._bound.known(sizes_of(components, layout.sizes), [moved])
            stages[at] = max(stages[at], known)
        return tuple(stages)

    def keys(self, layout: Layout, schedule: Schedule) -> tuple[object, ...]:
        """Return the stage keys of a plan: for each stage, everything on which the seconds of the stage depend.

        Plans with equal keys take equally long. `layout`, `schedule`: layout and schedule of the plan.
        """
        return self._alike.keys(layout, schedule)

    def at_least(self, keys: Sequence[object], least: Sequence[float]) -> float:
        """Return a lower bound of the seconds of a plan: the sum over its stages.

        A stage counts with its predicted seconds if they are known, else with its lower bound. `keys`, `least`: key and
        lower bound of each stage.
        """
        return sum(
            self._known.get(key, bound) for key, bound in zip(keys, least, strict=True)
        )

    def of_sizes(self, mode: Mode, options: Mapping[str, Sequence[Size]]) -> float:
        """Return a lower bound of the seconds of an iteration, for all plans whose components have sizes in `options`.

        `mode`: settings of these plans. `options`: component -> its possible sizes.
        """
        known: dict[str, float] = {}
        if self._bound is not None:
            known[self._bound.stage] = self._least_sizes(self._bound, mode, options)[0]
        return self.bounds.of_sizes(mode, options, known)

    def sharpen(self, mode: Mode, options: Mapping[str, Sequence[Size]]) -> bool:
        """Raise the lower bound of plans with these sizes by one more simulation.

        Return whether anything was simulated. `options`: component -> its possible sizes.
        """
        if self._bound is None:
            return False
        _, sizes = self._least_sizes(self._bound, mode, options)
        return self._bound.sharpen(sizes)

    def _least_sizes(
        self, bound: StageBound, mode: Mode, options: Mapping[str, Sequence[Size]]
    ) -> tuple[float, tuple[Size, ...]]:
        """Return the least bound of the simulated stage over all combinations of sizes, and that combination.

        `bound`: bounds of the simulated stage. `options`: component -> its possible sizes.
        """

        def least(sizes: tuple[Size, ...]) -> float:
            one = {c: (size,) for c, size in zip(bound.components, sizes, strict=True)}
            return max(self.bounds.of_stage(bound.stage, mode, one), bound.known(sizes))

        each = [options[component] for component in bound.components]
        return min((least(sizes), sizes) for sizes in itertools.product(*each))

    def lacks(self, schedule: Schedule, mode: Mode) -> list[str]:
        """Return the names of costs that a plan needs and the profile does not have.

        Only costs of moves, and the costs that only plans of this mode need, are checked.
        """
        moves = [
            m
            for entry in schedule.entries.values()
            for m in (*entry.releases, *entry.acquires)
        ]
        talk = self.space.model.special_costs(mode)
        return sorted(
            {*(f"{m.component}.move_{m.after.word}/rest" for m in moves), *talk}
            - self._measured
        )

    def predict(
        self, config: Any, plan: Plan, case: MemoryCase, layout: Layout
    ) -> Prediction:
        """Return the prediction of a plan. Predictions are cached: plans with equal stage keys are predicted once.

        A stage key holds everything on which the seconds of a stage depend. Stages with keys that other predictions
        have shown are not simulated again, where the job allows it; then the prediction is brief.
        """
        keys = self.keys(layout, plan.schedule)
        if keys not in self.predicted:
            found = self._briefly(config, plan, case, keys)
            if found is None:
                found = predict(config, plan, case, self.profile, queues=False)
                self._known.update(seconds_of(found, keys))
            self.predicted[keys] = dataclasses.replace(found, iterations=())
        return self.predicted[keys]

    def _briefly(
        self, config: Any, plan: Plan, case: MemoryCase, keys: Sequence[object]
    ) -> Prediction | None:
        """Return a brief prediction of a plan: simulate the stages that are not known yet, and add the seconds.

        Return None if the plan's stages cannot be simulated one by one. `keys`: the plan's stage keys.
        """
        ordered = any(isinstance(k, StageKey) and k.after is not None for k in keys)
        if ordered or len(keys) == 1:
            return None
        stages = dict(zip(plan.schedule.stages, keys, strict=True))
        unknown = [stage for stage, key in stages.items() if key not in self._known]
        simulated = predict_stages(config, plan, case, self.profile, unknown)
        if simulated is None:
            return None
        seconds, costs = simulated
        self._known.update({stages[stage]: each for stage, each in seconds.items()})
        return Prediction(
            numbers={"time/iteration_s": sum(self._known[key] for key in keys)},
            active=plan.schedule.active,
            iterations=(),
            queues={},
            processors={},
            costs=costs,
            brief=True,
        )


def completed(found: Found) -> Found:
    """Return a found plan with its whole prediction, if it has a brief one."""
    if not found.prediction.brief:
        return found
    config = found.space.config_of(found.layout)
    profile = found.prediction.costs.profile
    whole = predict(config, found.plan, found.case, profile)
    return dataclasses.replace(
        found, prediction=dataclasses.replace(whole, iterations=())
    )


class _Run:
    """The state of one search: its open branches, and the best plans so far.

    A branch is a set of plans with a common lower bound. To open a branch is to divide it into smaller branches.
    """

    def __init__(
        self,
        search: Search,
        objective: str,
        most: int,
        keep: int,
        rivals: Sequence[Found],
        over: Callable[[], bool],
    ) -> None:
        self.search = search
        self.space = search.space
        self.over = over
        self.objective = objective
        self.most = most
        self.keep = keep
        self.rivals = {id(found.prediction): found.value for found in rivals}
        self.heap: list[tuple[float, int, int, _Node]] = []
        self.order = itertools.count()
        # By stage keys and number of accelerators
        self.found: dict[tuple[object, int], Found] = {}
        # Stage keys -> fewest accelerators
        self.fewest: dict[object, int] = {}
        self.current: Found | None = None
        # The order key (what it lacks in bytes) and the layout
        self.nearest: tuple[tuple[bool, int], Layout] | None = None
        self.counts = Counter[str]()
        self.refused = Counter[str]()
        self.lacking = Counter[str]()

    def go(self) -> Answer:
        # The config's own plan is predicted whatever its bound
        self.current = self._check(self.space.current())
        for mode in self.space.modes:
            left = self.space.sizes(mode)
            if all(left.values()):
                self._push(self.search.of_sizes(mode, left), _Sizes(mode, left))
        proven_at = math.inf
        while (
            self.heap
            and self.heap[0][0] < self._limit(self.keep) * (1 - _SAME)
            and not self.over()
        ):
            if self.heap[0][0] >= self._limit(1) * (1 - _SAME):
                proven_at = min(proven_at, self.counts["predicted"])
            if self.counts["predicted"] >= proven_at + _MORE:
                break
            bound, _, _, node = heapq.heappop(self.heap)
            self.counts["branches"] += 1
            if self.counts["branches"] % _DIVE == 1 and bound < self._limit(1) * (
                1 - _FAR
            ):
                self._dive(node, bound)
            else:
                self._expand(node, bound)
        least = self.heap[0][0] if self.heap else math.inf
        proven = least >= self._limit(1) * (1 - _SAME)
        self.counts["left out by bound"] += len(self.heap)
        found = sorted(self.found.values(), key=_rank)
        bound = self._limit(1) if proven else least
        # One of the plans that share a prediction
        first = {id(f.prediction): f for f in reversed(found)}
        shown = [f for f in found if first[id(f.prediction)] is f][: self.keep]
        current = self.current
        return Answer(
            objective=self.objective,
            current=None if current is None else completed(current),
            found=tuple(map(completed, shown)),
            all_found=tuple(found),
            bound=bound,
            counts=self.counts,
            refused=self.refused,
            nearest=None if self.nearest is None else (self.space, self.nearest[1]),
            lacks_bytes=0 if self.nearest is None else self.nearest[0][1],
            lacking=self.lacking,
            proven=proven,
        )

    def _expand(self, node: _Node, bound: float) -> None:
        """Open the branch `node`: add its sub-branches, or check its plan.

        If the branch has a higher bound than `bound` by now, put it back with the higher bound instead. `bound`: the
        branch's bound when it was added.
        """
        known = self._bound(node, bound)
        if known > bound * (1 + _SAME):
            self._push(known, node)
            return
        match node:
            case _Sizes():
                self._size(node)
            case _Places():
                self._place(node, bound)
            case _Leaf():
                self._decide(node)

    def _bound(self, node: _Node, bound: float) -> float:
        """Return the highest lower bound that is known by now of the branch `node`.

        `bound`: the bound when the branch was added.
        """
        if isinstance(node, _Leaf):
            return max(
                bound,
                self._worth(self.search.at_least(node.keys, node.least), node.used),
            )
        if isinstance(node, _Sizes):
            sizes, used = (
                node.left,
                max(min(s.accelerators for s in sizes) for sizes in node.left.values()),
            )
        else:
            sizes = {c: (size,) for c, size in node.sizes.items()}
            used = self.space.used(node.cells)
        known = bound
        while True:
            known = max(
                bound, self._worth(self.search.of_sizes(node.mode, sizes), used)
            )
            if (
                known > bound * (1 + _SAME)
                or self.over()
                or not self.search.sharpen(node.mode, sizes)
            ):
                return known

    def _dive(self, node: _Node, bound: float) -> None:
        """Open the branch `node`, then repeatedly the new sub-branch with the least bound, until a plan is found.

        The sooner a good plan is found, the more branches can be left out.
        """
        others = self.heap
        at = (bound, 0, 0, node)
        while True:
            self.heap = []
            found = len(self.found)
            self._expand(at[3], at[0])
            if not self.heap or len(self.found) > found or self.over():
                break
            at = heapq.heappop(self.heap)
            others += self.heap
        others += self.heap
        self.heap = others
        heapq.heapify(self.heap)

    def _may_use(self, accelerators: int) -> bool:
        return accelerators <= self.most and (
            not self.space.counts or accelerators in self.space.counts
        )

    def _limit(self, number: int) -> float:
        """Return the `number`-th lowest value of the objective among the plans found so far.

        Return infinity if fewer plans were found.
        """
        own = {id(found.prediction): found.value for found in self.found.values()}
        values = sorted((self.rivals | own).values())
        if len(values) >= number:
            return values[number - 1]
        return math.inf

    def _push(self, bound: float, node: _Node) -> None:
        heapq.heappush(self.heap, (bound, -_DEPTH[type(node)], next(self.order), node))

    def _worth(self, seconds: float, used: int) -> float:
        if self.objective == "accelerator_seconds":
            return seconds * used
        return seconds

    def _size(self, node: _Sizes) -> None:
        """Divide the branch `node`: add one branch for each size of the component that has the most possible sizes.

        If each component has only one possible size, add a branch for their places.
        """
        open_ = [c for c, sizes in node.left.items() if len(sizes) > 1]
        if not open_:
            sizes = {c: only for c, (only,) in node.left.items()}
            bound = self.search.of_sizes(node.mode, node.left)
            starts = _Places(node.mode, sizes, {}, self.space.empty)
            self._push(
                self._worth(bound, max(size.accelerators for size in sizes.values())),
                starts,
            )
            return
        component = max(open_, key=lambda c: len(node.left[c]))
        for size in node.left[component]:
            left = {**node.left, component: (size,)}
            pair = self.space.model.pair
            if node.mode.shared and component in pair:
                left |= {c: (size,) for c in pair if size in node.left[c]}
                if len({left[c] for c in pair}) > 1:
                    continue
            least = max(min(s.accelerators for s in sizes) for sizes in left.values())
            self._push(
                self._worth(self.search.of_sizes(node.mode, left), least),
                _Sizes(node.mode, left),
            )

    def _place(self, node: _Places, bound: float) -> None:
        """Divide the branch `node`: add one branch for each place of the largest component that has no place yet.

        If all components have a place, add branches for the plans with these places.
        """
        left = [c for c in self.space.free if c not in node.starts]
        if not left:
            used = self.space.used(node.cells)
            if self._may_use(used):
                self._leaves(node, used, bound)
            return
        component = max(left, key=lambda c: node.sizes[c].accelerators)
        pair = self.space.model.pair
        other = next((c for c in pair if c != component), "")
        if node.mode.shared and component in pair and other in node.starts:
            places = self.space.again(node.cells, component, other)
            self._push(
                bound,
                node._replace(
                    starts={**node.starts, component: node.starts[other]}, cells=places
                ),
            )
            return
        seconds = self.search.of_sizes(
            node.mode, {c: (size,) for c, size in node.sizes.items()}
        )
        for start, cells in self.space.places(
            node.cells, component, node.sizes[component].accelerators
        ):
            used = self.space.used(cells)
            if used <= self.most:
                starts = {**node.starts, component: start}
                self._push(
                    max(bound, self._worth(seconds, used)),
                    node._replace(starts=starts, cells=cells),
                )

    def _leaves(self, node: _Places, used: int, bound: float) -> None:
        """Add a branch for each choice of components that are not offloaded, among those that share accelerators.

        Offloading adds moves and can change stages, so the bound of one choice does not hold for another choice.
        `used`: number of accelerators.
        """
        sharing = self.space.sharing(node.cells)
        seen = set[object]()
        for number in range(len(sharing), -1, -1):
            for stays in itertools.combinations(sharing, number):
                layout = Layout(
                    mode=node.mode, sizes=node.sizes, starts=node.starts, stays=stays
                )
                schedule = self.space.schedule(node.cells, stays)
                keys = self.search.keys(layout, schedule)
                if keys not in seen:
                    seen.add(keys)
                    self._leaf(
                        _Leaf(
                            layout,
                            node.cells,
                            keys,
                            self.search.least(layout, schedule, keys),
                            used,
                        ),
                        schedule,
                        bound,
                    )

    def _leaf(self, leaf: _Leaf, schedule: Schedule, bound: float) -> None:
        bound = max(
            bound, self._worth(self.search.at_least(leaf.keys, leaf.least), leaf.used)
        )
        if lacking := self.search.lacks(schedule, leaf.layout.mode):
            self.lacking.update(lacking)
            self.counts["without costs"] += 1
        elif bound >= self._limit(self.keep) * (1 - _SAME):
            self.counts["left out by bound"] += 1
        else:
            self._push(bound, leaf)

    def _decide(self, node: _Leaf) -> None:
        """Check and predict the plan of `node`, unless a known plan takes equally long on as few or fewer accelerators.

        Components that never have to move are first removed from the layout's `stays`.
        """
        if node.used >= self.fewest.get(node.keys, math.inf):
            return
        layout = node.layout
        # Components that never have to move are removed from `stays`.
        needed = layout.stays
        for component in layout.stays:
            fewer = tuple(c for c in needed if c != component)
            if (
                self.search.keys(layout, self.space.schedule(node.cells, fewer))
                == node.keys
            ):
                needed = fewer
        self._check(dataclasses.replace(layout, stays=needed))

    def _check(self, layout: Layout) -> Found | None:
        """Make and predict the plan of a layout, and return it.

        Return None if the plan is not valid, does not fit into memory, or needs costs that the profile lacks.
        """
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
            lacks = -min(
                (account.margin_bytes or 0 for account in ledger.accounts), default=0
            )
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
        used = len(plan.placement.used)
        tightest = ledger.tightest
        found = Found(
            space=self.space,
            layout=layout,
            plan=plan,
            case=case,
            prediction=prediction,
            used=used,
            value=self._worth(prediction.seconds, used),
            margin_bytes=None if tightest is None else tightest.margin_bytes,
        )
        key = self.search.keys(layout, plan.schedule)
        if self._may_use(used):
            self.fewest[key] = min(used, self.fewest.get(key, used))
            if (key, used) not in self.found or _rank(found) < _rank(
                self.found[key, used]
            ):
                self.found[key, used] = found
        return found


def _rank(found: Found) -> tuple[float, int, int, int]:
    """Return the sort key of a plan, best first: low value, few accelerators, few changed keys, much free memory."""
    return (
        _rounded(found.value),
        found.used,
        len(found.space.varied),
        -(found.margin_bytes or 0),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.9g}")
