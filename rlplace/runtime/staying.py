"""Which workers stay when the plan of a run changes, and what they may hold while others start.

::

    change of env alone     actor, rollout: the same slots and settings ─▶ they stay, with their state in memory
                            env ─▶ ends, starts on its new slots, loads

Whole groups stay or are replaced: the ranks of a group share a process group and its collectives.
"""

from __future__ import annotations

from collections.abc import Collection

from rlplace.placement.flow import DeviceDelivery
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency
from rlplace.runtime.launched import JobSpec


def staying(before: JobSpec, after: JobSpec) -> tuple[str, ...]:
    """Return the components whose workers continue under the plan of `after`, in their processes and with their state.

    A component stays if its slots and the settings of its workers are equal, if its workers can follow another plan,
    have processes of their own, and send and get no weights from GPU to GPU (their ranks would have to meet anew).
    Without such components the result is empty, as it is if answers are generated while the actor learns: what is
    under way then belongs to the plan before.
    """
    if before.plan.needs.ahead > 0 or after.plan.needs.ahead > 0:
        return ()
    on_devices = _on_devices(before.plan) | _on_devices(after.plan)
    found: list[str] = []
    for component in after.plan.placement.components:
        worker = after.workers[component]
        slots = after.plan.placement.slots(component)
        if (
            component not in on_devices
            and worker is before.workers[component]
            and tuple(slots) == tuple(before.plan.placement.slots(component))
            and not any(slot.process for slot in slots)
            and worker.can_follow(
                component, before.arguments[component], after.arguments[component]
            )
        ):
            found.append(component)
    return tuple(found)


def highest_residency(
    before: Plan, after: Plan, stay: Collection[str]
) -> dict[str, Residency]:
    """Return component -> the highest residency that it may keep while others start, for the components `stay`.

    A component that shares an accelerator with one that starts has to leave it. Another one keeps what the first stage
    of either plan gives it.
    """
    started: set[int] = set()
    for plan in (before, after):
        for component in plan.placement.components:
            if component not in stay:
                started |= _accelerators(plan, component)
    most: dict[str, Residency] = {}
    for component in stay:
        most[component] = Residency.OFF
        if not started & _accelerators(after, component):
            most[component] = min(
                plan.schedule.residency[plan.schedule.stages[0]][component]
                for plan in (before, after)
            )
    return most


def _accelerators(plan: Plan, component: str) -> set[int]:
    slots = plan.placement.slots(component)
    return {number for slot in slots for number in slot.accelerators}


def _on_devices(plan: Plan) -> set[str]:
    """Return the components that send or get weights from GPU to GPU."""
    found: set[str] = set()
    for delivery in plan.deliveries:
        if isinstance(delivery, DeviceDelivery):
            found |= {delivery.source, delivery.target}
    return found
