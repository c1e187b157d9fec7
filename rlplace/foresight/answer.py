"""The result of a search as text, as plain values (JSON) and as a picture (SVG)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rlplace.config.yaml_text import to_yaml
from rlplace.foresight.predict import Prediction, predict
from rlplace.foresight.probe import Probe, changed, describe
from rlplace.foresight.profile import Profile
from rlplace.foresight.scaling import listed
from rlplace.foresight.search import Answer, Found, Search
from rlplace.foresight.show import (
    crowded,
    limit,
    predicted_seconds,
    scaling_notes,
    show_interval,
    stages_of,
)
from rlplace.placement.show.drawing import FONT, PALETTE, element, title
from rlplace.tables import indented, table
from rlplace.units import counted, show_bytes

COSTS = 8
FACTOR = 4.0
_STEPS = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The factors by which one cost has to change so that a runner-up becomes the best plan.

    `cost`: name of the cost. `share`: the cost's share of the best plan's processor seconds.
    `less`: a factor below 1; None: the plan stays the best down to 1 / FACTOR.
    `more`: a factor above 1; None: the plan stays the best up to FACTOR.
    """

    cost: str
    share: float
    less: float | None
    more: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """The answer of a search, and further results that are printed with the answer.

    `name`: name of the config. `front`: the Pareto front, see `pareto`. `turns`: how far costs may change before
    another plan is the best.
    `seconds`: duration of the search. `notes`: further lines of text. `probed`: results of short runs of the best
    plans.
    `unmeasured`: component -> measured numbers of ranks, for components that may get a number that was not measured.
    `ranged`: the best plan's prediction with its least and most seconds under all assumptions about scaling with the
    number of ranks; None if nothing is assumed.
    """

    name: str
    search: Search
    answer: Answer
    front: Sequence[Found]
    turns: Sequence[Turn]
    seconds: float
    notes: Sequence[str] = ()
    probed: Sequence[Probe] = ()
    unmeasured: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    ranged: Prediction | None = None

    @property
    def best(self) -> Found:
        assert self.answer.best is not None, "an empty space is an error"
        return self.answer.best

    @property
    def text(self) -> str:
        """The result as the command prints it."""
        return render_text(self)

    @property
    def picture(self) -> str:
        """The result as an SVG picture."""
        return render_svg(self)

    def __repr__(self) -> str:
        return f"<search of {self.name}: {self.best.seconds:.3g} s an iteration on {self.best.used} accelerators>"

    def _repr_html_(self) -> str:
        """Return the picture of the result, which a notebook displays."""
        return f'<div style="max-width: 72em">{self.picture}</div>'


def pareto(found: Sequence[Found]) -> list[Found]:
    """Return the Pareto front of plans for three goals: few seconds, few accelerators, much free memory.

    A plan is left out if another plan is at least as good in all three goals and better in one of them. Of plans that
    are equal in all three, the first is kept. The result is sorted by accelerators, then by seconds.
    """

    def beats(one: Found, other: Found) -> bool:
        mine, its = ((f.seconds, f.used, -(f.margin_bytes or 0)) for f in (one, other))
        return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))

    kept = [f for f in found if not any(beats(other, f) for other in found)]
    alike = {(f.seconds, f.used, f.margin_bytes): f for f in reversed(kept)}
    return sorted(alike.values(), key=lambda f: (f.used, f.seconds))


def turns(
    search: Search,
    best: Found,
    others: Sequence[Found],
    objective: Callable[[Found, float], float],
    over: Callable[[], bool] = lambda: False,
) -> Iterator[Turn]:
    """Yield, for each of the most expensive costs, the factors at which one of `others` becomes better than `best`.

    The factors are found by bisection: the plans are predicted again with the cost multiplied by a factor. `search`:
    the search that found the plans. `others`: the runners-up. `objective`: takes a plan and its seconds, and returns
    the value that the search minimises. `over`: returns True when time has run out; the remaining costs are then
    skipped.
    """
    spent = best.prediction.costs.spent
    whole = sum(spent.values()) or 1.0
    for cost in sorted((c for c in spent if spent[c]), key=lambda c: -spent[c])[:COSTS]:

        def lead(factor: float, cost: str = cost) -> float:
            if over():
                # This cost cannot be varied, so it is skipped.
                return 0.0
            scaled = _scaled(search.profile, cost, factor)
            ours, *theirs = (
                objective(f, _again(f, scaled).seconds) for f in (best, *others)
            )
            return min(theirs) - ours

        turn = Turn(
            cost=cost,
            share=spent[cost] / whole,
            less=_flip(lead, 1 / FACTOR),
            more=_flip(lead, FACTOR),
        )
        if over():
            return
        yield turn


def _flip(lead: Callable[[float], float], far: float) -> float | None:
    """Return a factor between 1 and `far` at which the best plan is no longer the best; None if it still is at `far`.

    `lead`: takes a factor, and returns by how much the best plan's value is below the least value of the other plans;
    negative if another plan is better.
    """
    if lead(far) >= 0.0:
        return None
    near = 1.0
    for _ in range(_STEPS):
        middle = (near * far) ** 0.5
        near, far = (middle, far) if lead(middle) >= 0.0 else (near, middle)
    return far


def _scaled(profile: Profile, cost: str, factor: float) -> Profile:
    curve = profile.costs[cost]
    points = tuple(
        dataclasses.replace(
            p,
            cpu_s=p.cpu_s * factor,
            least_cpu_s=p.least_cpu_s * factor,
            blocked_s=p.blocked_s * factor,
        )
        for p in curve.points
    )
    costs = {**profile.costs, cost: dataclasses.replace(curve, points=points)}
    return dataclasses.replace(profile, costs=costs)


def _again(found: Found, profile: Profile) -> Prediction:
    return predict(found.space.config_of(found.layout), found.plan, found.case, profile)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _unlike(found: Found, best: Found) -> str:
    """Return the parts of a plan's description that the description of the best plan does not have."""
    same = describe(best).split("; ")
    return (
        "; ".join(part for part in describe(found).split("; ") if part not in same)
        or "fewer stay"
    )


def why_slower(best: Found, other: Found) -> str:
    """Return a text about why `other` is not the best plan.

    The text names the stage in which `other` loses the most seconds compared with `best`. If `other` is not slower in
    any stage, the text says that it uses more accelerators, or that it is as fast.
    """
    ours = predicted_seconds(best.prediction)
    theirs = predicted_seconds(other.prediction)
    longer = {
        s: theirs.get(s, 0.0) - ours.get(s, 0.0) for s in stages_of(best.prediction)
    }
    stage = max(longer, key=longer.__getitem__)
    if longer[stage] <= 0.0:
        if other.used > best.used:
            return "it uses more accelerators"
        return "as fast"
    return f"{longer[stage]:.2g} s more in {stage}{crowded(other.prediction)}"


def render_text(result: Result) -> str:
    """Return the result of a search as a page of text."""
    answer = result.answer
    best = result.best
    lines = [
        f"search: {result.name}, {result.search.space.plan.topology.describe()}",
        "",
    ]
    lines += [
        f"best: {best.seconds:.3g} s an iteration on {_accelerators(best)}; {_proof(result)}"
    ]
    current = answer.current
    if current is None:
        lines.append("the config's own plan does not hold, see above")
    elif current.value <= best.value * (1 + 1e-9):
        lines.append("the config's own plan is as good")
    else:
        lines.append(
            f"{current.seconds / best.seconds:.3g} times as fast as the config: {current.seconds:.3g} s"
        )
    lines += [
        f"  {describe(best)}",
        f"  {limit(best.prediction)}",
        *_assumed(result),
        "",
        *_stage_table(result),
        "",
    ]
    if there := {
        key: value for key, value in best.changes.items() if value is not None
    }:
        lines += [
            "keys that change",
            *(f"  {line}" for line in to_yaml(changed({}, there)).splitlines()),
            "",
        ]
    if others := answer.found[1:]:
        lines.append("the runners-up")
        rows = []
        for other in others:
            loses = f"+{other.value / best.value - 1:.1%}"
            rows.append(
                (
                    f"{other.seconds:.3g} s",
                    loses,
                    why_slower(best, other),
                    _unlike(other, best),
                )
            )
        lines += [*_table(rows), ""]
    if result.probed:
        lines.append(
            "probed: seconds of an iteration, predicted and measured, and the iterations"
        )
        runs = [
            (f"{p.predicted:.3g}", f"{p.measured:.3g}", str(p.iterations), p.plan)
            for p in result.probed
        ]
        lines += [*_table(runs), ""]
    lines.append("seconds, accelerators, free memory: nothing is better in all three")
    lines += [
        *_table(
            [
                (f"{f.seconds:.3g} s", str(f.used), _margin(f), describe(f))
                for f in result.front
            ]
        ),
        "",
    ]
    if result.turns:
        lines.append(
            "a runner-up would be the best plan if the seconds of a part were multiplied by"
        )
        lines += [
            *_table(
                [
                    (t.cost, f"{t.share:.0%} of the work", _factors(t))
                    for t in result.turns
                ]
            ),
            "",
        ]
    return "\n".join([*lines, *_counted(result), *result.notes])


def _assumed(result: Result) -> list[str]:
    """Return lines of text about the range of the best plan's seconds, and about the assumptions that cause the range.

    The assumptions say how costs depend on the number of ranks. Without assumptions, the list is empty.
    """
    if result.ranged is None:
        return []
    shown = show_interval(result.ranged)
    lines = [f"an iteration takes {shown}"] if shown else []
    return [f"  {line}" for line in (*lines, *scaling_notes(result.ranged))]


def _proof(result: Result) -> str:
    answer = result.answer
    if result.unmeasured:
        each = [f"{name} {listed(known)}" for name, known in result.unmeasured.items()]
        return (
            "an assumption, not a proof: that ranks share their work, where only these"
            f" numbers of ranks were measured: {', '.join(each)}"
        )
    if answer.proven:
        return "proven: under the profile no plan takes less (gap 0 %)"
    return f"no plan is below {answer.bound:.3g} (gap {answer.gap:.1%})"


def _accelerators(found: Found) -> str:
    return counted(found.used, "accelerator")


def _margin(found: Found) -> str:
    if found.margin_bytes is None:
        return "not known"
    return show_bytes(found.margin_bytes)


def _stage_table(result: Result) -> list[str]:
    columns = {"best": result.best} | (
        {"config": result.answer.current} if result.answer.current else {}
    )
    seconds = [predicted_seconds(found.prediction) for found in columns.values()]
    rows = [
        (stage, *(f"{column.get(stage, 0.0):.4f}" for column in seconds))
        for stage in seconds[0]
    ]
    return _table([("seconds", *columns), *rows])


def _factors(turn: Turn) -> str:
    found = [f"{factor:.2f}" for factor in (turn.less, turn.more) if factor is not None]
    return " or ".join(found) or f"no factor between 1/{FACTOR:g} and {FACTOR:g}"


def _counted(result: Result) -> list[str]:
    counts = result.answer.counts
    told = [f"{counts[name]} {name}" for name in counts if counts[name]]
    lines = [f"counted: {', '.join(told)}; {result.seconds:.1f} s"]
    if result.answer.refused:
        lines.append(
            "  refused: "
            + ", ".join(
                f"{code} {n}" for code, n in sorted(result.answer.refused.items())
            )
        )
    if result.answer.lacking:
        names = ", ".join(sorted(result.answer.lacking))
        lines.append(
            f"  without costs: left out, since the profile lacks seconds of {names}; a run of such a plan has them"
        )
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return indented(table(rows))


# ── plain values, and a picture ──────────────────────────────────────────────────────────────────────────────────────


def render_json(result: Result) -> dict[str, Any]:
    """Return the result of a search as plain values for JSON."""
    answer = result.answer
    best = result.best

    def record(found: Found) -> dict[str, Any]:
        return {
            "seconds": found.seconds,
            "value": found.value,
            "stages": predicted_seconds(found.prediction),
            "accelerators": found.used,
            "free_bytes": found.margin_bytes,
            "bottleneck": limit(found.prediction),
            "placement": found.plan.placement.canonical(),
            "changes": found.changes,
        }

    return {
        "config": result.name,
        "objective": answer.objective,
        "best": record(best),
        "current": None if answer.current is None else record(answer.current),
        "bound": answer.bound,
        "gap": answer.gap,
        "proven": answer.proven and not result.unmeasured,
        "unmeasured": {name: list(n) for name, n in result.unmeasured.items()},
        "runners_up": [
            record(f) | {"loses": f.value / best.value - 1, "why": why_slower(best, f)}
            for f in answer.found[1:]
        ],
        "front": [record(f) for f in result.front],
        "sensitivity": [dataclasses.asdict(turn) for turn in result.turns],
        "counts": dict(answer.counts),
        "refused": dict(answer.refused),
        "lacking": dict(answer.lacking),
        "search_s": result.seconds,
        "probed": [dataclasses.asdict(p) for p in result.probed],
        "notes": list(result.notes),
    }


# Sizes in pixels.
_WIDTH = 960
_ROW = 44  # height of a plan
_TOP = 64  # y of the first plan
_LEFT = 24
_KEY = 110  # width of a legend entry
_LOOK = (
    f"text{{font:12px {FONT};fill:#1f2328}}@media(prefers-color-scheme:dark){{text{{fill:#e6edf3}}"
    ".page{fill:#0d1117}}.page{fill:#fff}"
)


def render_svg(result: Result) -> str:
    """Return an SVG document with a bar for each plan, which shows the seconds of the plan's stages.

    The plans are the best plan, the runners-up, and the config's own plan if it is slower than the best plan.
    """
    # The plans to draw, by the names above their bars
    shown: dict[str, Found] = {}
    for at, found in enumerate(result.answer.found):
        name = f"runner-up {at}" if at else "best"
        shown[name] = found
    current = result.answer.current
    if current is not None and current.value > result.best.value:
        shown["config"] = current

    longest = max(found.seconds for found in shown.values())
    # Pixels per second
    scale = (_WIDTH - 2 * _LEFT - 90) / longest
    bars: list[str] = []
    for row, (name, found) in enumerate(shown.items()):
        bars += _draw_plan(name, found, _TOP + row * _ROW, scale)

    legend: list[str] = []
    for at, stage in enumerate(stages_of(result.best.prediction)):
        x = _LEFT + _KEY * at
        fill = PALETTE[at % len(PALETTE)][0]
        sample = element("rect", x=x, y=30, width=10, height=10, fill=fill)
        legend += [sample, element("text", stage, x=x + 16, y=40)]

    height = 76 + len(shown) * _ROW
    heading = escape(f"{result.name}: {_proof(result)}")
    lines = [
        "",
        element("style", _LOOK),
        element("rect", class_="page", width=_WIDTH, height=height),
        element("text", heading, x=_LEFT, y=20, font_weight="bold"),
        *legend,
        *bars,
        "",
    ]
    return element(
        "svg",
        "\n".join(lines),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {height}",
        width=_WIDTH,
    )


def _draw_plan(name: str, found: Found, y: int, scale: float) -> Iterator[str]:
    """Yield the SVG elements of one plan: its name and description, a bar with its stages, and its seconds.

    `y`: pixels from the top. `scale`: pixels for each second.
    """
    heading = escape(f"{name}: {describe(found)}")
    yield element("text", heading, x=_LEFT, y=y)
    seconds = predicted_seconds(found.prediction)
    x = float(_LEFT)
    for at, stage in enumerate(stages_of(found.prediction)):
        took = seconds.get(stage, 0.0)
        yield element(
            "rect",
            title(f"{stage} {took:.4f} s"),
            x=x,
            y=y + 6,
            width=took * scale,
            height=14,
            fill=PALETTE[at % len(PALETTE)][0],
        )
        x += took * scale
    total = f"{found.seconds:.3g} s"
    yield element("text", total, x=f"{x + 6:.0f}", y=y + 18)
