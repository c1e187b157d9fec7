"""Rules for placements that work and waste accelerators. They give warnings."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule, at_key, at_line
from rlplace.config.keys import PLACEMENT
from rlplace.placement.plan import Placed


def _idle(case: Placed) -> Iterator[Found]:
    """Yield one finding if there are accelerators that no component uses. `case`: the placement of the job, with its
    cluster.
    """
    topology = case.placement.topology
    idle = topology.all - case.placement.used
    if not idle:
        return
    error = "several"
    if len(idle) == 1:
        error = "one"
    yield at_key(PLACEMENT, None, error, idle=idle, cluster=topology.describe())


def _wide_copies(case: Placed) -> Iterator[Found]:
    """Yield a finding for each component with a copy of its model on several nodes.

    Such a copy exchanges data over the network in every layer.
    """
    placement = case.placement
    for component in placement.components:
        spec = placement.spec(component)
        node = max(placement.topology.nodes, key=lambda n: n.accelerators)
        size = spec.parallel.tensor_parallel_size
        # A component without accelerators has no copies.
        if size <= node.accelerators or not spec.accelerators:
            continue
        if not (node.network_gb_per_s and node.nvlink_gb_per_s):
            yield at_line(spec, component=component, size=size, most=node.accelerators)
            continue
        yield at_line(
            spec,
            "rates",
            component=component,
            size=size,
            most=node.accelerators,
            network=node.network_gb_per_s,
            slower=node.nvlink_gb_per_s / node.network_gb_per_s,
        )


WARNINGS = (
    Rule(code="idle-accelerators", facts=_idle),
    Rule(code="tensor-parallel-leaves-node", facts=_wide_copies),
)
