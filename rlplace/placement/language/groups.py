"""Node groups: labelled nodes, the things that each group numbers, and the environment of its processes.

`group_blocks` reads them from the config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from rlplace.placement.machines.pools import (
    ANY_NODE,
    WHOLE_CLUSTER,
    Pool,
    accelerator_pool,
    joined_pool,
    node_pool,
)
from rlplace.placement.machines.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeEnv:
    """The environment variables and the Python interpreter of the processes on a node.

    `env_vars`: pairs (name, value). `interpreter`: path of the Python to run; "": that of the driver.
    """

    env_vars: tuple[tuple[str, str], ...] = ()
    interpreter: str = ""  # path of the Python to run; "": the driver's


class NodeGroups:
    """All node groups of a cluster. Immutable.

    Every cluster has two groups that are not declared: one numbers its accelerators, the other one its nodes.
    """

    def __init__(
        self,
        topology: Topology,
        pools: Mapping[str, Pool] | None = None,
        runtime_envs: Mapping[tuple[str, int], RuntimeEnv] | None = None,
        broken: Collection[str] = (),
    ) -> None:
        """Collect the node groups of a cluster.

        `pools`: label -> pool. `runtime_envs`: (label, node) -> environment of the group's processes on that node.
        `broken`: labels of groups that are declared wrongly and so have no pool.
        """
        self.topology = topology
        self.runtime_envs = runtime_envs or {}
        # Where no node has an accelerator, a placement without a node group counts nodes.
        nodes = topology.nodes
        counted = accelerator_pool if topology.num_accelerators else node_pool
        self._pools = {
            WHOLE_CLUSTER: counted(nodes, WHOLE_CLUSTER),
            ANY_NODE: node_pool(nodes),
            **(pools or {}),
        }
        self.broken = broken

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self._pools)

    def __getitem__(self, label: str) -> Pool:
        """Return the pool of a node group, or of several groups whose labels are joined by commas.

        Raise KeyError if a group does not exist.
        """
        pools = [self._pools[part] for part in label.split(",")]
        if len(pools) > 1:
            return joined_pool(pools, label)
        return pools[0]
