"""The plan as text for people and as plain values for programs."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

from rlplace.placement.channels import ChannelPlan
from rlplace.placement.language.hybrid import DISAGGREGATED
from rlplace.placement.machines.ranges import Ranges, show_range
from rlplace.placement.machines.topology import Topology
from rlplace.placement.schedule import Move, Residency, Transition, apart
from rlplace.placement.show.columns import INDENT, clipped, indented, table
from rlplace.placement.show.fold import NodeFold, fold_nodes
from rlplace.placement.transfers import AnyPlan, Transfer, emulated, transfers, transports_of
from rlplace.units import show_bytes

WIDTH = 100
_WIDEST_MAP = 16  # accelerators of a node that still get a column each


def render_text(plan: AnyPlan) -> str:
    """The whole plan in plain ASCII, 100 columns wide."""
    return "\n\n".join([*plan_sections(plan), *warning_sections(plan)])


def plan_sections(plan: AnyPlan) -> list[str]:
    """What there is to say, without the warnings."""
    sections = [_title(plan), _where(plan), _pairs(plan), _stages(plan), _routes(plan), _carriers(plan)]
    if plan.channels:
        sections.append(_channels(plan))
    return [s for s in sections if s]


def warning_sections(plan: AnyPlan) -> list[str]:
    """One section, or none."""
    if not plan.warnings:
        return []
    return ["\n".join(["warnings", *(textwrap.indent(w.render(), INDENT) for w in plan.warnings)])]


def _title(plan: AnyPlan) -> str:
    title = f"plan: {plan.placement.mode}, {plan.topology.describe()}, {machine(plan.topology)}"
    return f"{title}\nnodes are numbered {plan.topology.order}" if len(plan.topology.nodes) > 1 else title


def machine(topology: Topology) -> str:
    """`H100, 80 GiB each`; every product where there are several."""
    kinds = dict.fromkeys((run.product or node.kind, run.memory_bytes) for node in topology.nodes for run in node.alike)
    each = [f"{name}, {show_bytes(memory)} each" if memory else name for name, memory in kinds]
    return " + ".join(each) or "no accelerators"


def _where(plan: AnyPlan) -> str:
    placement = plan.placement
    rows = [
        (c, placement.spec(c).render(), str(placement.world_size(c)), _ratio(plan, c)) for c in placement.components
    ]
    grid = table([("component", "placement", "ranks", "each rank has"), *(_short(r) for r in rows)])
    folds = fold_nodes(placement)
    maps = [m for fold in folds[:8] if (m := _map(fold)) is not None]
    if len(folds) > 8:
        maps.append([f"... and {len(folds) - 8} more kinds of node"])
    return "\n".join(["who is where", *indented(grid), *(line for m in maps for line in ["", *indented(m)])])


def _ratio(plan: AnyPlan, component: str) -> str:
    shapes = {(s.ranks_per_accelerator, s.accelerators_per_rank) for s in plan.placement.spec(component).segments}
    words = {
        (f"1/{ranks} of an accelerator" if ranks > 1 else f"{each} accelerator{'s' * (each > 1)}")
        for ranks, each in shapes
    }
    return " or ".join(sorted(words)) or "no accelerator"


def _map(fold: NodeFold) -> list[str] | None:
    """One column per accelerator, one row per component; a cell names the ranks that live there."""
    if fold.accelerators > _WIDEST_MAP or not fold.accelerators:
        return None
    single = len(fold.nodes) == 1
    offset = fold.first if single else 0
    cells = {c: _cells(c, fold) for c in fold.local}
    width = max(len(t) for row in cells.values() for t in row) + 1
    width = max(width, len(str(offset + fold.accelerators - 1)) + 1)
    name = max(len(c) for c in cells)
    what = "each number is a rank" if single else "each number is a rank, counted from the node's first"
    header = "".join(f"{offset + i:>{width}}" for i in range(fold.accelerators))
    lines = [f"{fold.label}: {what}", f"{'accelerator':<{max(name, 11)}} {header}"]
    lines += [f"{c:<{max(name, 11)}} {''.join(f'{t:>{width}}' for t in row)}" for c, row in cells.items()]
    return lines


def _cells(component: str, fold: NodeFold) -> list[str]:
    """The component's ranks on each accelerator of the fold's first node."""
    cells = ["."] * fold.accelerators
    base = fold.first_rank[component] if len(fold.nodes) == 1 else 0
    for segment in fold.local[component]:
        for accelerator in segment.accelerators:
            at = (accelerator - segment.accelerators.start) // segment.accelerators_per_rank
            first = base + segment.ranks.start + at * segment.ranks_per_accelerator
            cells[accelerator] = show_range(range(first, first + segment.ranks_per_accelerator))
    return cells


def _pairs(plan: AnyPlan) -> str:
    placement = plan.placement
    rows: list[tuple[str, ...]] = []
    for a, b in itertools.combinations(placement.components, 2):
        word, shared = placement.relation(a, b), placement.shared(a, b)
        rows.append((f"{a} + {b}", word, "share nothing" if word == DISAGGREGATED else f"share {shared}"))
    return "\n".join(["pairs", *indented(table([_short(r) for r in rows]))]) if rows else ""


def _stages(plan: AnyPlan) -> str:
    schedule, components = plan.schedule, plan.placement.components
    held = [[_held(plan, stage, c) for c in components] for stage in schedule.stages]
    grid = table([("stage", *components), *((s, *row) for s, row in zip(schedule.stages, held, strict=True))])
    moves = [_moves(schedule.entries[stage]) for stage in schedule.stages]
    left = max(map(len, grid)) + 4
    heading = "on entry: release first, wait for all, then acquire"
    if left + len(heading) > WIDTH:  # too many components for both beside each other
        stages = table([(stage, "") for stage in schedule.stages])
        lines = [*grid, heading, *_all_beside(stages, moves, max(map(len, stages)) + 4)]
    else:
        lines = [f"{grid[0]:<{left}}{heading}", *_all_beside(grid[1:], moves, left)]
    start = ", ".join(map(_move, schedule.first.acquires)) or "nothing"
    notes = [f"at the start everything is off; the first {schedule.first.stage} acquires {start}"]
    if plan.needs.ahead:
        notes.insert(0, f"rollout || learn: rollout goes on in every stage, {apart(plan.needs)}")
    if any("(" in cell for row in held for cell in row):
        notes.insert(0, "(full): not needed in this stage, and in nobody's way")
    wrapped = [line for note in notes for line in textwrap.wrap(note, WIDTH - 2)]
    return "\n".join(["stages: what each component holds on its accelerators", *indented([*lines, *wrapped])])


def _held(plan: AnyPlan, stage: str, component: str) -> str:
    held = plan.schedule.residency[stage][component]
    waits = held > Residency.OFF and plan.schedule.needs.of(stage, component) is Residency.OFF
    return f"({held.word})" if waits else held.word


def _moves(entry: Transition) -> str:
    if not entry.releases and not entry.acquires:
        return "nothing moves"
    releases, acquires = (", ".join(map(_move, moves)) or "-" for moves in (entry.releases, entry.acquires))
    return f"{releases} | {acquires}"


def _move(move: Move) -> str:
    return f"{move.component} {move.before.word}->{move.after.word}"


def _routes(plan: AnyPlan) -> str:
    made = transfers(plan)
    if not made:
        return ""
    heading = "transport: pairs of ranks"
    rows = [("what", "from -> to", "ranks", "how much"), *((j.name, *_ends(plan, j), j.amount) for j in made)]
    grid, transports = table(rows), [transfer.by_transport for transfer in made]
    if max(map(len, grid)) + 3 + len(heading) > WIDTH - 2:  # long names: how much goes with the transports
        grid, heading = table([row[:3] for row in rows]), f"how much; {heading}"
        transports = [f"{transfer.amount}; {transport}" for transfer, transport in zip(made, transports, strict=True)]
    left = max(map(len, grid)) + 3
    lines = [f"{grid[0]:<{left}}{heading}", *_all_beside(grid[1:], transports, left)]
    return "\n".join(["routes: who sends to whom", *indented(lines)])


def _all_beside(rows: Sequence[str], texts: Sequence[str], left: int) -> list[str]:
    return [line for row, text in zip(rows, texts, strict=True) for line in _beside(row, text, left)]


def _beside(row: str, text: str, left: int) -> list[str]:
    """`row` with `text` from column `left` on, wrapped there."""
    first, *more = textwrap.wrap(text, max(30, WIDTH - 2 - left)) or [""]
    return [f"{row:<{left}}{first}", *(" " * left + line for line in more)]


def _ends(plan: AnyPlan, transfer: Transfer) -> tuple[str, str]:
    sizes = (plan.placement.world_size(c) for c in (transfer.source, transfer.target))
    return f"{transfer.source} -> {transfer.target}", " -> ".join(map(str, sizes))


def _carriers(plan: AnyPlan) -> str:
    found = transports_of(plan)
    if not found:
        return ""
    rows = [("transport", "because", "items go by", "device tensors by")]
    rows += [(transport.value, clipped(c.because, 48), c.items, c.tensors) for transport, c in found.items()]
    lines = table(rows)
    if emulated(plan.topology):
        lines = [
            *table([row[:3] for row in rows]),
            "tensors on emulated accelerators are in host memory and go as items do",
        ]
    return "\n".join(["transports: how far apart two ranks are, and what carries data between them", *indented(lines)])


def _channels(plan: AnyPlan) -> str:
    rows = [(c.name, f"{c.capacity_items} items", lives_in(c)) for c in plan.channels]
    grid = table([("name", "capacity", "lives in"), *rows])
    lines = _all_beside(grid, ["because", *(c.why for c in plan.channels)], max(map(len, grid)) + 3)
    return "\n".join(["channels", *indented(lines)])


def lives_in(channel: ChannelPlan) -> str:
    """`node 0`, `nodes 0-1, 4 items each`, `8 processes, 2 items each`."""
    homes = channel.homes()
    nodes = Ranges.of(range(h.node, h.node + 1) for h in homes if not h.process)
    processes = [h.process for h in homes if h.process]
    told = [f"{len(processes)} processes" if len(processes) > 1 else f"process {p}" for p in processes[:1]]
    told += [f"node{'s' * (len(nodes) > 1)} {clipped(str(nodes), 20)}"] if nodes else []
    sizes = {h.capacity_items for h in homes}
    least, most = min(sizes), max(sizes)
    each = "" if len(homes) == 1 else f", {least} items each" if least == most else f", {least} to {most} items each"
    return " and ".join(told) + each


def _short(row: Sequence[str]) -> tuple[str, ...]:
    return tuple(clipped(cell, 48) for cell in row)
