"""Answers about a plan: why a component is where it is and when, and who is on an accelerator in each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlplace.placement.language.hybrid import DISAGGREGATED
from rlplace.placement.language.slots import Slot
from rlplace.placement.memory.ledger import Account, Load
from rlplace.placement.schedule import Residency
from rlplace.placement.show.columns import clipped, indented, table
from rlplace.placement.show.report import PlanReport
from rlplace.placement.transfers import AnyPlan, transfers
from rlplace.units import show_bytes


def explain_component(report: PlanReport, component: str) -> str:
    """Where it is and why, what it holds when and why, whom it talks to, what it weighs."""
    plan, spec = report.plan, report.plan.placement.spec(component)
    ranks = spec.world_size
    written = f", written {clipped(spec.text, 60)!r}" if spec.text and spec.text != spec.render() else ""
    parts = [
        f"{component}: {ranks} rank{'s' * (ranks > 1)}, {spec.render()}{written}",
        _chapter("where", _where(plan, component)),
        *_counts(report, component),
        _chapter("when", table([("stage", "holds", "because"), *_when(report, component)])),
        _chapter("talks to", table(_talks(plan, component)) if list(_talks(plan, component)) else ["nobody"]),
        _chapter("memory of a rank on each of its accelerators", _weighs(report, component)),
    ]
    return "\n\n".join(parts)


def explain_accelerator(report: PlanReport, number: int) -> str:
    """Which ranks are on it, what each holds in each stage, and how full that makes it."""
    topology, placement = report.plan.topology, report.plan.placement
    node, local = topology.local(number)
    home = topology.nodes[node]
    size = f", {show_bytes(home.memory_bytes)}" if home.memory_bytes else ""
    title = f"accelerator {number}: number {local} of node {node} ({home.product or home.kind}{size})"
    residents = [(c, _ranks_on(placement.slots(c), number)) for c in placement.components]
    residents = [(c, ranks) for c, ranks in residents if ranks]
    if not residents:
        return f"{title}\n\nno component uses it"
    who = [(c, f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)}") for c, ranks in residents]
    names = [c for c, _ in residents]
    account = report.ledger.account(number)
    held = [("", *names, "sum", "free"), *_loads(report, account, names)]
    return "\n\n".join([title, _chapter("who is here", table(who)), _chapter("what each holds", table(held))])


def _chapter(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *indented(lines)])


def _where(plan: AnyPlan, component: str) -> list[str]:
    placement = plan.placement
    spec, lines = placement.spec(component), []
    if not placement.accelerators(component):
        return [f"on {spec.pool.noun}s: it holds no accelerators"]
    shapes = {(s.ranks_per_accelerator, s.accelerators_per_rank) for s in spec.segments}
    for ranks, each in sorted(shapes):
        if ranks > 1:
            lines.append(f"{ranks} ranks share an accelerator")
        else:
            lines.append(f"each rank has {each} accelerator{'s' * (each > 1)} of one node")
    if spec.parallel.tensor_parallel_size > 1:
        lines.append(f"{spec.num_copies} copies of the model, each over {spec.parallel.tensor_parallel_size}")
    for other in placement.components:
        if other != component and placement.relation(component, other) != DISAGGREGATED:
            word, shared = placement.relation(component, other), placement.shared(component, other)
            lines.append(f"shares {shared} with {other} ({word})")
    if len(lines) == len(shapes):
        lines.append("shares nothing: nobody else uses its accelerators")
    if spec.process:
        partners = " and ".join(c for c in spec.process.split("+") if c != component)
        lines.append(f"each rank is in one process with that of {partners} (process: shared)")
    return lines


def _counts(report: PlanReport, component: str) -> Iterator[str]:
    """Nothing where none of its numbers follows from another."""
    rows = [(count.count, count.why) for count in report.counts if component in count.subject.split(" : ")]
    if rows:
        yield _chapter("how many", table(rows))


def _when(report: PlanReport, component: str) -> Iterator[tuple[str, str, str]]:
    plan = report.plan
    for stage in plan.schedule.stages:
        held, need = plan.schedule.residency[stage][component], plan.schedule.needs.of(stage, component)
        yield stage, held.word, _because(report, component, stage, held, need)


def _because(report: PlanReport, component: str, stage: str, held: Residency, need: Residency) -> str:
    plan = report.plan
    sharers = [c for c in plan.placement.components if c != component and plan.placement.shared(c, component)]
    busy = [c for c in sharers if plan.schedule.needs.of(stage, c) > Residency.OFF]
    if held == need > Residency.OFF:
        return f"{stage} needs its weights" if need is Residency.WEIGHTS else f"it works in {stage}"
    if held is Residency.OFF:
        return f"not needed; {', '.join(busy)} use{'s' * (len(busy) == 1)} its accelerators" if busy else "not needed"
    asked = "not needed" if need is Residency.OFF else f"{stage} needs only its weights"
    if not plan.placement.accelerators(component):
        return f"{asked}; it stays, on no accelerator"
    if not sharers:
        return f"{asked}; it stays, its accelerators are its own"
    if not report.case.offload.get(component, False):
        return f"{asked}; it stays, enable_offload is not set"
    return f"{asked}; it stays, in nobody's way"


def _talks(plan: AnyPlan, component: str) -> Iterator[tuple[str, str, str, str]]:
    for transfer in transfers(plan):
        if transfer.source == component:
            yield f"sends {transfer.name}", f"to {transfer.target}", transfer.amount, transfer.by_transport
        if transfer.target == component:
            yield f"gets {transfer.name}", f"from {transfer.source}", transfer.amount, transfer.by_transport


def _weighs(report: PlanReport, component: str) -> list[str]:
    ledger = report.ledger
    rows = [
        (
            level.word,
            show_bytes(ledger.bytes(component, level)),
            f"host {show_bytes(ledger.host_bytes(component, level))}",
        )
        for level in Residency
    ]
    if not any(ledger.bytes(component, level) or ledger.host_bytes(component, level) for level in Residency):
        return ["not known"]
    working = {stage: parts for f in ledger.footprints[component] for stage, parts in f.working.items()}
    rows += [
        (f"working in {stage}", f"+ {show_bytes(sum(parts.values()))}", ", ".join(p.value for p in parts))
        for stage, parts in working.items()
    ]
    return table(rows)


def _loads(report: PlanReport, account: Account, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for load in account.loads:
        if load.moment.entering:
            continue
        stage = load.moment.stage
        cells = (f"{report.plan.schedule.residency[stage][c].word}, {show_bytes(load.of(c))}" for c in names)
        yield stage, *cells, show_bytes(load.total_bytes), _free(account, load)


def _free(account: Account, load: Load) -> str:
    return show_bytes(account.capacity_bytes - load.total_bytes) if account.capacity_bytes else "?"


def _ranks_on(slots: Sequence[Slot], number: int) -> list[int]:
    return [slot.rank for slot in slots if number in slot.accelerators]


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
