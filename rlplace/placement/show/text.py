"""Plans as ASCII text of 100 columns: one by chapters, or two side by side with their differences marked."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rlplace.placement.flow import Transport
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.machines.topology import show_range
from rlplace.placement.memory.records import render_ledger, verdict
from rlplace.placement.schedule import Move
from rlplace.placement.show.view import NodeFold, PlanView
from rlplace.placement.transfers import emulated
from rlplace.tables import chapter, table
from rlplace.units import clipped, counted, show_bytes

WIDTH = 100
_SCREEN = 80
_WIDEST_MAP = 16  # accelerators of a node that still get a column each
_MOST_FOLDS = 8
_LONGEST_CELL = 48
EMULATED = "tensors on emulated accelerators are in host memory and go as items do"


def render_text(view: PlanView) -> str:
    """Write every section that has something to show."""
    topology = view.plan.topology
    placement = view.plan.placement
    order = f"\nnodes are numbered {topology.order}" if len(topology.nodes) > 1 else ""
    sections = [
        f"plan: {placement.mode}, {view.machines}{order}",
        _places(view),
        *_pairs(placement),
        _stages(view),
    ]
    sections += [*_transfers(view), *_transports(view)]
    if view.channels:
        rows = [
            (c.name, f"{c.capacity_items} items", at, c.why) for c, at in view.channels
        ]
        sections.append(
            chapter(
                "channels", _wrapped([("name", "capacity", "on", "because"), *rows])
            )
        )
    if view.counts:
        lines = _wrapped([(c.subject, c.count, c.why) for c in view.counts])
        sections.append(chapter("counts: what each number follows from", lines))
    sections += [*_savings(view), *_traffic(view)]
    notes = [
        line for note in view.ledger.notes for line in textwrap.wrap(note, WIDTH - 2)
    ]
    sections.append(
        chapter("memory: not known", notes)
        if view.ledger.empty
        else render_ledger(view.ledger)
    )
    if view.plan.warnings:
        sections.append(
            "\n".join(
                [
                    "warnings",
                    *(textwrap.indent(w.render(), "  ") for w in view.plan.warnings),
                ]
            )
        )
    return "\n\n".join(sections)


def render_short(view: PlanView) -> str:
    """Write what matters before a run, in a dozen lines of 80 columns: who is where, whether it fits, what it saves."""
    rows = [("component", "ranks", "placement")]
    rows += [
        (c.name, str(c.world_size), clipped(c.render(), _LONGEST_CELL))
        for c in view.components
    ]
    lines = [
        f"plan: {view.plan.placement.mode}, {view.machines}",
        *(f"  {line}" for line in table(rows)),
    ]
    if not view.ledger.empty:
        lines.append(verdict(view.ledger))
    if view.comparison is not None and view.comparison.savings.saved:
        savings = view.comparison.savings
        lines.append(f"savings: {savings.text}")
    wrapped = (
        textwrap.wrap(line, _SCREEN, subsequent_indent="    ")
        for text in lines
        for line in text.splitlines()
    )
    return "\n".join(
        [*itertools.chain(*wrapped), *(w.render() for w in view.plan.warnings)]
    )


def _places(view: PlanView) -> str:
    rows = [("component", "ranks", "each rank has", "placement")]
    for c in view.components:
        shapes = {
            (s.ranks_per_accelerator, s.accelerators_per_rank) for s in c.segments
        }
        words = {
            f"1/{n} of an accelerator" if n > 1 else counted(each, "accelerator")
            for n, each in shapes
        }
        rows.append(
            (
                c.name,
                str(c.world_size),
                " or ".join(sorted(words)) or "no accelerator",
                c.render(),
            )
        )
    lines = _wrapped(rows)
    for fold in view.folds[:_MOST_FOLDS]:
        if 0 < fold.accelerators <= _WIDEST_MAP:
            lines += ["", *_map(fold)]
    if len(view.folds) > _MOST_FOLDS:
        lines += ["", f"... and {len(view.folds) - _MOST_FOLDS} more kinds of node"]
    return chapter("where each component is", lines)


def _map(fold: NodeFold) -> list[str]:
    """Draw a column per accelerator, a row per component; a cell names the ranks that are there."""
    single = len(fold.nodes) == 1
    offset = fold.first if single else 0
    rows = [[str(offset + i) for i in range(fold.accelerators)]]
    for component, segments in fold.local.items():
        cells = ["."] * fold.accelerators
        base = fold.first_rank[component] if single else 0
        for segment in segments:
            for accelerator in segment.accelerators:
                at = (
                    accelerator - segment.accelerators.start
                ) // segment.accelerators_per_rank
                first = base + segment.ranks.start + at * segment.ranks_per_accelerator
                cells[accelerator] = show_range(
                    range(first, first + segment.ranks_per_accelerator)
                )
        rows.append(cells)
    width = max(len(cell) for row in rows for cell in row) + 1
    names = ["accelerator", *fold.local]
    left = max(map(len, names))
    lines = [
        f"{name:<{left}} " + "".join(f"{c:>{width}}" for c in row)
        for name, row in zip(names, rows, strict=True)
    ]
    return [
        f"{fold.label}: each number is a rank{'' if single else ', counted from the first of the node'}",
        *lines,
    ]


def _pairs(placement: HybridComponentPlacement) -> Iterator[str]:
    rows = []
    for a, b in itertools.combinations(placement.components, 2):
        shared = placement.shared(a, b)
        share = f"share {shared}" if shared else "share nothing"
        rows.append(
            (f"{a} + {b}", placement.relation(a, b), clipped(share, _LONGEST_CELL))
        )
    if rows:
        yield chapter("pairs", table(rows))


def _stages(view: PlanView) -> str:
    rows = [
        (
            "stage",
            *(c.name for c in view.components),
            "on entry: release first, wait for all, then acquire",
        )
    ]
    for stage in view.stages:
        sides = (
            ", ".join(map(_move, side)) or "-"
            for side in (stage.releases, stage.acquires)
        )
        moves = (
            " | ".join(sides) if stage.releases or stage.acquires else "nothing moves"
        )
        rows.append((stage.name, *map(stage.word, stage.held), moves))
    grid = table([row[:-1] for row in rows])
    if (
        max(map(len, grid)) + 4 + len(rows[0][-1]) > WIDTH
    ):  # too many components for both beside each other
        lines = [
            *grid,
            rows[0][-1],
            *_wrapped([(row[0], row[-1]) for row in rows[1:]], gap=4),
        ]
    else:
        lines = _wrapped(rows, gap=4)
    first = view.plan.schedule.first
    notes = (
        [f"rollout || learn: rollout continues in every stage, {view.ahead}"]
        if view.ahead
        else []
    )
    if any(stage.waiting for stage in view.stages):
        notes.append(
            "(full): not needed in this stage, and no other component needs the room"
        )
    start = ", ".join(map(_move, first.acquires)) or "nothing"
    notes.append(
        f"at the start everything is off; the first {first.stage} acquires {start}"
    )
    lines += [line for note in notes for line in textwrap.wrap(note, WIDTH - 2)]
    return chapter("stages: what each component holds on its accelerators", lines)


def _move(move: Move) -> str:
    return f"{move.component} {move.before.word}->{move.after.word}"


def _transfers(view: PlanView) -> Iterator[str]:
    if not view.transfers:
        return
    heading = "transport: pairs of ranks"
    rows: list[tuple[str, ...]] = [("what", "from -> to", "ranks", "how much", heading)]
    for t in view.transfers:
        sizes = (str(view.plan.placement.world_size(c)) for c in (t.source, t.target))
        rows.append(
            (
                t.name,
                f"{t.source} -> {t.target}",
                " -> ".join(sizes),
                t.amount,
                t.by_transport,
            )
        )
    if (
        max(map(len, table([row[:-1] for row in rows]))) + 3 + len(heading) > WIDTH - 2
    ):  # long names
        rows = [(*row[:-2], f"{row[-2]}; {row[-1]}") for row in rows]
    yield chapter("routes: which component sends to which", _wrapped(rows))


def _transports(view: PlanView) -> Iterator[str]:
    if not view.transports:
        return
    rows: list[tuple[str, ...]] = [
        ("transport", "because", "items go by", "device tensors by")
    ]
    rows += [
        (name, clipped(t.because, _LONGEST_CELL), t.items, t.tensors)
        for name, t in view.transports.items()
    ]
    lines = (
        [*table([row[:3] for row in rows]), EMULATED]
        if emulated(view.plan.topology)
        else table(rows)
    )
    yield chapter(
        "transports: how far apart two ranks are, and what carries data between them",
        lines,
    )


def _wrapped(rows: Sequence[Sequence[str]], gap: int = 3) -> list[str]:
    """Write a table whose last column is wrapped at the edge of the page."""
    texts = table([row[:-1] for row in rows])
    left = max(map(len, texts)) + gap
    lines: list[str] = []
    for text, row in zip(texts, rows, strict=True):
        first, *more = textwrap.wrap(row[-1], max(30, WIDTH - 2 - left)) or [""]
        lines += [f"{text:<{left}}{first}", *(" " * left + line for line in more)]
    return lines


def _savings(view: PlanView) -> Iterator[str]:
    """Compare both placements by stage: the same work, on how many accelerators."""
    if view.comparison is None:
        return
    savings = view.comparison.savings
    here = view.comparison.here
    apart = view.comparison.apart
    if not savings.saved:
        yield f"savings: none, every component has accelerators of its own ({savings.sizes} = {savings.used})"
        return
    rows: list[tuple[str, ...]] = [
        ("", "here", "each component on its own"),
        ("accelerators", str(savings.used), str(savings.dedicated)),
    ]
    for stage in dict.fromkeys((*here, *apart)):
        work = (
            show_work(here.get(stage), savings.used),
            show_work(apart.get(stage), savings.dedicated),
        )
        rows.append((f"at work in {stage}", *work))
    sides = view.comparison.here_bytes, view.comparison.apart_bytes
    if any(sides):
        rows.append(("fullest holds", *map(show_bytes, sides)))
    title = f"savings: {savings.text}, {savings.saved} fewer"
    yield chapter(
        title,
        [
            *table(rows),
            *textwrap.wrap(f"{savings.dedicated} = {savings.sizes}", WIDTH - 2),
        ],
    )


def show_work(count: int | None, used: int) -> str:
    """Write accelerators at work, of those used; "-" where this placement has no such stage."""
    if count is None:
        return "-"
    return f"{count} ({count / used:.0%})"


def _traffic(view: PlanView) -> Iterator[str]:
    """Write what moving and syncing costs in each iteration, where anything is known to move."""
    traffic = view.traffic
    if traffic.total_bytes:

        def why(text: str, of: str) -> str:
            least = traffic.least_s.get(of)
            if least is None:
                return text
            return f"{text}, at least {least:.2g} s"

        rows = [
            (
                "to the hosts",
                show_bytes(traffic.to_host_bytes),
                why("releases copy it away", "to_host"),
            ),
            (
                "from the hosts",
                show_bytes(traffic.from_host_bytes),
                why("acquires copy it back", "from_host"),
            ),
        ]
        for by, size in traffic.weights_bytes.items():
            rows.append(
                ("weights", show_bytes(size), why(f"one sync, {by.value}", by.value))
            )
        yield chapter("bytes in each iteration, samples not counted", table(rows))


# ── Two plans side by side ────────────────────────────────────────────────────────────────────────────────────────────

_NONE = "-"
_ZERO = show_bytes(0)  # a line with this on both sides is left out
_LONGEST_SIDE = 31


class Fact(NamedTuple):
    """One thing that both placements have, or one of them lacks."""

    what: str
    left: str
    right: str

    @property
    def differs(self) -> bool:
        return self.left != self.right


def compare(left: PlanView, right: PlanView) -> dict[str, list[Fact]]:
    """Put two plans side by side, fact by fact in each chapter that has any."""
    chapters: dict[str, list[Fact]] = {}
    for (title, here), there in zip(
        _facts(left).items(), _facts(right).values(), strict=True
    ):
        for what in dict.fromkeys((*here, *there)):
            if {here.get(what, _ZERO), there.get(what, _ZERO)} != {_ZERO}:
                chapters.setdefault(title, []).append(
                    Fact(what, here.get(what, _NONE), there.get(what, _NONE))
                )
    return chapters


def render_diff(left: PlanView, right: PlanView) -> str:
    """Write both in columns, `*` before differences; 100 columns wide."""
    chapters = compare(left, right)
    facts = [fact for chapter in chapters.values() for fact in chapter]
    rows = [
        ("", "", left.name, right.name),
        *(("*" * fact.differs, *fact) for fact in facts),
    ]
    heading, *texts = (
        f"  {text}"
        for text in table(
            [tuple(clipped(c, _LONGEST_SIDE) for c in row) for row in rows]
        )
    )
    count = sum(fact.differs for fact in facts)
    title = (
        f"{count} {'line' if count == 1 else 'lines'} differ, marked *"
        if count
        else "the same placement twice"
    )
    parts = [f"diff: {title}", heading]
    following = iter(texts)
    for name, found in chapters.items():
        parts += ["", f"  {name}", *itertools.islice(following, len(found))]
    return "\n".join(parts)


def diff_record(left: PlanView, right: PlanView) -> dict[str, Any]:
    """Return the same as plain values, ready for JSON."""
    chapters = [
        {
            "title": title,
            "lines": [fact._asdict() | {"differs": fact.differs} for fact in facts],
        }
        for title, facts in compare(left, right).items()
    ]
    return {
        "left": left.name,
        "right": right.name,
        "fits": [left.fits, right.fits],
        "chapters": chapters,
    }


def _facts(view: PlanView) -> dict[str, dict[str, str]]:
    """Map each chapter to its facts, of every plan the same chapters: what is compared, and how it is in this plan."""
    placement = view.plan.placement
    comparison = view.comparison
    traffic = view.traffic
    tightest = view.ledger.tightest
    machines = {
        "accelerators in use": f"{len(placement.used)} of {view.plan.topology.num_accelerators}",
        "nodes": str(view.plan.topology.num_nodes),
        "mode": placement.mode,
    }
    if comparison is not None:
        machines["fewer than each on its own"] = str(comparison.savings.saved)
        machines |= {
            f"at work in {s}": show_work(n, comparison.savings.used)
            for s, n in comparison.here.items()
        }
    moves = {
        "moves": str(view.moves),
        "copied to hosts": show_bytes(traffic.to_host_bytes),
        "copied from hosts": show_bytes(traffic.from_host_bytes),
    }
    memory = {
        "fits": "NO" if not view.fits else "yes" if view.ledger.known else "not known"
    }
    if tightest is not None:
        worst = tightest.worst
        memory["fullest accelerator holds"] = (
            f"{show_bytes(worst.total_bytes)} in {worst.moment}"
        )
        if tightest.margin_bytes is not None:
            memory["margin there"] = show_bytes(tightest.margin_bytes)
    shared = max((account.shared_bytes for account in view.ledger.hosts), default=0)
    return {
        "machines": machines,
        "placement": {
            c.name: f"{c.render()} ({counted(c.world_size, 'rank')})"
            for c in view.components
        },
        # `weights, off, full`: in the order of the stages
        "residency": {
            c.name: ", ".join(s.held[c.name].word for s in view.stages)
            for c in view.components
        },
        "moves in each iteration": moves
        | {
            f"weights, {t.value}": show_bytes(traffic.weights_bytes.get(t, 0))
            for t in Transport
        },
        "pairs of ranks by transport": {
            f"{t.name} to {t.target}": t.by_transport.replace(":", "")
            for t in view.transfers
        },
        "memory": memory | {"shared memory per node": show_bytes(shared)},
    }
