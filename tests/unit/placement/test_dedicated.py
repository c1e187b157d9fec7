"""The dedicated twin of a placement: as many ranks and accelerators of each component, none of them shared."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rlplace.config.blocks.machines import AcceleratorRunConfig, NodeConfig
from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.counts import dedicate
from rlplace.placement.language.hybrid import DISAGGREGATED
from rlplace.placement.machines.topology import declare_topology
from tests.unit.placement.placing import EIGHT, TWO, place


def placed(topology: Topology, **block: object) -> HybridComponentPlacement:
    return place(block, topology)


def apart(topology: Topology, **block: object) -> HybridComponentPlacement:
    found = dedicate(placed(topology, **block))
    assert found is not None
    return found


def test_ranks_stay_whole_and_on_one_node() -> None:
    found = apart(TWO, actor="0-7:0-1", env="1-2,5", rollout="0-1:0-3")
    assert [len(s.accelerators) for s in found.slots("actor")] == [4, 4]
    assert [s.node for s in found.slots("actor")] == [0, 1]
    assert [s.rank for s in found.slots("env")] == [0, 1, 2]
    # env leaves one accelerator of its node free, so the second of rollout goes on the next node.
    assert [s.accelerators for s in found.slots("rollout")] == [
        (12,),
        (12,),
        (13,),
        (13,),
    ]


def test_accelerators_of_a_mixed_node_keep_their_product() -> None:
    mixed = (
        AcceleratorRunConfig(count=2, product="A100"),
        AcceleratorRunConfig(count=2, product="L40"),
    )
    found = apart(
        declare_topology([NodeConfig(mixed=mixed)]),
        actor="2-3",
        env="0-1",
        rollout="2-3",
    )
    nodes = {
        c: [s.local_accelerators for s in found.slots(c)] for c in found.components
    }
    assert nodes == {
        "actor": [(2,), (3,)],
        "env": [(0,), (1,)],
        "rollout": [(2,), (3,)],
    }
    # The L40 of a node are behind its A100, so the next component takes another node.
    assert found.topology.num_nodes == 2


def test_nodes_of_another_kind_are_not_filled_up() -> None:
    found = apart(Topology.uneven([2, 8]), actor="0-1", env="2-3", rollout="0-1")
    assert [n.accelerators for n in found.topology.nodes] == [2, 8, 2]
    assert (
        apart(
            Topology.uniform(3, 4), actor="0-1", env="2", rollout="3"
        ).topology.num_nodes
        == 1
    )


def test_components_without_accelerators_are_left_out() -> None:
    agents = {"node_group": "node", "placement": "0"}
    assert apart(EIGHT, actor="0-1", agent=agents).components == ("actor",)
    assert dedicate(placed(EIGHT, agent=agents)) is None


@given(
    nodes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    cuts=st.lists(
        st.tuples(st.integers(0, 23), st.integers(1, 24)), min_size=1, max_size=5
    ),
)
def test_the_twin_has_the_same_sizes_and_shares_nothing(
    nodes: list[int], cuts: list[tuple[int, int]]
) -> None:
    topology = Topology.uneven(nodes)
    total = topology.num_accelerators
    block = {
        f"c{i}": f"{a % total}-{min(total, a % total + n) - 1}"
        for i, (a, n) in enumerate(cuts)
    }
    here, found = placed(topology, **block), apart(topology, **block)
    for component in here.components:
        assert found.world_size(component) == here.world_size(component)
        assert len(found.accelerators(component)) == len(here.accelerators(component))
    assert len(found.used) == sum(len(here.accelerators(c)) for c in here.components)
    assert {
        found.relation(a, b) for a, b in itertools.combinations(found.components, 2)
    } <= {DISAGGREGATED}
