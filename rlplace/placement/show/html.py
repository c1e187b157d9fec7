"""A plan as one HTML page that stands alone: verdict, picture, problems, memory, tables.

The page makes no requests. A plan has no script; a report brings those that draw its curves.
"""

from __future__ import annotations

import base64
import hashlib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from rlplace.errors import Problem
from rlplace.placement.memory.ledger import Account, Load
from rlplace.placement.memory.records import show_room
from rlplace.placement.show.drawing import colour, element, title
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.view import ELLIPSIS, PlanView, show_move
from rlplace.units import clipped, counted, plural, show_bytes

_MOST_ACCOUNTS = 12
_BAR = 1000  # units of a bar's width
_BAR_HEIGHT = 14
_CLIP = (40, ELLIPSIS)  # most characters of numbers, and the mark of those cut
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_WHOLE = 24  # most characters of a cell that is not broken into lines
# Colours follow the light or dark setting of the browser.
_STYLE = Path(__file__).with_name("page.css")
_BRACKETS = (
    "In brackets: resident without being needed in this stage. Releases come first,"
    " then all wait."
)


def render_html(view: PlanView, seconds: Iterable[str] = ()) -> str:
    """Return the plan as an HTML page. `seconds`: parts of the page, in HTML, about the time of an iteration."""
    if not view.fits:
        look, verdict = "tight", "does not fit"
    elif view.ledger.known:
        look, verdict = "fits", "fits"
    else:
        look, verdict = "unknown", "memory not known"
    heading = f'{escape(view.name)}<span class="verdict {look}">{verdict}</span>'
    mode = view.plan.placement.mode
    return document(
        f"{view.name}: plan",
        [
            f"<h1>{heading}</h1>",
            f"<p>{mode} placement on {escape(view.machines)}</p>",
            tiles(_tiles(view)),
            f'<div class="plan">{render_svg(view)}</div>',
            *seconds,
            *_problems("Does not fit", view.shortages, ""),
            *_problems("Warnings", view.plan.warnings, " warning"),
            *_memory(view),
            *_tables(view),
        ],
    )


def document(heading: str, parts: Iterable[str], scripts: Sequence[str] = ()) -> str:
    """Return a whole HTML page.

    `heading`: its title. `parts`: its content, in HTML. `scripts`: run at the end of the page. The page allows no other
    scripts: their hashes are in its policy.
    """
    style = _STYLE.read_text(encoding="utf-8")
    policy = _POLICY
    if scripts:
        hashes = ""
        for script in scripts:
            digest = hashlib.sha256(script.encode()).digest()
            hashes += f" 'sha256-{base64.b64encode(digest).decode()}'"
        policy += f"; script-src{hashes}"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{escape(heading)}</title>\n<style>\n{style}</style>\n</head>",
            "<body>\n<main>",
            *parts,
            "</main>",
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        ]
    )


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Return HTML for boxes that stand side by side. `pairs`: (large text, small text) of each box."""
    cells = ""
    for big, small in pairs:
        inside = f"<b>{escape(big)}</b><span>{escape(small)}</span>"
        cells += f'<div class="tile">{inside}</div>'
    return f'<div class="tiles">{cells}</div>'


def _tiles(view: PlanView) -> Iterator[tuple[str, str]]:
    """Yield (large text, small text) of each box at the top of the page.

    The boxes are about accelerators in use, the fullest accelerator, moves, and weights.
    """
    # Accelerators in use, compared with a dedicated placement.
    if view.comparison is not None:
        savings = view.comparison.savings
        instead = "no component shares any"
        if savings.saved:
            instead = f"each component on its own would use {savings.dedicated}"
        yield f"{savings.used} accelerators", instead

    # The fullest accelerator at its worst moment.
    tightest = view.ledger.tightest
    if tightest is not None and not view.ledger.empty:
        worst = tightest.worst
        held = show_bytes(worst.total_bytes)
        if tightest.capacity_bytes:
            held += f" of {show_room(tightest)}"
        where = _accelerators(tightest, clipped(str(tightest.numbers), *_CLIP))
        yield held, f"at most, on {where} in {worst.moment}"

    # Moves of one iteration, with the bytes they copy where these are known.
    traffic = view.traffic
    copied = traffic.to_host_bytes + traffic.from_host_bytes
    moved = "in each iteration"
    if not view.moves:
        moved = "every component stays where it is"
    elif copied:
        moved = f"{show_bytes(copied)} to and from hosts"
    yield counted(view.moves, "move"), moved

    # Bytes of one weight sync over all transports.
    weights = sum(traffic.weights_bytes.values())
    if weights:
        ways = [way.value.replace("_", " ") for way in traffic.weights_bytes]
        yield show_bytes(weights), f"of weights in each sync, {' and '.join(ways)}"


def _accelerators(account: Account, numbers: str) -> str:
    return f"{plural(len(account.numbers), 'accelerator')} {numbers}"


def _problems(heading: str, problems: Sequence[Problem], look: str) -> Iterator[str]:
    if problems:
        yield f"<h2>{heading}</h2>"
    for problem in problems:
        head, _, rest = escape(problem.render()).partition("\n")
        body = f"<b>{head}</b><pre>{textwrap.dedent(rest)}</pre>"
        yield f'<div class="problem{look}">{body}</div>'


def _memory(view: PlanView) -> Iterator[str]:
    """Yield parts of the page in HTML: a table of moments for each kind of accelerator, then notes of the ledger."""
    accounts = view.ledger.accelerators
    if view.ledger.empty:
        return
    yield "<h2>Memory of one accelerator</h2>"
    for account in accounts[:_MOST_ACCOUNTS]:
        has = "memory not known"
        if account.capacity_bytes:
            has = f"{show_room(account)} each"
        numbers = escape(clipped(str(account.numbers), *_CLIP))
        where = _accelerators(account, numbers)
        yield f"<h3>{where} ({account.kind}, {has})</h3>"
        rows = [_moment(view, account, load) for load in account.loads]
        yield table(("", "", ">held", ">free"), rows)
    if len(accounts) > _MOST_ACCOUNTS:
        yield f"<p>and {len(accounts) - _MOST_ACCOUNTS} more kinds of accelerator</p>"
    for note in view.ledger.notes:
        yield f"<p>{escape(note)}</p>"


def _moment(view: PlanView, account: Account, load: Load) -> tuple[str, ...]:
    """Return the table cells of one moment, as texts: its name, a bar, bytes held and bytes free.

    The cell of free bytes begins with "!" if more bytes are held than fit.
    """
    free = "?"
    if account.capacity_bytes:
        free = show_bytes(account.room_bytes - load.total_bytes)
        if load.total_bytes > account.room_bytes:
            free = f"!{free}"
    held = show_bytes(load.total_bytes)
    return str(load.moment), _bar(view, account, load), held, free


def _bar(view: PlanView, account: Account, load: Load) -> str:
    """Return an SVG bar whose parts show the bytes of each component at one moment.

    If some moment of the account has more bytes than the capacity, a line marks the capacity.
    """
    most = max(account.capacity_bytes, account.worst.total_bytes, 1)
    # Units for a byte
    scale = _BAR / most
    track = element("rect", class_="track", width=_BAR, height=_BAR_HEIGHT)
    parts = [track]
    x = 0.0
    for at, component in enumerate(view.plan.placement.components):
        holds = [hold for hold in load.holds if hold.component == component]
        if not holds:
            continue
        # The pointer shows the parts of the component below its sum.
        lines = [f"{component} {show_bytes(load.of(component))}"]
        for hold in holds:
            lines.append(f"{hold.part.value} {show_bytes(hold.size_bytes)}")
        width = load.of(component) * scale
        box = element(
            "rect",
            title("\n".join(lines)),
            class_=f"f{colour(at)}",
            x=x,
            width=width,
            height=_BAR_HEIGHT,
        )
        parts.append(box)
        x += width

    # A line at the end of the accelerator where the bar goes beyond it.
    if account.capacity_bytes and account.worst.total_bytes > account.capacity_bytes:
        end = account.capacity_bytes * scale
        parts.append(element("path", class_="end", d=f"M{end:.1f} 0v{_BAR_HEIGHT}"))
    return element(
        "svg",
        *parts,
        class_="bar",
        viewBox=f"0 0 {_BAR} {_BAR_HEIGHT}",
        preserveAspectRatio="none",
    )


def _tables(view: PlanView) -> Iterator[str]:
    """Yield the tables of the plan, in HTML.

    The tables of routes, transports and channels are left out if they are empty.
    """
    header: tuple[str, ...] = ("component", "placement", ">ranks", "shares with")
    yield "<h2>Where each component is</h2>\n" + table(header, _places(view))

    header = ("stage", *view.plan.placement.residents.components, "moves on entry")
    residency = table(header, _residency(view))
    yield f"<h2>Residency by stage</h2>\n<p>{_BRACKETS}</p>\n{residency}"

    # Data between components, and how far apart their ranks are.
    rows: list[tuple[str, ...]] = []
    for transfer in view.transfers:
        ends = f"{transfer.source} \u2192 {transfer.target}"
        rows.append((transfer.name, ends, transfer.amount, transfer.by_transport))
    if rows:
        header = ("what", "from \u2192 to", "how much", "pairs of ranks by transport")
        yield "<h2>Routes</h2>\n" + table(header, rows)

    rows = []
    for name, details in view.transports.items():
        rows.append((name, details.because, details.items, details.tensors))
    if rows:
        header = ("transport", "because", "items go by", "device tensors by")
        yield table(header, rows)

    rows = []
    for channel, location in view.channels:
        capacity = f"{channel.capacity_items:,}"
        rows.append((channel.name, capacity, location, channel.why))
    if rows:
        header = ("name", ">capacity", "on", "because")
        yield "<h2>Channels</h2>\n" + table(header, rows)


def _places(view: PlanView) -> Iterator[tuple[str, ...]]:
    """Yield the table cells of one row for each component. A row shows the component's colour in the picture."""
    placement = view.plan.placement
    for at, spec in enumerate(view.components):
        shares = []
        for other in placement.sharers(spec.name):
            shares.append(f"{other} ({placement.relation(spec.name, other)})")
        sample = element("rect", class_=f"f{colour(at)}", width=12, height=12, rx=3)
        name = element("svg", sample, class_="dot") + escape(spec.name)
        partners = ", ".join(shares) or "none"
        place = spec.render()
        if spec.lent_ranks:
            place += (
                f", and {spec.lent_accelerators} lent by {' and '.join(spec.lenders)}"
            )
        yield name, place, f"{spec.world_size:,}", partners


def _residency(view: PlanView) -> Iterator[tuple[str, ...]]:
    """Yield the table cells of one row for each stage: its name, the residency of each component, moves on entry."""
    for stage in view.stages:
        moved = []
        for arrow, moves in (("\u2193", stage.releases), ("\u2191", stage.acquires)):
            if moves:
                moved.append(f"{arrow} {', '.join(map(show_move, moves))}")
        words = [stage.word(component) for component in stage.held]
        yield stage.name, *words, "; ".join(moved) or "nothing moves"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table. Cells are texts, which are escaped here; a cell that begins with "<svg" stays as it is.

    `header`: headings; a heading that begins with `>` aligns its column to the right. `rows`: cells; a cell that begins
    with `!` is marked.
    """
    head = "".join(_cell("th", name, name) for name in header)
    body = ""
    for row in rows:
        body += "<tr>"
        for text, name in zip(row, header, strict=True):
            body += _cell("td", text, name)
        body += "</tr>\n"
    inside = f"<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody>"
    return f'<div class="scroll"><table>{inside}</table></div>'


def _cell(tag: str, text: str, heading: str) -> str:
    """Return one cell of a table in HTML. `tag`: "th" or "td". `heading`: the heading of its column."""
    if text.startswith("<svg"):
        return f"<td>{text}</td>"
    looks = []
    if heading.startswith(">"):
        looks.append("number")
    if text.startswith("!"):
        looks.append("short")
    if not looks and len(text) <= _WHOLE:
        looks.append("whole")
    start = tag
    if looks:
        start += f' class="{" ".join(looks)}"'
    shown = escape(text.removeprefix(">").removeprefix("!"))
    return f"<{start}>{shown}</{tag}>"
