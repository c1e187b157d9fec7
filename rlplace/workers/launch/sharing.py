"""Which workers live in one process, and whether they can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlplace.errors import Problem
from rlplace.placement.language.slots import Slot
from rlplace.workers.launch.launcher import GroupOrder
from rlplace.workers.launch.reservation import visible_to


def processes(slots: Iterable[Slot]) -> list[tuple[Slot, ...]]:
    """The slots of each process, in the order of its first slot."""
    found: dict[tuple[str, int, str], list[Slot]] = {}
    for slot in slots:
        own = ("", 0) if slot.process else (slot.component, slot.rank)
        found.setdefault((*own, slot.process), []).append(slot)
    return [tuple(sharing) for sharing in found.values()]


def cannot_share(orders: Sequence[GroupOrder], running: Iterable[str]) -> Problem | None:
    """What keeps the workers of these orders from the processes their slots name. `running`: processes there are."""
    classes = {order.name: order.worker for order in orders}
    for sharing in processes(slot for order in orders for slot in order.slots):
        first = sharing[0]
        if not first.process:
            continue
        if first.process in running:
            why = "the workers of a process start together"
            return _problem(first, "its process runs already", why, "launch all that share with one launch_all")
        for slot in sharing:
            if classes[slot.component].needs_own_process:
                why = f"a process can join only one process group, and {classes[slot.component].__name__} joins one"
                return _problem(slot, "needs a process of its own", why, "leave its slots' `process` empty")
            if slot.runtime_env != first.runtime_env:
                why = f"{_name(first)} and {_name(slot)} have other environment variables or another Python"
                return _problem(
                    slot, "needs another runtime environment than its process", why, "give both node groups the same"
                )
            if (slot.node, visible_to(slot)) != (first.node, visible_to(first)):
                why = f"{_name(first)} is on node {first.node} and sees accelerators {_listed(first)} there, "
                why += f"{_name(slot)} is on node {slot.node} and sees {_listed(slot)}"
                return _problem(slot, "sees other things than its process", why, "place them alike")
    return None


def _listed(slot: Slot) -> str:
    return ",".join(map(str, visible_to(slot))) or "none"


def _name(slot: Slot) -> str:
    return f"{slot.component} rank {slot.rank}"


def _problem(slot: Slot, what: str, why: str, fix: str) -> Problem:
    return Problem(
        code="process-cannot-be-shared", key=_name(slot), what=what, got=f"process {slot.process!r}", why=why, fix=fix
    )
