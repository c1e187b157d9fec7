"""The report as one HTML page that stands alone: verdict, picture, problems, memory, tables; no requests, no script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from rlplace.errors import Problem
from rlplace.placement.memory.ledger import Account, Load
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency, Transition
from rlplace.placement.show.page_style import CSS
from rlplace.placement.show.picture import render_svg
from rlplace.placement.show.picture_style import colour
from rlplace.placement.show.render import lives_in, machine
from rlplace.placement.show.report import PlanReport
from rlplace.placement.transfers import transfers, transports_of
from rlplace.units import show_bytes

_MOST_ACCOUNTS = 12
_BAR = 1000  # units of a bar's width
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_page(report: PlanReport) -> str:
    """A whole HTML document."""
    sections = [
        _heading(report),
        _tiles(report),
        f'<div class="plan">{render_svg(report.plan, report.ledger)}</div>',
        *_problems("Does not fit", report.shortages, ""),
        *_problems("Warnings", report.plan.warnings, " warning"),
        *_memory(report),
        _where(report),
        _stages(report),
        *_routes(report),
        *_ways(report),
        *_channels(report),
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(report.name)}: plan</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>",
            *sections,
            "</main>\n</body>\n</html>\n",
        ]
    )


def _heading(report: PlanReport) -> str:
    plan = report.plan
    known = report.memory_known and any(account.capacity_bytes for account in report.ledger.accelerators)
    look, verdict = ("fits", "fits") if known else ("unknown", "memory not known")
    if not report.fits:
        look, verdict = "tight", "does not fit"
    machines = f"{plan.topology.describe()}, {machine(plan.topology)}"
    return (
        f'<h1>{escape(report.name)}<span class="verdict {look}">{verdict}</span></h1>\n'
        f"<p>{plan.placement.mode} placement on {escape(machines)}</p>"
    )


def _tiles(report: PlanReport) -> str:
    tiles: list[tuple[str, str]] = []
    if report.comparison is not None:
        savings = report.comparison.savings
        without = f"each component on its own would use {savings.dedicated}"
        tiles.append((f"{savings.used} accelerators", without if savings.saved else "no component shares any"))
    tightest = report.ledger.tightest
    if tightest is not None and report.memory_known:
        worst, numbers = tightest.worst, _clipped(str(tightest.numbers))
        of = f" of {show_bytes(tightest.capacity_bytes)}" if tightest.capacity_bytes else ""
        where = f"on accelerator{'s' * (len(tightest.numbers) > 1)} {numbers} in {worst.moment}"
        tiles.append((f"{show_bytes(worst.total_bytes)}{of}", f"at most, {where}"))
    moves = sum(len(e.releases) + len(e.acquires) for e in report.plan.schedule.entries.values())
    copied = report.traffic.to_host_bytes + report.traffic.from_host_bytes
    told = f"{show_bytes(copied)} to and from hosts" if copied else "in each iteration"
    tiles.append((f"{moves} move{'s' * (moves != 1)}", told if moves else "everybody stays where it is"))
    if weights := sum(report.traffic.weights_bytes.values()):
        transports = " and ".join(transport.value.replace("_", " ") for transport in report.traffic.weights_bytes)
        tiles.append((show_bytes(weights), f"of weights in each sync, {transports}"))
    cells = (f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _problems(title: str, problems: Sequence[Problem], look: str) -> Iterator[str]:
    if not problems:
        return
    yield f"<h2>{title}</h2>"
    for p in problems:
        lines = [(label, text) for label, text in (("got", p.got), ("why", p.why), ("fix", p.fix)) if text]
        told = "\n".join(f"{label}: " + text.replace("\n", "\n     ") for label, text in lines)
        head = f"<b>{escape(p.key)}: {escape(p.what)}<code>{p.code}</code></b>"
        yield f'<div class="problem{look}">{head}<pre>{escape(told)}</pre></div>'


def _memory(report: PlanReport) -> Iterator[str]:
    accounts = report.ledger.accelerators
    if not report.memory_known:
        return
    yield "<h2>Memory of one accelerator</h2>"
    for account in accounts[:_MOST_ACCOUNTS]:
        has = f"{show_bytes(account.capacity_bytes)} each" if account.capacity_bytes else "memory not known"
        many = "s" * (len(account.numbers) > 1)
        yield f"<h3>accelerator{many} {escape(_clipped(str(account.numbers)))} ({account.kind}, {has})</h3>"
        yield _table(("", "", ">held", ">free"), [_load(report, account, load) for load in account.loads])
    if len(accounts) > _MOST_ACCOUNTS:
        yield f"<p>and {len(accounts) - _MOST_ACCOUNTS} more kinds of accelerator</p>"
    yield from (f"<p>{escape(note)}</p>" for note in report.ledger.notes)


def _load(report: PlanReport, account: Account, load: Load) -> tuple[str, ...]:
    free = show_bytes(account.capacity_bytes - load.total_bytes) if account.capacity_bytes else "?"
    mark = "!" if account.capacity_bytes and load.total_bytes > account.capacity_bytes else ""
    return str(load.moment), _bar(report, account, load), show_bytes(load.total_bytes), mark + free


def _bar(report: PlanReport, account: Account, load: Load) -> str:
    """What each component holds, against what the accelerator has."""
    scale = _BAR / max(account.capacity_bytes, account.worst.total_bytes, 1)
    parts = [f'<rect class="track" width="{_BAR}" height="14"/>']
    x = 0.0
    for at, component in enumerate(report.plan.placement.components):
        holds = [hold for hold in load.holds if hold.component == component]
        if not holds:
            continue
        width = load.of(component) * scale
        lines = "\n".join(f"{hold.part.value} {show_bytes(hold.size_bytes)}" for hold in holds)
        told = escape(f"{component} {show_bytes(load.of(component))}\n{lines}")
        parts.append(
            f'<rect class="f{colour(at)}" x="{x:.1f}" width="{width:.1f}" height="14"><title>{told}</title></rect>'
        )
        x += width
    if account.capacity_bytes and account.worst.total_bytes > account.capacity_bytes:
        end = account.capacity_bytes * scale
        parts.append(f'<path class="end" d="M{end:.1f} 0v14"/>')
    return f'<svg class="bar" viewBox="0 0 {_BAR} 14" preserveAspectRatio="none">{"".join(parts)}</svg>'


def _where(report: PlanReport) -> str:
    placement = report.plan.placement
    rows = []
    for at, component in enumerate(placement.components):
        others = [c for c in placement.components if c != component and placement.shared(c, component)]
        shares = ", ".join(f"{c} ({placement.relation(component, c)})" for c in others) or "nobody"
        name = f'<svg class="dot"><rect class="f{colour(at)}" width="12" height="12" rx="3"/></svg>{escape(component)}'
        rows.append((name, placement.spec(component).render(), f"{placement.world_size(component):,}", shares))
    return "<h2>Who is where</h2>\n" + _table(("component", "placement", ">ranks", "shares with"), rows)


def _stages(report: PlanReport) -> str:
    schedule, needs = report.plan.schedule, report.plan.schedule.needs
    components = report.plan.placement.components
    rows = []
    for stage in schedule.stages:
        held = [
            f"({level.word})" if level > Residency.OFF and needs.of(stage, c) is Residency.OFF else level.word
            for c, level in schedule.residency[stage].items()
        ]
        rows.append((stage, *held, _moved(schedule.entries[stage])))
    note = "<p>In brackets: not needed in this stage, and in nobody's way. Releases come first, then all wait.</p>"
    return f"<h2>Who is resident when</h2>\n{note}\n" + _table(("stage", *components, "moves on entry"), rows)


def _moved(entry: Transition) -> str:
    sides = []
    for arrow, moves in (("\u2193", entry.releases), ("\u2191", entry.acquires)):
        if moves:
            sides.append(arrow + " " + ", ".join(f"{m.component} {m.before.word} \u2192 {m.after.word}" for m in moves))
    return "; ".join(sides) or "nothing moves"


def _routes(report: PlanReport) -> Iterator[str]:
    rows = [
        (
            j.name,
            f"{j.source} \u2192 {j.target}",
            j.amount,
            j.by_transport,
        )
        for j in transfers(report.plan)
    ]
    if rows:
        yield "<h2>Who sends to whom</h2>\n" + _table(
            ("what", "from \u2192 to", "how much", "pairs of ranks by transport"), rows
        )


def _ways(report: PlanReport) -> Iterator[str]:
    rows = [(transport.value, c.because, c.items, c.tensors) for transport, c in transports_of(report.plan).items()]
    if rows:
        yield _table(("transport", "because", "items go by", "device tensors by"), rows)


def _channels(report: PlanReport) -> Iterator[str]:
    if isinstance(report.plan, Plan):
        rows = [(c.name, f"{c.capacity_items:,}", lives_in(c), c.why) for c in report.plan.channels]
        yield "<h2>Channels</h2>\n" + _table(("name", ">capacity", "lives in", "because"), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`>` before a heading sets its column to the right, `!` before a cell marks it; SVG cells stay as they are."""
    right = [name.startswith(">") for name in header]
    head = "".join(
        f"<th{_NUMBER * r}>{escape(name.removeprefix('>'))}</th>" for name, r in zip(header, right, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(cell, r) for cell, r in zip(row, right, strict=True)) + "</tr>\n" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


_NUMBER = ' class="number"'


def _cell(text: str, right: bool) -> str:
    if text.startswith("<svg"):
        return f"<td>{text}</td>"
    look = " ".join(["number"] * right + ["short"] * text.startswith("!"))
    return f'<td class="{look}">{escape(text.removeprefix("!"))}</td>' if look else f"<td>{escape(text)}</td>"


def _clipped(text: str, longest: int = 40) -> str:
    return text if len(text) <= longest else text[: longest - 2] + " \u2026"
