"""The rows of the picture: nodes folded, alike accelerators in one band, each with its place on the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.memory.ledger import Load, MemoryLedger
from rlplace.placement.schedule import Residency
from rlplace.placement.show.fold import NodeFold, fold_nodes
from rlplace.placement.transfers import AnyPlan

LEAST_ROW = 26  # pixels of a band, so that its text fits
_GRID_HEIGHT = 288  # shared by all accelerators drawn
_BETWEEN_NODES = 16
_MOST_FOLDS = 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One band of one fold, placed on the page."""

    fold: NodeFold
    accelerators: range  # numbered within the node
    components: tuple[str, ...]
    y: float
    height: float

    @property
    def label(self) -> str:
        """Their numbers over the cluster, within the node where several nodes are alike."""
        base = self.fold.first if len(self.fold.nodes) == 1 else 0
        first, last = base + self.accelerators.start, base + self.accelerators.stop - 1
        return str(first) if first == last else f"{first}\u2013{last}"

    @property
    def numbers(self) -> range:
        """Those of the first of the nodes, over the cluster."""
        return range(self.fold.first + self.accelerators.start, self.fold.first + self.accelerators.stop)


def lay_rows(plan: AnyPlan, top: float) -> tuple[list[Row], int]:
    """The rows from `top` down, and how many kinds of node are left out because a page ends somewhere."""
    folds = [f for f in fold_nodes(plan.placement) if f.accelerators]
    shown = folds[:_MOST_FOLDS]
    unit = _GRID_HEIGHT / max(8, sum(f.accelerators for f in shown))
    rows: list[Row] = []
    y = top
    for fold in shown:
        for band in fold.bands():
            height = max(LEAST_ROW, unit * len(band.accelerators))
            rows.append(Row(fold=fold, accelerators=band.accelerators, components=band.components, y=y, height=height))
            y += height
        y += _BETWEEN_NODES
    return rows, len(folds) - len(shown)


def holding(plan: AnyPlan, stage: str, row: Row) -> list[str]:
    return [c for c in row.components if plan.schedule.residency[stage][c] > Residency.OFF]


def runs(plan: AnyPlan, stage: str, rows: Sequence[Row], ledger: MemoryLedger | None) -> Iterator[list[Row]]:
    """Neighbouring rows of a node that hold the same in this stage, to be drawn as one block."""
    run: list[Row] = []
    for row in rows:
        if run and (
            row.fold is not run[-1].fold or _look(plan, stage, row, ledger) != _look(plan, stage, run[-1], ledger)
        ):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def load_of(ledger: MemoryLedger | None, stage: str, row: Row) -> tuple[Load, int] | None:
    """What the fullest accelerator of the row holds in a stage, and its capacity; None where nothing is known."""
    if ledger is None:
        return None
    window = Ranges.of([row.numbers])
    found = [
        (load, account.capacity_bytes)
        for account in ledger.accelerators
        if account.numbers & window
        for load in account.loads
        if load.moment.stage == stage and not load.moment.entering
    ]
    return max(found, key=lambda pair: pair[0].total_bytes, default=None)


def _look(plan: AnyPlan, stage: str, row: Row, ledger: MemoryLedger | None) -> tuple[object, ...]:
    held = holding(plan, stage, row)
    found = load_of(ledger, stage, row)
    return (held, None if found is None else [found[0].of(c) for c in held])
