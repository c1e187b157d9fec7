"""What is recorded of failures, and what may be saved meanwhile; groups and cluster are stand-ins."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import pytest

from rlplace.codes import problem
from rlplace.config.blocks.engine import FaultsConfig
from rlplace.config.blocks.machines import CommConfig, RayConfig
from rlplace.errors import (
    ClusterError,
    Problem,
    RayDied,
    WorkerError,
    WorkerTimeout,
)
from rlplace.execution.faults import Fault, History, Recovery, faults_of
from rlplace.placement.language.slots import FlexiblePlacementStrategy, Slot
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.cluster import Cluster as Machines
from rlplace.workers.launch.cluster import InlineLauncher
from rlplace.workers.launch.group import WorkerHandle
from rlplace.workers.launch.host import GroupSpec
from rlplace.workers.launch.reservation import Machine, NodeUse
from rlplace.workers.worker import Worker
from tests.open_calls import slot_of


class Group(types.SimpleNamespace):
    """One rank, which is lost."""

    world_size, at_work = 1, False

    def __init__(self) -> None:
        super().__init__(failed_calls=[], ranks=dict[int, None](), slots=list[Slot]())

    def lost(self) -> Mapping[int, None]:
        return self.ranks

    def wait_wound_down(self) -> None:
        """It has."""


class Cluster:
    def __init__(self, groups: Mapping[str, Group]) -> None:
        self.groups, self.restarted = groups, list[dict[str, set[int]]]()
        self.asked: list[
            Collection[str]
        ] = []  # components with lost ranks, before a run goes back
        self.no_room: list[
            str
        ] = []  # lost as they leave their accelerators, before the others are set up
        self.next_lost: list[str] = []  # while the others start again
        self.next_failed: list[WorkerError] = []  # as they start
        self.free: list[int] = []  # accelerators
        self.placed: list[Slot] = []  # of env, once it starts again
        self.died: RayDied | None = None  # the error about a process of Ray

    def check(self, *, idle: bool = False) -> None:
        if self.died is not None:
            raise self.died

    def lost_nodes(self) -> dict[int, str]:
        return {}

    def with_peers(self, lost: Mapping[str, Collection[int]]) -> dict[str, set[int]]:
        return {name: set(ranks) for name, ranks in lost.items() if ranks}

    def restart(
        self, lost: Mapping[str, Collection[int]], make_room: Callable[[object], None]
    ) -> None:
        self.restarted.append({name: set(ranks) for name, ranks in lost.items()})
        for group in self.groups.values():
            group.ranks.clear()
        self.groups["env"].slots = self.placed
        if self.no_room:
            name = self.no_room.pop(0)
            self.groups[name].ranks[0] = None
            raise died(name)
        make_room(lost)
        if self.next_lost:
            name = self.next_lost.pop(0)
            self.groups[name].ranks[0] = None
            raise died(name)
        if self.next_failed:
            error = self.next_failed.pop(0)
            self.groups[error.component].ranks[error.rank] = None
            raise error

    def move(self, component: str, rank: int) -> list[Slot]:
        """Move both ranks of env, which are on one accelerator."""
        assert component == "env"
        if not self.free:
            return []
        on = (self.free.pop(0),)
        self.placed = [
            dataclasses.replace(slot_of("env", rank), accelerators=on)
            for rank in range(2)
        ]
        return self.placed


def died(component: str) -> WorkerError:
    return WorkerError(component=component, rank=0, node=0, method="work", what="died")


def broken(rank: int, accelerator: int) -> WorkerError:
    """Return what a rank of env raises while it is set up on an accelerator that is broken."""
    error = RuntimeError("no accelerator here")
    return WorkerError(
        component="env",
        rank=rank,
        node=0,
        accelerators=(accelerator,),
        method="setup",
        what=str(error),
        cause=error,
    )


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
        replaceable=("env", "rollout"),
        without_state=without_state,
    )
    return made, cluster


def test_all_faults_that_a_run_went_back_for_are_told_once_it_has(
    groups: dict[str, Group],
) -> None:
    said: list[str] = []
    made, cluster = recovery(groups, said)
    groups["env"].ranks[0] = None
    assert not made.recover(
        died("env"), iteration=4, stage="rollout", redone_s=1.0
    ).went_back
    assert (len(said), made.state_lost) == (1, False)
    groups["actor"].ranks[0] = None
    assert made.recover(
        died("actor"), iteration=5, stage="learn", redone_s=1.0
    ).went_back
    groups["rollout"].ranks[0] = None
    assert made.recover(
        died("rollout"), iteration=2, stage="sync", redone_s=0.5, back=True
    ).went_back
    assert (len(said), made.state_lost) == (1, True), (
        "what trains has no state until all is loaded"
    )
    assert cluster.restarted == [{"env": {0}}, {"actor": {0}}, {"rollout": {0}}]
    whole = made.went_back(redone_s=30.0)
    assert [fault.replaced for fault in whole] == [
        ("actor rank 0",),
        ("rollout rank 0",),
    ]
    assert [round(fault.redone_s, 1) for fault in whole] == [31.0, 0.5]
    assert made.faults[1:] == whole
    assert (len(said), made.state_lost) == (3, False)


def test_no_worker_is_started_again_on_a_ray_that_has_died(
    groups: dict[str, Group],
) -> None:
    made, cluster = recovery(groups, [])
    groups["env"].ranks[0] = None
    text = problem("ray-died", "cluster.ray", error="raylet", logs="/tmp/ray")
    cluster.died = RayDied(text, calls_go_on=False)
    with pytest.raises(RayDied, match="raylet"):
        made.recover(died("env"), iteration=4, stage="rollout", redone_s=1.0)
    assert cluster.restarted == []


def test_what_no_checkpoint_has_starts_again_as_a_whole(
    groups: dict[str, Group],
) -> None:
    made, cluster = recovery(groups, [], without=["actor", "env"])
    groups["actor"].ranks[0] = None
    made.recover(died("actor"), iteration=0, stage="learn", redone_s=1.0)
    assert cluster.restarted == [{"actor": {0}, "env": {0}}]


def test_what_an_earlier_round_has_replaced_is_not_waited_for(
    groups: dict[str, Group],
) -> None:
    """A checkpoint is waited for as long as it may take, unless one that writes it has `lost` ranks."""
    made, cluster = recovery(groups, [])
    groups["env"].ranks[0] = None
    cluster.next_lost = ["actor"]
    assert made.recover(
        died("env"), iteration=4, stage="rollout", redone_s=1.0
    ).went_back
    assert cluster.restarted == [{"env": {0}}, {"actor": {0}}]
    assert cluster.asked == [{"env", "actor"}]


def test_what_could_not_be_set_up_for_lack_of_room_is_started_again(
    groups: dict[str, Group],
) -> None:
    """The actor turns out to be dead as it is asked to leave the accelerator on which the engine starts."""
    made, cluster = recovery(groups, [])
    groups["rollout"].ranks[0] = None
    cluster.no_room = ["actor"]
    made.recover(died("rollout"), iteration=4, stage="rollout", redone_s=1.0)
    assert cluster.restarted == [{"rollout": {0}}, {"actor": {0}, "rollout": {0}}]


@pytest.mark.parametrize("free", [[7, 8], [7]])
def test_ranks_of_a_broken_accelerator_move_whichever_of_them_is_blamed(
    groups: dict[str, Group], free: list[int]
) -> None:
    """They share accelerator 1, and 7 is broken, too."""
    made, cluster = recovery(groups, [])
    groups["env"].ranks[0] = None
    groups["env"].slots = cluster.placed = [slot_of("env", rank) for rank in range(2)]
    cluster.free, cluster.next_failed = (
        free,
        [broken(rank, on) for on, rank in [(1, 1), (1, 0), (7, 1), (7, 0), (7, 1)]],
    )
    first = dataclasses.replace(broken(0, 1), method="run")
    if len(free) == 1:
        with pytest.raises(WorkerError, match="no other accelerator to move to"):
            made.recover(first, iteration=3, stage="rollout", redone_s=0.0)
        return
    fault = made.recover(first, iteration=3, stage="rollout", redone_s=0.0)
    assert fault.moved == ("env rank 0 to accelerator 8", "env rank 1 to accelerator 8")
    assert len(cluster.restarted) == 6
    assert len(made._history.recent) == 2, "each accelerator counts once"


def test_a_rank_that_has_moved_is_not_restarted_for_another(
    groups: dict[str, Group],
) -> None:
    made, cluster = recovery(groups, [])
    groups["env"].ranks[0] = None
    groups["env"].slots = cluster.placed = [slot_of("env", rank) for rank in range(2)]
    cluster.free, cluster.next_failed = (
        [7],
        [broken(1, 1), broken(1, 1), died("rollout")],
    )
    made.recover(broken(1, 1), iteration=3, stage="rollout", redone_s=0.0)
    assert cluster.restarted == [
        {"env": {0}},
        {"env": {1}},
        {"env": {0, 1}},
        {"rollout": {0}},
    ]


class Slow(Worker):
    """Is set up only when it is told to give up, on ranks that its config has by then."""

    def setup(self) -> None:
        if self.context.rank in self.config:
            self.context.cancelled.wait()


@pytest.mark.parametrize(
    ("hung", "blamed"), [([2], WorkerError), ([0, 2], WorkerTimeout)]
)
def test_a_start_that_is_late_blames_a_rank_only_if_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
    hung: list[int],
    blamed: type[WorkerError | WorkerTimeout],
) -> None:
    now = list[int]()

    def again(
        self: InlineLauncher, specs: Sequence[GroupSpec], slots: Collection[Slot]
    ) -> dict[str, list[WorkerHandle]]:
        now.extend(hung)
        return {
            spec.name: [self._make(spec, slot) for slot in spec.slots] for spec in specs
        }

    monkeypatch.setattr(InlineLauncher, "restart", again)
    ray = RayConfig(start_timeout_s=0.3)
    with Machines(
        topology=Topology.uniform(1, 3, "emulated"), launcher="inline", ray=ray
    ) as cluster:
        placed = FlexiblePlacementStrategy([[0], [1], [2]])
        group = cluster.launch_all({"actor": (Slow.create_group(now), placed, {})})[
            "actor"
        ]
        group.outlast = "give up"
        with pytest.raises(
            blamed, match=r"actor.setup: not finished after 0.3 s"
        ) as late:
            cluster.restart({"actor": {0, 1, 2}})
        group.wait_wound_down()
        assert sorted(group.lost()) == hung
        assert (
            f"still working: actor rank{'s' * (len(hung) > 1)} {','.join(map(str, hung))} in setup"
            in str(late.value)
        )
        if isinstance(late.value, WorkerError):
            assert late.value.rank == 2


def test_processes_that_do_not_start_in_time_are_tried_again(
    groups: dict[str, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as others that fail; none of them moves, since none has seen its accelerator."""
    made, _ = recovery(groups, [])
    tried: list[object] = []

    def again(self: InlineLauncher, *asked: object) -> None:
        tried.append(asked)
        late = Problem(
            code="workers-late",
            key="cluster.ray.start_timeout_s",
            what="1 worker processes did not start within 120 s",
            got="env rank 0 (node 0)",
        )
        raise ClusterError(late)

    monkeypatch.setattr(InlineLauncher, "restart", again)
    monkeypatch.setattr(Machines, "with_peers", lambda self, lost: {"env": {0}})
    with Machines(
        topology=Topology.uniform(1, 3, "emulated"), launcher="inline"
    ) as cluster:
        cluster.launch_all(
            {"env": (Worker.create_group(), FlexiblePlacementStrategy([[0]]), {})}
        )
        made._cluster = cluster
        with pytest.raises(
            WorkerTimeout,
            match=r"workers-late(.|\n)*env rank 0 \(node 0\)(.|\n)*3 times now$",
        ) as late:
            made.recover(died("env"), iteration=3, stage="rollout", redone_s=0.0)
    assert "no other accelerator" not in str(late.value), "there are two"
    assert len(tried) == 3


def test_all_that_is_on_an_accelerator_moves_to_another_of_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[tuple[int, Sequence[int]]] = []
    monkeypatch.setattr(
        InlineLauncher, "take", lambda self, *asked: taken.append(asked) or True
    )
    topology = Topology.uniform(2, 4, "emulated")
    with Machines(topology=topology, launcher="inline") as cluster:
        held = {"actor": [[5], [6]], "rollout": [[4, 5]], "env": [[0]]}
        made = {
            c: (Worker.create_group(), FlexiblePlacementStrategy(ranks), {})
            for c, ranks in held.items()
        }
        cluster.launch_all(made)
        assert cluster.move("rollout", 0) == [], "two are needed, and one is free"
        (actor, rollout) = cluster.move("actor", 0)
        assert (actor.owner, actor.accelerators, actor.local_accelerators) == (
            "actor rank 0",
            (7,),
            (3,),
        )
        assert (rollout.owner, rollout.accelerators, rollout.visible_accelerators) == (
            "rollout rank 0",
            (4, 7),
            (0, 3),
        )
        assert taken == [(1, [3])]
        assert cluster.move("actor", 1) == [], (
            "none is free but the one that was given up"
        )
        assert [slot.accelerators for slot in cluster.move("env", 0)] == [(1,)]


def ray_launcher() -> Any:
    """Return one that would join a Ray."""
    from rlplace.workers.ray_launch.launcher import RayLauncher

    return RayLauncher(
        Topology.uniform(1, 4, "cuda"),
        RayConfig(address="127.0.0.1:1"),
        CommConfig(),
        {},
        template=None,
        tell=print,
    )


def test_accelerators_of_a_node_that_does_not_answer_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rlplace.workers.ray_launch import launcher as module

    removed: list[object] = []
    bundles = types.SimpleNamespace(wait=lambda timeout_s: True)
    monkeypatch.setattr(module, "placement_group", lambda *_, **__: bundles)
    monkeypatch.setattr(module, "remove_placement_group", removed.append)
    monkeypatch.setattr(module, "_ask", lambda *_: "the ids")
    monkeypatch.setattr(module, "late_of", lambda asked, limit_s, interrupt: asked)
    launcher = ray_launcher()
    launcher._machines = [Machine(id="a", address="10.0.0.2", total={"GPU": 4.0})]
    launcher._reserved = {0: NodeUse(node=0, accelerators=(0,), kind="cuda")}
    assert not launcher.take(0, [3])
    assert removed == [bundles]
    assert launcher._reserved[0].accelerators == (0,)
    with pytest.raises(
        ClusterError, match="start_timeout_s: 1 worker processes did not start"
    ) as late:
        launcher.reserve([slot_of("env")])
    assert late.value.code == "workers-late"


def test_without_a_reservation_no_node_can_be_lost() -> None:
    assert ray_launcher().lost_nodes() == {}, "nor is Ray asked, which was not joined"


def test_iterations_of_faults_are_counted_from_1_as_in_the_table() -> None:
    fault = Fault(
        at_s=1.0,
        iteration=0,
        stage="learn",
        what="actor rank 0",
        why="lost",
        replaced=("actor rank 0",),
        redone_s=0.0,
        recovery_s=1.0,
    )
    assert str(fault).startswith("fault in learn of iteration 1: ")
    history = History()
    history.ready(0.0)
    history.faults.append(fault)
    (event,) = faults_of(history, train_s=1.0)["events"]
    assert event["iteration"] == 1
