"""The ledger as text and as plain values; measured bytes of an earlier run as JSON::

    {"rlplace_memory": 1, "components": {"actor": {"off": 0, "weights": 83968, "full": 251980}}}

Each number is the bytes of the fullest rank on each of its accelerators. These numbers replace the formulas.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.codes import config_error, problem
from rlplace.config.yaml_text import show
from rlplace.errors import ConfigError, Problem
from rlplace.placement.memory.ledger import (
    Account,
    Load,
    Measurements,
    MemoryLedger,
    RankedMeasurements,
)
from rlplace.placement.schedule import Residency
from rlplace.tables import chapter, indented, table
from rlplace.units import byte_unit, clipped, plural, show_bytes

WIDTH = 100
_VERSION_KEY = "rlplace_memory"
_VERSION = 1
_WORDS = {residency.word: residency for residency in Residency}
_MOST_ACCOUNTS = 8
_MOST_HOLDS = 6
_ACCURACY = (
    "weights, gradients, optimizer state and KV cache are exact; activations are what an unfused model saves, an upper "
    "bound for fused ones; CUDA context, communicator buffers, captured graphs and what torch reserves beside its "
    "tensors are assumed. memory.reserve is for further memory."
)


def render_ledger(ledger: MemoryLedger) -> str:
    """Return the ledger as text: a verdict, a table for each kind of accelerator and host, and a note on accuracy.

    The text has 100 columns of plain ASCII.
    """
    sections = [
        verdict(ledger),
        *map(_accelerators, ledger.accelerators[:_MOST_ACCOUNTS]),
    ]
    if len(ledger.accelerators) > _MOST_ACCOUNTS:
        sections.append(
            f"  ... and {len(ledger.accelerators) - _MOST_ACCOUNTS} more kinds of accelerator"
        )
    sections += render_hosts(ledger)
    sections.append(_trust(ledger))
    return "\n\n".join(sections)


def render_hosts(ledger: MemoryLedger) -> list[str]:
    """Return the text about host memory as a list with one entry; [] if hosts hold no memory."""
    if any(account.worst.total_bytes for account in ledger.hosts):
        return [_hosts(ledger.hosts)]
    return []


def verdict(ledger: MemoryLedger) -> str:
    """Return text that says whether the job fits, and how full the tightest accelerators are at their worst moment."""
    tightest = ledger.tightest
    if tightest is None:
        return "memory: no accelerator is used"
    worst = tightest.worst
    numbers = tightest.numbers
    used = show_bytes(worst.total_bytes)
    where = f"{plural(len(numbers), 'accelerator')} {clipped(str(numbers), 30)} in {worst.moment}: {used}"
    if not tightest.capacity_bytes:
        return f"memory: fullest {where}; how much there is, is not known"
    lacking = "".join(f"\n  {component}: {why}" for component, why in ledger.lacking)
    word = "fits" if ledger.fits else "does not fit"
    if ledger.fits and ledger.uncounted:
        word = f"not known of {', '.join(ledger.uncounted)}, the others fit"
    # Bytes that were measured with other ranks prove with a caveat.
    caveats = "".join(f"\n  {c}: {why}" for c, why in ledger.caveats.items())
    return (
        f"memory: {word}; tightest {where} of {show_room(tightest)}{lacking}{caveats}"
    )


def show_room(account: Account) -> str:
    """Return, as text, the memory that components may use: `80 GiB`, or `76 GiB (80 GiB less 4 GiB reserve)`."""
    all_of_it = show_bytes(account.capacity_bytes)
    kept = show_bytes(account.reserve_bytes)
    if account.reserve_bytes:
        return f"{show_bytes(account.room_bytes)} ({all_of_it} less {kept} reserve)"
    return all_of_it


def _accelerators(account: Account) -> str:
    # Title: which accelerators, and the memory of each.
    many = len(account.numbers)
    has = "memory not known"
    if account.capacity_bytes:
        has = show_bytes(account.capacity_bytes)
        if many > 1:
            has += " each"
    numbers = clipped(str(account.numbers), 60)
    title = f"{plural(many, 'accelerator')} {numbers} ({account.kind}, {has})"
    # Table of the moments, below the reserve.
    lines = []
    if account.reserve_bytes:
        reserve = show_bytes(account.reserve_bytes)
        lines.append(f"reserve: {reserve} of each stays free (memory.reserve)")
    lines += _table(account)
    # The largest holders at the fullest moment.
    worst = account.worst
    text = f"{worst.moment} holds {_largest(worst) or 'nothing'}"
    smaller = len(worst.holds) - _MOST_HOLDS
    if smaller > 0:
        text += f", and {smaller} smaller"
    lines += [f"  {line}" for line in textwrap.wrap(text, WIDTH - 4)]
    return chapter(title, lines)


def _largest(load: Load) -> str:
    return ", ".join(
        f"{h.component} {h.part.value} {show_bytes(h.size_bytes)}"
        for h in load.holds[:_MOST_HOLDS]
    )


def _table(account: Account) -> list[str]:
    """Return the lines of a table with a row for each moment and a column for each component; the worst row is marked.

    Entries that hold the same bytes as a stage next to them have no row.
    """
    shown = _without_repeats(account.loads)
    components = list(
        dict.fromkeys(hold.component for load in account.loads for hold in load.holds)
    )
    scale, unit = byte_unit(account.worst.total_bytes)
    heading = (unit, *components, "sum", "free")
    rows: list[Sequence[str]] = [heading]
    for load in shown:
        free = (
            _number(account.room_bytes - load.total_bytes, scale)
            if account.capacity_bytes
            else "?"
        )
        cells = (_number(load.of(c), scale) if load.of(c) else "." for c in components)
        rows.append((str(load.moment), *cells, _number(load.total_bytes, scale), free))
    # All columns but the names of the moments are numbers.
    lines = indented(table(rows, right=range(1, len(heading))))
    # Row 0 is the heading
    worst = shown.index(account.worst) + 1
    lines[worst] = f"> {lines[worst].removeprefix('  ')}"
    return lines


def _without_repeats(loads: Sequence[Load]) -> list[Load]:
    """Return the loads, but leave out the entry to a stage if it holds the same as that stage or the stage before.

    The very first entry is always kept.
    """
    entries = [load for load in loads if load.moment.entering and not load.moment.start]
    stages = {
        load.moment.stage: load.holds for load in loads if not load.moment.entering
    }
    pairs = zip(entries, (entries[-1], *entries), strict=False)
    quiet = {
        entry.moment
        for entry, before in pairs
        if entry.holds in (before.holds, stages[entry.moment.stage])
    }
    return [load for load in loads if load.moment not in quiet]


def _number(size: int, scale: int) -> str:
    if scale == 1:
        return str(size)
    if 0 < size < 0.05 * scale:
        return "<0.1"
    return f"{size / scale:.1f}"


def _hosts(hosts: Sequence[Account]) -> str:
    lines = ["host memory at the worst stage"]
    for account in hosts[:_MOST_ACCOUNTS]:
        worst = account.worst
        where = f"{plural(len(account.numbers), 'node')} {clipped(str(account.numbers), 40)}"
        of = (
            f" of {show_bytes(account.capacity_bytes)}"
            if account.capacity_bytes
            else ""
        )
        text = f"{where}: {show_bytes(worst.total_bytes)}{of}"
        text += f" in {worst.moment}: {_largest(worst)}" if worst.holds else ""
        lines += textwrap.wrap(
            text, WIDTH - 2, initial_indent="  ", subsequent_indent="    "
        )
        if account.shared_bytes:
            lines.append(
                f"    shared memory per node: {show_bytes(account.shared_bytes)}"
            )
    if len(hosts) > _MOST_ACCOUNTS:
        lines.append(f"  ... and {len(hosts) - _MOST_ACCOUNTS} more kinds of node")
    return "\n".join(lines)


def _trust(ledger: MemoryLedger) -> str:
    notes = (
        [f"measured: {', '.join(ledger.measured)}; an earlier run's numbers win"]
        if ledger.measured
        else []
    )
    notes += [*(f"note: {note}" for note in ledger.notes), "accuracy: " + _ACCURACY]
    return "\n".join(
        line
        for note in notes
        for line in textwrap.wrap(note, WIDTH, subsequent_indent="  ")
    )


def ledger_record(ledger: MemoryLedger) -> dict[str, Any]:
    """Return the ledger as a dict for JSON, with sizes in bytes. Equal ledgers give equal dicts in equal order."""
    return {
        "fits": ledger.fits,
        "known": ledger.known,
        "accelerators": [
            _account(account, "accelerators") for account in ledger.accelerators
        ],
        "hosts": [
            _account(a, "nodes") | {"shared_bytes": a.shared_bytes}
            for a in ledger.hosts
        ],
        "measured": list(ledger.measured),
        "uncounted": list(ledger.uncounted),
        "lacking": [
            {"component": component, "why": why} for component, why in ledger.lacking
        ],
        "caveats": dict(ledger.caveats),
        "notes": list(ledger.notes),
    }


def _account(account: Account, numbers: str) -> dict[str, Any]:
    return {
        numbers: str(account.numbers),
        "kind": account.kind,
        "capacity_bytes": account.capacity_bytes or None,
        "reserve_bytes": account.reserve_bytes,
        "margin_bytes": account.margin_bytes,
        "worst": str(account.worst.moment),
        "moments": [_load(load) for load in account.loads],
    }


def _load(load: Load) -> dict[str, Any]:
    return {
        "moment": str(load.moment),
        "total_bytes": load.total_bytes,
        "holds": [
            {"component": h.component, "part": h.part.value, "size_bytes": h.size_bytes}
            for h in load.holds
        ],
    }


def record_measurements(
    measured: Measurements, ranks: Mapping[str, int]
) -> dict[str, object]:
    """Return measurements as plain values for a JSON file. `read_measurements` reads them back.

    `ranks`: component -> the number of ranks with which it was measured.
    """
    components = {
        c: {r.word: size for r, size in sorted(found.items())}
        for c, found in measured.items()
    }
    return {_VERSION_KEY: _VERSION, "components": components, "ranks": dict(ranks)}


def read_measurements(record: object, *, key: str = "measured") -> Measurements:
    """Return the measurements from the plain values of a JSON file.

    `key`: where the record comes from, for errors. Raises ConfigError with all problems at once.
    """
    if not isinstance(record, Mapping) or record.get(_VERSION_KEY) != _VERSION:
        raise config_error(
            "not-measurements",
            key,
            clipped(show(record), 60),
            version_key=_VERSION_KEY,
            version=_VERSION,
        )
    problems: list[Problem] = []
    found: dict[str, dict[Residency, int]] = {}
    for component, sizes in _block(record.get("components")).items():
        row = found.setdefault(str(component), {})
        for word, size in _block(sizes).items():
            if (
                word in _WORDS
                and isinstance(size, int)
                and not isinstance(size, bool)
                and size >= 0
            ):
                row[_WORDS[str(word)]] = size
            else:
                place = f"{key}.components.{component}"
                problems.append(_not_measured(place, word, size))
    # Files of earlier versions have no ranks.
    ranks: dict[str, int] = {}
    for component, count in _block(record.get("ranks", {})).items():
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            ranks[str(component)] = count
    if problems:
        raise ConfigError(problems)
    return RankedMeasurements(found, ranks)


def _not_measured(key: str, word: object, size: object) -> Problem:
    """Return the problem of an entry in measurements whose residency is unknown or whose size is not valid.

    `key`: key path of its component. `word`: the residency. `size`: the size as it was read.
    """
    if word in _WORDS:
        return problem("bad-size", f"{key}.{word}", show(size), word=word)
    return problem(
        "unknown-residency",
        key,
        f"{word}: {show(size)}",
        word=word,
        words=", ".join(_WORDS),
    )


def _block(value: object) -> Mapping[object, object]:
    """Return `value` if it is a mapping. Otherwise, return {"": value}, which the caller reports as a problem."""
    if isinstance(value, Mapping):
        return value
    return {"": value}
