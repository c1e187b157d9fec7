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
    """The factors for one cost: multiplied by `less` or `more`, the cost makes a runner-up the best plan."""

    cost: str
    share: float  # share of the best plan's processor seconds
    less: float | None  # a factor below 1; None: no such factor down to 1 / FACTOR
    more: float | None  # a factor above 1; None: no such factor up to FACTOR


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer of a search, with everything else that is shown about it."""

    name: str  # of the config
    search: Search
    answer: Answer
    # Pareto front: no other plan is better in seconds, accelerators and free memory
    front: Sequence[Found]
    turns: Sequence[Turn]
    seconds: float  # duration of the search
    notes: Sequence[str] = ()
    probed: Sequence[Probe] = ()
    # Component -> numbers of ranks that were measured, where the search may choose others.
    unmeasured: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    # The best plan with the ends of what is assumed of scaling; None: nothing is.
    ranged: Prediction | None = None

    @property
    def best(self) -> Found:
        assert self.answer.best is not None, "an empty space is an error"
        return self.answer.best


def pareto(found: Sequence[Found]) -> list[Found]:
    """Return the Pareto front: the plans that no other plan beats in seconds, accelerators and free memory together."""

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
    """Yield, for each of the most expensive costs, the factors with which one of `others` is as good as the best plan.

    The factors are found by bisection. `objective`: takes a plan and its seconds, and returns its value. `over`:
    returns whether time has run out; the remaining costs are skipped then.
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
    """Return the factor between 1 and `far` at which the best plan loses its lead; None if it keeps the lead.

    `lead`: takes a factor, and returns by how much the best plan is better.
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
    """Return a text about how a plan differs from the best plan."""
    same = describe(best).split("; ")
    return (
        "; ".join(part for part in describe(found).split("; ") if part not in same)
        or "fewer stay"
    )


def why_slower(best: Found, other: Found) -> str:
    """Return a text that names the stage in which `other` is slower than the best plan, and what limits the stage."""
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
    """Return a result as a page of text."""
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
        lines.append("what would make a runner-up the better plan: a cost, times")
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
    """Return lines of text about the range of the best plan's seconds, and about what is assumed of scaling with ranks.

    The list is empty if nothing is assumed.
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
    return " or ".join(found) or f"nothing between 1/{FACTOR:g} and {FACTOR:g}"


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
            f"  without costs: the profile lacks {names}, and with it the profile of a run that needs them"
        )
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return indented(table(rows))


# ── plain values, and a picture ──────────────────────────────────────────────────────────────────────────────────────


def render_json(result: Result) -> dict[str, Any]:
    """Return a result as plain values for JSON."""
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
    """Return an SVG document with the seconds of each stage as bars: the best plan, runners-up, the config's plan.

    The config's plan is drawn only if it is slower than the best plan.
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
    """Yield the SVG elements of a plan: name and description, a bar of its stages, its seconds.

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
