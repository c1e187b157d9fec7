"""A plan as one HTML page that stands alone: verdict, picture, problems, memory, tables; no requests, no script."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from rlplace.errors import Problem
from rlplace.placement.memory.ledger import Account, Load
from rlplace.placement.memory.records import show_room
from rlplace.placement.show.svg import colour, render_svg
from rlplace.placement.show.view import ELLIPSIS, PlanView, show_move
from rlplace.units import clipped, counted, plural, show_bytes

_MOST_ACCOUNTS = 12
_BAR = 1000  # units of a bar's width
_CLIP = (40, ELLIPSIS)  # most characters of numbers, and the mark of those cut
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_WHOLE = 24  # most characters of a cell that is not broken into lines
_STYLE = Path(__file__).with_name(
    "page.css"
)  # colours follow the light or dark setting of the browser


def render_html(view: PlanView, seconds: Iterable[str] = ()) -> str:
    """Return the page. `seconds`: parts in HTML about the time of an iteration."""
    look, verdict = (
        ("fits", "fits") if view.ledger.known else ("unknown", "memory not known")
    )
    if not view.fits:
        look = "tight"
        verdict = "does not fit"
    return document(
        f"{view.name}: plan",
        [
            f'<h1>{escape(view.name)}<span class="verdict {look}">{verdict}</span></h1>',
            f"<p>{view.plan.placement.mode} placement on {escape(view.machines)}</p>",
            tiles(_tiles(view)),
            f'<div class="plan">{render_svg(view)}</div>',
            *seconds,
            *_problems("Does not fit", view.shortages, ""),
            *_problems("Warnings", view.plan.warnings, " warning"),
            *_memory(view),
            *_tables(view),
        ],
    )


def document(title: str, parts: Iterable[str]) -> str:
    """Return a whole page of parts in HTML."""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(title)}</title>\n<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>",
            "<body>\n<main>",
            *parts,
            "</main>\n</body>\n</html>\n",
        ]
    )


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Write boxes side by side, each with a large text and a small one."""
    cells = (
        f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>'
        for big, small in pairs
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _tiles(view: PlanView) -> Iterator[tuple[str, str]]:
    traffic = view.traffic
    tightest = view.ledger.tightest
    if view.comparison is not None:
        savings = view.comparison.savings
        without = f"each component on its own would use {savings.dedicated}"
        yield (
            f"{savings.used} accelerators",
            without if savings.saved else "no component shares any",
        )
    if tightest is not None and not view.ledger.empty:
        worst = tightest.worst
        numbers = clipped(str(tightest.numbers), *_CLIP)
        of = f" of {show_room(tightest)}" if tightest.capacity_bytes else ""
        where = f"on {plural(len(tightest.numbers), 'accelerator')} {numbers} in {worst.moment}"
        yield f"{show_bytes(worst.total_bytes)}{of}", f"at most, {where}"
    copied = traffic.to_host_bytes + traffic.from_host_bytes
    moved = f"{show_bytes(copied)} to and from hosts" if copied else "in each iteration"
    yield (
        counted(view.moves, "move"),
        moved if view.moves else "every component stays where it is",
    )
    if weights := sum(traffic.weights_bytes.values()):
        transports = " and ".join(
            transport.value.replace("_", " ") for transport in traffic.weights_bytes
        )
        yield show_bytes(weights), f"of weights in each sync, {transports}"


def _problems(title: str, problems: Sequence[Problem], look: str) -> Iterator[str]:
    if problems:
        yield f"<h2>{title}</h2>"
    for problem in problems:
        head, _, rest = escape(problem.render()).partition("\n")
        yield f'<div class="problem{look}"><b>{head}</b><pre>{textwrap.dedent(rest)}</pre></div>'


def _memory(view: PlanView) -> Iterator[str]:
    accounts = view.ledger.accelerators
    if view.ledger.empty:
        return
    yield "<h2>Memory of one accelerator</h2>"
    for account in accounts[:_MOST_ACCOUNTS]:
        capacity = account.capacity_bytes
        numbers = clipped(str(account.numbers), *_CLIP)
        has = f"{show_room(account)} each" if capacity else "memory not known"
        yield f"<h3>{plural(len(account.numbers), 'accelerator')} {escape(numbers)} ({account.kind}, {has})</h3>"
        rows = []
        for load in account.loads:
            free = (
                show_bytes(account.room_bytes - load.total_bytes) if capacity else "?"
            )
            mark = "!" if capacity and load.total_bytes > account.room_bytes else ""
            rows.append(
                (
                    str(load.moment),
                    _bar(view, account, load),
                    show_bytes(load.total_bytes),
                    mark + free,
                )
            )
        yield table(("", "", ">held", ">free"), rows)
    if len(accounts) > _MOST_ACCOUNTS:
        yield f"<p>and {len(accounts) - _MOST_ACCOUNTS} more kinds of accelerator</p>"
    yield from (f"<p>{escape(note)}</p>" for note in view.ledger.notes)


def _bar(view: PlanView, account: Account, load: Load) -> str:
    """Draw what each component holds, against what the accelerator has."""
    scale = _BAR / max(account.capacity_bytes, account.worst.total_bytes, 1)
    parts = [f'<rect class="track" width="{_BAR}" height="14"/>']
    x = 0.0
    for at, component in enumerate(view.plan.placement.components):
        holds = [hold for hold in load.holds if hold.component == component]
        if not holds:
            continue
        width = load.of(component) * scale
        lines = "\n".join(
            f"{hold.part.value} {show_bytes(hold.size_bytes)}" for hold in holds
        )
        title = escape(f"{component} {show_bytes(load.of(component))}\n{lines}")
        parts.append(
            f'<rect class="f{colour(at)}" x="{x:.1f}" width="{width:.1f}" height="14"><title>{title}</title></rect>'
        )
        x += width
    if account.capacity_bytes and account.worst.total_bytes > account.capacity_bytes:
        end = account.capacity_bytes * scale
        parts.append(f'<path class="end" d="M{end:.1f} 0v14"/>')
    return f'<svg class="bar" viewBox="0 0 {_BAR} 14" preserveAspectRatio="none">{"".join(parts)}</svg>'


def _tables(view: PlanView) -> Iterator[str]:
    placement = view.plan.placement
    rows = list[tuple[str, ...]]()
    for at, c in enumerate(view.components):
        shares = [
            f"{other} ({placement.relation(c.name, other)})"
            for other in placement.sharers(c.name)
        ]
        dot = f'<svg class="dot"><rect class="f{colour(at)}" width="12" height="12" rx="3"/></svg>{escape(c.name)}'
        rows.append((dot, c.render(), f"{c.world_size:,}", ", ".join(shares) or "none"))
    yield "<h2>Where each component is</h2>\n" + table(
        ("component", "placement", ">ranks", "shares with"), rows
    )
    rows = []
    for stage in view.stages:
        moved = [
            f"{arrow} " + ", ".join(map(show_move, moves))
            for arrow, moves in (("\u2193", stage.releases), ("\u2191", stage.acquires))
            if moves
        ]
        rows.append(
            (
                stage.name,
                *map(stage.word, stage.held),
                "; ".join(moved) or "nothing moves",
            )
        )
    note = "<p>In brackets: resident without being needed in this stage. Releases come first, then all wait.</p>"
    header: tuple[str, ...] = (
        "stage",
        *(c.name for c in view.components),
        "moves on entry",
    )
    yield f"<h2>Residency by stage</h2>\n{note}\n" + table(header, rows)
    if rows := [
        (t.name, f"{t.source} \u2192 {t.target}", t.amount, t.by_transport)
        for t in view.transfers
    ]:
        header = ("what", "from \u2192 to", "how much", "pairs of ranks by transport")
        yield "<h2>Routes</h2>\n" + table(header, rows)
    if rows := [
        (name, t.because, t.items, t.tensors) for name, t in view.transports.items()
    ]:
        yield table(("transport", "because", "items go by", "device tensors by"), rows)
    if rows := [
        (c.name, f"{c.capacity_items:,}", at, c.why) for c, at in view.channels
    ]:
        yield "<h2>Channels</h2>\n" + table(
            ("name", ">capacity", "on", "because"), rows
        )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table. `>` before a heading sets its column to the right, `!` before a cell marks it; SVG stays."""

    def cell(tag: str, text: str, heading: str) -> str:
        if text.startswith("<svg"):
            return f"<td>{text}</td>"
        looks = ["number"] * heading.startswith(">") + ["short"] * text.startswith("!")
        looks += ["whole"] * (len(text) <= _WHOLE and not looks)
        look = f' class="{" ".join(looks)}"' if looks else ""
        return (
            f"<{tag}{look}>{escape(text.removeprefix('>').removeprefix('!'))}</{tag}>"
        )

    head = "".join(cell("th", name, name) for name in header)
    body = "".join(
        "<tr>"
        + "".join(
            cell("td", text, name) for text, name in zip(row, header, strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
