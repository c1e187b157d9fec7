"""What is recorded of failures, and what may be saved meanwhile; groups and cluster are stand-ins."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import pytest

from rlplace.config.schema import FaultsConfig
from rlplace.errors import WorkerError
from rlplace.faults import History, Recovery
from rlplace.placement.language.slots import FlexiblePlacementStrategy
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.cluster import Cluster as Machines
from rlplace.workers.launch.cluster import InlineLauncher
from rlplace.workers.worker import Worker


class Group(types.SimpleNamespace):
    """One rank, which is lost."""

    world_size, at_work = 1, False

    def __init__(self) -> None:
        super().__init__(failed_calls=[], ranks=dict[int, None]())

    def lost(self) -> Mapping[int, None]:
        return self.ranks

    def wait_wound_down(self) -> None:
        """It has."""


class Cluster:
    def __init__(self, groups: Mapping[str, Group]) -> None:
        self.groups, self.restarted = groups, list[dict[str, set[int]]]()
        self.asked: list[Collection[str]] = []  # components with lost ranks, before a run goes back
        self.next_lost: list[str] = []  # while the others start again

    def lost_nodes(self) -> dict[int, str]:
        return {}

    def with_peers(self, lost: Mapping[str, Collection[int]]) -> dict[str, set[int]]:
        return {name: set(ranks) for name, ranks in lost.items() if ranks}

    def restart(self, lost: Mapping[str, Collection[int]]) -> None:
        self.restarted.append({name: set(ranks) for name, ranks in lost.items()})
        for group in self.groups.values():
            group.ranks.clear()
        if self.next_lost:
            name = self.next_lost.pop(0)
            self.groups[name].ranks[0] = None
            raise died(name)


def died(component: str) -> WorkerError:
    return WorkerError(component=component, rank=0, node=0, method="work", what="died")


@pytest.fixture
def groups() -> dict[str, Group]:
    return {"actor": Group(), "env": Group(), "rollout": Group()}


def recovery(
    groups: Mapping[str, Group], said: list[str], *, without: Collection[str] = ()
) -> tuple[Recovery, Cluster]:
    history, cluster = History(), Cluster(groups)
    history.ready(0.0)
    config = FaultsConfig()

    def without_state(lost: Collection[str]) -> Collection[str]:
        cluster.asked.append(lost)
        return without

    made = Recovery(
        cast(Any, cluster),
        cast(Any, groups),
        config,
        history,
        tell=said.append,
        patience_s=1.0,
        without_state=without_state,
    )
    return made, cluster


def test_all_faults_that_a_run_went_back_for_are_told_once_it_has(groups: dict[str, Group]) -> None:
    said: list[str] = []
    made, cluster = recovery(groups, said)
    groups["env"].ranks[0] = None
    assert not made.recover(died("env"), iteration=4, stage="rollout", redone_s=1.0).went_back
    assert (len(said), made.state_lost) == (1, False)
    groups["actor"].ranks[0] = None
    assert made.recover(died("actor"), iteration=5, stage="learn", redone_s=1.0).went_back
    groups["rollout"].ranks[0] = None
    assert made.recover(died("rollout"), iteration=2, stage="sync", redone_s=0.5, back=True).went_back
    assert (len(said), made.state_lost) == (1, True), "what trains has no state until all is loaded"
    assert cluster.restarted == [{"env": {0}}, {"actor": {0}}, {"rollout": {0}}]
    whole = made.went_back(redone_s=30.0)
    assert [fault.replaced for fault in whole] == [("actor rank 0",), ("rollout rank 0",)]
    assert [round(fault.redone_s, 1) for fault in whole] == [31.0, 0.5]
    assert made.faults[1:] == whole
    assert (len(said), made.state_lost) == (3, False)


def test_what_no_checkpoint_has_starts_again_as_a_whole(groups: dict[str, Group]) -> None:
    made, cluster = recovery(groups, [], without=["actor", "env"])
    groups["actor"].ranks[0] = None
    made.recover(died("actor"), iteration=0, stage="learn", redone_s=1.0)
    assert cluster.restarted == [{"actor": {0}, "env": {0}}]


def test_what_an_earlier_round_has_replaced_is_not_waited_for(groups: dict[str, Group]) -> None:
    """A checkpoint is waited for as long as it may take, unless one that writes it has `lost` ranks."""
    made, cluster = recovery(groups, [])
    groups["env"].ranks[0] = None
    cluster.next_lost = ["actor"]
    assert made.recover(died("env"), iteration=4, stage="rollout", redone_s=1.0).went_back
    assert cluster.restarted == [{"env": {0}}, {"actor": {0}}]
    assert cluster.asked == [{"env", "actor"}]


def test_all_that_is_on_an_accelerator_moves_to_another_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, Sequence[int]]] = []
    monkeypatch.setattr(InlineLauncher, "take", lambda self, *asked: taken.append(asked) or True)
    topology = Topology.uniform(2, 4, "emulated")
    with Machines(topology=topology, launcher="inline") as cluster:
        held = {"actor": [[5], [6]], "rollout": [[4, 5]], "env": [[0]]}
        made = {c: (Worker.create_group(), FlexiblePlacementStrategy(ranks), {}) for c, ranks in held.items()}
        cluster.launch_all(made)
        assert cluster.move("rollout", 0) == [], "two are needed, and one is free"
        (actor, rollout) = cluster.move("actor", 0)
        assert (actor.owner, actor.accelerators, actor.local_accelerators) == ("actor rank 0", (7,), (3,))
        assert (rollout.owner, rollout.accelerators, rollout.visible_accelerators) == ("rollout rank 0", (4, 7), (0, 3))
        assert taken == [(1, [3])]
        assert cluster.move("actor", 1) == [], "none is free but the one that was given up"
        assert [slot.accelerators for slot in cluster.move("env", 0)] == [(1,)]
