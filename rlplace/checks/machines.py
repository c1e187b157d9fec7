"""Rules for declared machines: memory that a product does not have. They give warnings."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.placement.machines.products import memory_of
from rlplace.units import show_bytes


def _overstated(cluster: ClusterConfig) -> Iterator[Found]:
    """Yield a finding for each entry of `cluster.nodes` that declares more memory for an accelerator than the
    accelerator model that it names has.
    """
    for number, node in enumerate(cluster.nodes):
        key = f"cluster.nodes[{number}]"
        declared = [(key, node.product, node.memory)]
        for i, run in enumerate(node.mixed):
            declared.append((f"{key}.mixed[{i}]", run.product, run.memory))
        for place, product, memory in declared:
            known = memory_of(product)
            if 0 < known < memory:
                yield Found(
                    key=f"{place}.memory",
                    got=f"memory: {show_bytes(memory)}",
                    facts={
                        "product": product,
                        "most": f"{known / (1 << 30):.1f}GiB",
                    },
                )


WARNINGS = (Rule(code="memory-overstated", facts=_overstated),)
