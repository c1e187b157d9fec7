"""Plans as ASCII text of 100 columns: one by chapters, or two side by side with their differences marked."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rlplace.placement.flow import Transport
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec
from rlplace.placement.machines.topology import show_range
from rlplace.placement.memory.records import (
    render_hosts,
    render_ledger,
    verdict,
)
from rlplace.placement.schedule import Move
from rlplace.placement.show.view import NodeFold, PlanView
from rlplace.placement.transfers import emulated
from rlplace.tables import GAP, chapter, table
from rlplace.units import clipped, counted, show_bytes

# Widths in characters.
WIDTH = 100
_SCREEN = 80
_INDENT = 2  # of the lines of a chapter
_LONGEST_CELL = 48
_LEAST_LAST = 30  # of the last column of a wrapped table
_WIDEST_MAP = 16  # accelerators of a node that still get a column each
_MOST_FOLDS = 8  # kinds of node that are drawn
_MOVES = "on entry: release first, wait for all, then acquire"
EMULATED = "tensors on emulated accelerators are in host memory and go as items do"

Rows = list[tuple[str, ...]]


def render_text(view: PlanView) -> str:
    """Return the plan as text: all chapters that have something to show, with an empty line between them."""
    topology = view.plan.topology
    placement = view.plan.placement
    heading = f"plan: {placement.mode}, {view.machines}"
    if len(topology.nodes) > 1:
        heading += f"\nnodes are numbered {topology.order}"
    # Where and when, then what moves and how large, then memory and warnings.
    sections = [
        heading,
        _places(view),
        *_pairs(placement),
        _stages(view),
        *_transfers(view),
        *_transports(view),
        *_channels(view),
        *_counts(view),
        *_savings(view),
        *_traffic(view),
        _memory(view),
        *_warnings(view),
    ]
    return "\n\n".join(sections)


def render_short(view: PlanView) -> str:
    """Return the plan in about a dozen lines of 80 columns: places, whether memory is sufficient, savings, warnings."""
    rows: Rows = [("component", "ranks", "placement")]
    for spec in view.components:
        place = clipped(_place_of(spec), _LONGEST_CELL)
        rows.append((spec.name, str(spec.world_size), place))
    texts = [chapter(f"plan: {view.plan.placement.mode}, {view.machines}", table(rows))]
    if not view.ledger.empty:
        texts.append(verdict(view.ledger))
    if view.comparison is not None and view.comparison.savings.saved:
        texts.append(f"savings: {view.comparison.savings.text}")

    # Long lines go on below, indented; warnings have lines of their own already.
    lines: list[str] = []
    for text in texts:
        for line in text.splitlines():
            lines += textwrap.wrap(line, _SCREEN, subsequent_indent="    ")
    lines += [warning.render() for warning in view.plan.warnings]
    return "\n".join(lines)


def _places(view: PlanView) -> str:
    """Return the chapter about places: a row for each component, then a map of each kind of node.

    A map that does not fit on the page is left out.
    """
    rows: Rows = [("component", "ranks", "each rank has", "placement")]
    for spec in view.components:
        place = _place_of(spec)
        rows.append((spec.name, str(spec.world_size), _rank_sizes(spec), place))
    lines = _wrapped(rows)
    for fold in view.folds[:_MOST_FOLDS]:
        if 0 < fold.accelerators <= _WIDEST_MAP:
            lines += ["", *_map(fold)]
    if len(view.folds) > _MOST_FOLDS:
        lines += ["", f"... and {len(view.folds) - _MOST_FOLDS} more kinds of node"]
    return chapter("where each component is", lines)


def _place_of(spec: ComponentSpec) -> str:
    """Return the placement of a component as text, with the accelerators that others lend."""
    place = spec.render()
    if spec.lent_ranks:
        lenders = " and ".join(spec.lenders)
        place += f", and {spec.lent_accelerators} lent by {lenders}"
    return place


def _rank_sizes(spec: ComponentSpec) -> str:
    """Return how many accelerators each rank has, as text: `2 accelerators`, `1/4 of an accelerator`."""
    words = set()
    for segment in spec.segments:
        if segment.ranks_per_accelerator > 1:
            words.add(f"1/{segment.ranks_per_accelerator} of an accelerator")
        else:
            words.add(counted(segment.accelerators_per_rank, "accelerator"))
    return " or ".join(sorted(words)) or "no accelerator"


def _map(fold: NodeFold) -> list[str]:
    """Return the lines of a map of a node: a column for each accelerator, a row for each component.

    A cell has the numbers of the component's ranks on the accelerator. `fold`: the node, or several equal nodes.
    """
    # The numbers are global for a single node, those of the first node for several.
    single = len(fold.nodes) == 1
    heading = f"{fold.label}: each number is a rank"
    offset = 0
    if single:
        offset = fold.first
    else:
        heading += ", counted from the first of the node"

    rows = [[str(offset + i) for i in range(fold.accelerators)]]
    for component in fold.local:
        base = 0
        if single:
            base = fold.first_rank[component]
        rows.append(_cells(fold, component, base))

    # Numbers are set to the right, as wide as the widest of all.
    width = 1 + max(len(cell) for row in rows for cell in row)
    names = ["accelerator", *fold.local]
    left = max(map(len, names))
    lines = [heading]
    for name, row in zip(names, rows, strict=True):
        cells = "".join(cell.rjust(width) for cell in row)
        lines.append(f"{name:<{left}} {cells}")
    return lines


def _cells(fold: NodeFold, component: str, base: int) -> list[str]:
    """Return, for each accelerator of a node, the numbers of a component's ranks on it as text; "." for no ranks.

    `base`: a number that is added to each rank, because ranks in `fold` are counted from 0 on each node.
    """
    cells = ["."] * fold.accelerators
    for segment in fold.local[component]:
        shared = segment.ranks_per_accelerator
        for accelerator in segment.accelerators:
            before = accelerator - segment.accelerators.start
            groups = before // segment.accelerators_per_rank
            first = base + segment.ranks.start + groups * shared
            cells[accelerator] = show_range(range(first, first + shared))
    return cells


def _pairs(placement: HybridComponentPlacement) -> Iterator[str]:
    """Yield the chapter about pairs: which accelerators each pair of components shares.

    Nothing is yielded if there is only one component.
    """
    rows: Rows = []
    for a, b in itertools.combinations(placement.components, 2):
        shared = placement.shared(a, b)
        share = "share nothing"
        if shared:
            share = clipped(f"share {shared}", _LONGEST_CELL)
        rows.append((f"{a} + {b}", placement.relation(a, b), share))
    if rows:
        yield chapter("pairs", table(rows))


def _stages(view: PlanView) -> str:
    """Return the chapter about stages: the residency of each component in each stage, and the moves on entry."""
    rows: Rows = [("stage", *view.plan.placement.residents.components, _MOVES)]
    for stage in view.stages:
        words = [stage.word(component) for component in stage.held]
        moves = "nothing moves"
        if stage.releases or stage.acquires:
            moves = f"{_moves(stage.releases)} | {_moves(stage.acquires)}"
        rows.append((stage.name, *words, moves))

    # Where there are too many components, the moves have a table of their own.
    grid = table([row[:-1] for row in rows])
    if max(map(len, grid)) + 4 + len(_MOVES) > WIDTH:
        moves_only = [(row[0], row[-1]) for row in rows[1:]]
        lines = [*grid, _MOVES, *_wrapped(moves_only, gap=4)]
    else:
        lines = _wrapped(rows, gap=4)

    notes = []
    if view.ahead:
        notes.append(
            f"rollout || learn: rollout continues in every stage, {view.ahead}"
        )
    if any(stage.waiting for stage in view.stages):
        notes.append(
            "(full): not needed in this stage, and no other component needs the room"
        )
    first = view.plan.schedule.first
    acquired = ", ".join(map(_move, first.acquires)) or "nothing"
    notes.append(
        f"at the start everything is off; the first {first.stage} acquires {acquired}"
    )
    lines += _paragraphs(notes)
    return chapter("stages: what each component holds on its accelerators", lines)


def _paragraphs(notes: Sequence[str]) -> list[str]:
    """Return the lines of the notes. Each note is wrapped at the edge of the page."""
    lines: list[str] = []
    for note in notes:
        lines += textwrap.wrap(note, WIDTH - _INDENT)
    return lines


def _moves(moves: Sequence[Move]) -> str:
    return ", ".join(map(_move, moves)) or "-"


def _move(move: Move) -> str:
    return f"{move.component} {move.before.word}->{move.after.word}"


def _transfers(view: PlanView) -> Iterator[str]:
    """Yield the chapter about routes: what each component sends to which other component, and by which transports."""
    if not view.transfers:
        return
    heading = "transport: pairs of ranks"
    rows: Rows = [("what", "from -> to", "ranks", "how much", heading)]
    for transfer in view.transfers:
        sources = view.plan.placement.world_size(transfer.source)
        targets = view.plan.placement.world_size(transfer.target)
        rows.append(
            (
                transfer.name,
                f"{transfer.source} -> {transfer.target}",
                f"{sources} -> {targets}",
                transfer.amount,
                transfer.by_transport,
            )
        )
    # Long names leave no room: the last two columns become one, which is wrapped.
    before_last = max(map(len, table([row[:-1] for row in rows])))
    if before_last + GAP + len(heading) > WIDTH - _INDENT:
        rows = [(*row[:-2], f"{row[-2]}; {row[-1]}") for row in rows]
    yield chapter("routes: which component sends to which", _wrapped(rows))


def _transports(view: PlanView) -> Iterator[str]:
    """Yield the chapter about the transports in use: when each is used, and what carries items and tensors."""
    if not view.transports:
        return
    rows: Rows = [("transport", "because", "items go by", "device tensors by")]
    for name, details in view.transports.items():
        because = clipped(details.because, _LONGEST_CELL)
        rows.append((name, because, details.items, details.tensors))
    lines = table(rows)
    if emulated(view.plan.topology):
        # No tensors on devices: a sentence in place of the last column.
        lines = [*table([row[:3] for row in rows]), EMULATED]
    title = (
        "transports: how far apart two ranks are, and what carries data between them"
    )
    yield chapter(title, lines)


def _channels(view: PlanView) -> Iterator[str]:
    if not view.channels:
        return
    rows: Rows = [("name", "capacity", "on", "because")]
    for channel, location in view.channels:
        capacity = f"{channel.capacity_items} items"
        rows.append((channel.name, capacity, location, channel.why))
    yield chapter("channels", _wrapped(rows))


def _counts(view: PlanView) -> Iterator[str]:
    if not view.counts:
        return
    rows = [(count.subject, count.count, count.why) for count in view.counts]
    yield chapter("counts: what each number follows from", _wrapped(rows))


def _memory(view: PlanView) -> str:
    """Return the chapter about memory: the ledger, or, if nothing is known of the memory, the reasons for that."""
    if view.ledger.empty:
        notes = _paragraphs(view.ledger.notes)
        return "\n\n".join(
            [chapter("memory: not known", notes), *render_hosts(view.ledger)]
        )
    return render_ledger(view.ledger)


def _warnings(view: PlanView) -> Iterator[str]:
    if view.plan.warnings:
        texts = [textwrap.indent(w.render(), "  ") for w in view.plan.warnings]
        yield "\n".join(["warnings", *texts])


def _wrapped(rows: Sequence[Sequence[str]], gap: int = GAP) -> list[str]:
    """Return the lines of a table whose last column is wrapped at the edge of the page.

    `gap`: spaces before the last column.
    """
    texts = table([row[:-1] for row in rows])
    left = max(map(len, texts)) + gap
    room = max(_LEAST_LAST, WIDTH - _INDENT - left)
    lines: list[str] = []
    for text, row in zip(texts, rows, strict=True):
        first, *more = textwrap.wrap(row[-1], room) or [""]
        lines.append(f"{text:<{left}}{first}")
        lines += [" " * left + line for line in more]
    return lines


def _savings(view: PlanView) -> Iterator[str]:
    """Yield the chapter about savings: accelerators at work in each stage, with and without sharing.

    Without sharing means that every component has accelerators of its own.
    """
    if view.comparison is None:
        return
    savings = view.comparison.savings
    here = view.comparison.here
    apart = view.comparison.apart
    if not savings.saved:
        sizes = f"{savings.sizes} = {savings.used}"
        yield f"savings: none, every component has accelerators of its own ({sizes})"
        return

    # The two placements side by side; a stage may exist in one of them only.
    rows: Rows = [
        ("", "here", "each component on its own"),
        ("accelerators", str(savings.used), str(savings.dedicated)),
    ]
    for stage in dict.fromkeys((*here, *apart)):
        left = show_work(here.get(stage), savings.used)
        right = show_work(apart.get(stage), savings.dedicated)
        rows.append((f"at work in {stage}", left, right))
    here_bytes = view.comparison.here_bytes
    apart_bytes = view.comparison.apart_bytes
    if here_bytes or apart_bytes:
        rows.append(("fullest holds", show_bytes(here_bytes), show_bytes(apart_bytes)))

    sum_of_sizes = f"{savings.dedicated} = {savings.sizes}"
    title = f"savings: {savings.text}, {savings.saved} fewer"
    yield chapter(title, [*table(rows), *_paragraphs([sum_of_sizes])])


def show_work(count: int | None, used: int) -> str:
    """Return how many of the accelerators in use are at work, with the percentage, as text: `4 (50%)`.

    `count`: accelerators at work; None gives "-", for a placement that does not have the stage. `used`: accelerators in
    use.
    """
    if count is None:
        return "-"
    return f"{count} ({count / used:.0%})"


def _traffic(view: PlanView) -> Iterator[str]:
    """Yield the chapter about the bytes that moves and syncs copy in each iteration.

    Nothing is yielded if no bytes are known.
    """
    traffic = view.traffic
    if not traffic.total_bytes:
        return
    rows: Rows = []
    for what, size, why, least in (
        ("to the hosts", traffic.to_host_bytes, "releases copy it away", "to_host"),
        (
            "from the hosts",
            traffic.from_host_bytes,
            "acquires copy it back",
            "from_host",
        ),
    ):
        rows.append((what, show_bytes(size), why + _least(view, least)))
    for transport, size in traffic.weights_bytes.items():
        why = f"one sync, {transport.value}"
        rows.append(("weights", show_bytes(size), why + _least(view, transport.value)))
    yield chapter("bytes in each iteration, samples not counted", table(rows))


def _least(view: PlanView, what: str) -> str:
    """Return, in words, the least seconds that a kind of copy takes; "" if no rate is declared.

    `what`: the kind of copy, a key of `Traffic.least_s` such as "to_host".
    """
    seconds = view.traffic.least_s.get(what)
    if seconds is None:
        return ""
    return f", at least {seconds:.2g} s"


# ── Two plans side by side ───────────────────────────────────────────────────────────

_NONE = "-"
_ZERO = show_bytes(0)  # a line with this on both sides is left out
_LONGEST_SIDE = 31  # characters of a cell


class Fact(NamedTuple):
    """One line of a comparison of two plans: what is compared, and its value in the left plan and in the right plan."""

    what: str
    left: str
    right: str

    @property
    def differs(self) -> bool:
        return self.left != self.right


def compare(left: PlanView, right: PlanView) -> dict[str, list[Fact]]:
    """Return chapter -> lines of a comparison of two plans. Chapters without lines are left out."""
    chapters: dict[str, list[Fact]] = {}
    right_facts = _facts(right)
    for title, here in _facts(left).items():
        there = right_facts[title]
        for what in dict.fromkeys((*here, *there)):
            if here.get(what, _ZERO) == there.get(what, _ZERO) == _ZERO:
                continue
            fact = Fact(what, here.get(what, _NONE), there.get(what, _NONE))
            chapters.setdefault(title, []).append(fact)
    return chapters


def render_diff(left: PlanView, right: PlanView) -> str:
    """Return a comparison of two plans as text of 100 columns, with `*` before each line in which the plans differ."""
    chapters = compare(left, right)
    facts = [fact for found in chapters.values() for fact in found]

    # One table for all chapters, so that their columns are alike.
    rows: Rows = [("", "", left.name, right.name)]
    for fact in facts:
        mark = "*" if fact.differs else ""
        rows.append((mark, *fact))
    cut = [[clipped(cell, _LONGEST_SIDE) for cell in row] for row in rows]
    heading, *lines = (f"  {line}" for line in table(cut))

    count = sum(fact.differs for fact in facts)
    title = "the same placement twice"
    if count:
        title = f"{counted(count, 'line')} differ, marked *"
    parts = [f"diff: {title}", heading]
    following = iter(lines)
    for name, found in chapters.items():
        parts += ["", f"  {name}", *itertools.islice(following, len(found))]
    return "\n".join(parts)


def diff_record(left: PlanView, right: PlanView) -> dict[str, Any]:
    """Return the comparison of two plans as plain values, ready for JSON."""
    chapters = []
    for title, facts in compare(left, right).items():
        lines = [fact._asdict() | {"differs": fact.differs} for fact in facts]
        chapters.append({"title": title, "lines": lines})
    return {
        "left": left.name,
        "right": right.name,
        "fits": [left.fits, right.fits],
        "chapters": chapters,
    }


def _facts(view: PlanView) -> dict[str, dict[str, str]]:
    """Return chapter -> what is compared -> its value in this plan, as text. Every plan has all chapters."""
    # By component: place, and residency in each stage.
    traffic = view.traffic
    placed = {}
    residency = {}
    for spec in view.components:
        ranks = counted(spec.world_size, "rank")
        placed[spec.name] = f"{_place_of(spec)} ({ranks})"
        for part in view.plan.schedule.parts_of(spec.name):
            # `weights, off, full`: in the order of the stages
            words = [stage.held[part].word for stage in view.stages]
            residency[part] = ", ".join(words)

    # Bytes of one iteration; a transport that is not used has 0 bytes.
    moves = {
        "moves": str(view.moves),
        "copied to hosts": show_bytes(traffic.to_host_bytes),
        "copied from hosts": show_bytes(traffic.from_host_bytes),
    }
    for transport in Transport:
        size = traffic.weights_bytes.get(transport, 0)
        moves[f"weights, {transport.value}"] = show_bytes(size)

    pairs = {}
    for transfer in view.transfers:
        what = f"{transfer.name} to {transfer.target}"
        pairs[what] = transfer.by_transport.replace(":", "")
    return {
        "machines": _machine_facts(view),
        "placement": placed,
        "residency": residency,
        "moves in each iteration": moves,
        "pairs of ranks by transport": pairs,
        "memory": _memory_facts(view),
    }


def _machine_facts(view: PlanView) -> dict[str, str]:
    """Return the rows of a comparison about machines: what is compared -> its value in this plan, as text.

    Compared are nodes, accelerators in use, and accelerators at work in each stage.
    """
    placement = view.plan.placement
    topology = view.plan.topology
    facts = {
        "accelerators in use": f"{len(placement.used)} of {topology.num_accelerators}",
        "nodes": str(topology.num_nodes),
        "mode": placement.mode,
    }
    if view.comparison is not None:
        savings = view.comparison.savings
        facts["fewer than each on its own"] = str(savings.saved)
        for stage, count in view.comparison.here.items():
            facts[f"at work in {stage}"] = show_work(count, savings.used)
    return facts


def _memory_facts(view: PlanView) -> dict[str, str]:
    """Return the rows of a comparison about memory: what is compared -> its value in this plan, as text.

    Compared are whether memory is sufficient, the fullest accelerator, and the shared memory.
    """
    fits = "not known"
    if not view.fits:
        fits = "NO"
    elif view.ledger.known:
        fits = "yes"
    facts = {"fits": fits}
    tightest = view.ledger.tightest
    if tightest is not None:
        worst = tightest.worst
        held = show_bytes(worst.total_bytes)
        facts["fullest accelerator holds"] = f"{held} in {worst.moment}"
        if tightest.margin_bytes is not None:
            facts["margin there"] = show_bytes(tightest.margin_bytes)
    shared = max((host.shared_bytes for host in view.ledger.hosts), default=0)
    facts["shared memory per node"] = show_bytes(shared)
    return facts
