"""When env and engines begin what, while the actor learns, over groups whose calls end when the test says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import pytest

from rlplace.config.blocks.engine import RunnerConfig
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.errors import WorkerError, WorkerTimeout
from rlplace.execution.loop import Loop
from rlplace.execution.memory_monitor import MemoryMonitor
from rlplace.execution.overlap import Generation, Overlap, loop_of
from rlplace.jobs.language_model.iteration import work
from rlplace.placement import Topology
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import plan_components
from rlplace.placement.schedule import text_needs
from rlplace.workers.launch.group import Ranks, WorkerGroup
from tests.open_calls import OpenGroup


class Stage:
    """A generation that runs ahead, its groups and the log of their calls."""

    def __init__(self, *, ahead: int, iterations: int = 100) -> None:
        self.log: list[str] = []
        self.groups = {name: OpenGroup(name, self.log) for name in ("env", "rollout")}
        groups = {name: cast(WorkerGroup, group) for name, group in self.groups.items()}
        self.generation = Generation(groups, ahead=ahead, iterations=iterations)

    def push(self, version: int) -> list[str]:
        self.generation.push(version)
        return self.go_on()

    def end(self) -> list[str]:
        """All that is under way."""
        for group in self.groups.values():
            group.end_all()
        return self.go_on()

    def go_on(self) -> list[str]:
        """The calls that are made now."""
        before = len(self.log)
        self.generation.go_on()
        return self.log[before:]


def test_an_iteration_waits_for_the_version_that_admits_it() -> None:
    stage = Stage(ahead=1)
    assert stage.go_on() == []  # nothing is generated without weights
    assert stage.push(0) == [
        "rollout pull_weights 0",
        "env run 0",
        "rollout generate 0",
    ]
    assert stage.go_on() == []
    assert stage.end() == ["env run 1", "rollout generate 1"]
    assert stage.end() == []  # iteration 2 would be two versions ahead
    assert stage.push(1) == [
        "rollout pull_weights 1",
        "env run 2",
        "rollout generate 2",
    ]
    assert (
        stage.push(2) == []
    )  # weights that come while generating are asked for before the next iteration
    assert stage.end() == ["rollout pull_weights 2", "env run 3", "rollout generate 3"]


def test_an_iteration_is_over_when_all_its_ranks_are_and_idle_engines_take_what_is_pushed() -> (
    None
):
    stage = Stage(ahead=1, iterations=1)
    stage.push(0)
    stage.groups["env"].end_all()
    stage.go_on()
    assert stage.generation.over == {}
    assert stage.end() == []
    assert list(stage.generation.over) == [0]
    generated = stage.generation.over[0]
    assert [pending.calls[0].method for pending in generated.calls] == [
        "pull_weights",
        "run",
        "generate",
    ]
    assert generated.seconds == generated.busy_s == stage.generation.busy_s > 0.0
    assert stage.push(1) == ["rollout pull_weights 1"]
    assert stage.generation.busy_s == generated.busy_s  # only generating counts
    assert stage.end() == []


def test_nothing_begins_while_nothing_is_admitted() -> None:
    stage = Stage(ahead=2)
    stage.push(0)
    stage.generation.admitting = False
    assert stage.end() == []
    stage.generation.admitting = True
    assert stage.go_on() == ["env run 1", "rollout generate 1"]


class Lending(Stage):
    """Some engines generate all the time, and others are on accelerators that the actor lends."""

    def __init__(self, *, iterations: int = 100) -> None:
        self.log = []
        names = ("env", "rollout", "rollout (lent)")
        self.groups = {name: OpenGroup(name, self.log) for name in names}
        groups = {name: cast(WorkerGroup, group) for name, group in self.groups.items()}
        engines, lent = (cast(Ranks, self.groups[name]) for name in names[1:])
        self.generation = Generation(
            groups, ahead=1, iterations=iterations, engines=engines, lent=lent
        )

    def join(self, iteration: int) -> list[str]:
        before = len(self.log)
        self.generation.join(iteration)
        return self.log[before:]


def test_engines_on_lent_accelerators_join_each_iteration_once() -> None:
    stage = Lending()
    assert stage.join(0) == []  # it has not begun
    stage.push(0)
    assert stage.join(0) == ["rollout (lent) generate 0"]
    assert not stage.generation.has_left(0)
    assert stage.join(0) == []
    assert stage.end() == ["env run 1", "rollout generate 1"]
    assert stage.generation.has_left(0)
    assert not stage.generation.has_left(1)
    assert [c.calls[0].slot.component for c in stage.generation.over[0].calls] == [
        "rollout",
        "env",
        "rollout",
        "rollout (lent)",
    ]


def test_the_next_iteration_begins_when_lent_engines_have_taken_their_end_of_this_one() -> (
    None
):
    stage = Lending()
    stage.push(0)
    stage.join(0)
    stage.end()
    assert stage.end() == []
    assert list(stage.generation.over) == [0, 1]
    # The samples are there, so a checkpoint waits for nothing.
    assert stage.generation.under_way == ()
    # The lenders still work: iteration 2 is due, and would take the end of iteration 1 for its own.
    assert stage.push(1) == ["rollout pull_weights 1"]
    assert stage.end() == []
    assert stage.join(1) == ["rollout (lent) generate 1"]
    assert stage.go_on() == []
    assert stage.end() == ["env run 2", "rollout generate 2"]
    assert len(stage.generation.over[1].calls) == 3
    fresh = stage.generation.anew(1)
    assert not fresh.has_left(1)


EVERYTHING = (
    *("move", "push_weights", "pull_weights", "run", "generate", "evaluate", "learn"),
    *("forget", "write_state"),
)


def looping(
    ahead: int, at_once: tuple[str, ...] = EVERYTHING, timeout_s: float = 10.0
) -> tuple[Loop, list[str]]:
    """Over groups that end these calls as soon as they are made, and no others."""
    needs = dataclasses.replace(text_needs(("actor", "rollout", "env")), ahead=ahead)
    cluster = ClusterConfig(
        component_placement={"actor": "0", "rollout": "1", "env": "2"}
    )
    layout = plan_components(
        cluster, Topology.uniform(1, 3, "emulated", 1 << 30), needs=needs
    )
    log: list[str] = []
    groups = {
        name: cast(
            WorkerGroup,
            OpenGroup(
                name, log, slots=tuple(layout.placement.slots(name)), at_once=at_once
            ),
        )
        for name in needs.components
    }
    offload = dict.fromkeys(needs.components, False)
    memory = MemoryMonitor(
        MemoryCase(placement=layout.placement, needs=needs, offload=offload, demands={})
    )
    runner = RunnerConfig(stage_timeout_s=timeout_s, total_iterations=3)
    return loop_of(layout.schedule)(
        layout.schedule, groups, memory, runner, work(needs)
    ), log


def told(log: list[str]) -> list[str]:
    """Since last asked, without moves."""
    found = [line for line in log if " move " not in line]
    log.clear()
    return found


def test_the_next_iteration_begins_before_this_one_is_learned() -> None:
    assert type(looping(0)[0]) is Loop
    loop, log = looping(1)
    assert type(loop) is Overlap
    numbers = loop.iteration(0)
    assert told(log) == [
        "actor push_weights 0",
        *("rollout pull_weights 0", "env run 0", "rollout generate 0"),
        *("env run 1", "rollout generate 1"),
        "actor learn 0 0",
    ]
    assert (loop.version, numbers["policy/version"]) == (1, 1.0)
    assert numbers["time/rollout_s"] > 0.0
    assert 0.0 <= numbers["time/overlap_share"] <= 1.0
    loop.iteration(1)
    assert told(log) == [
        "actor push_weights 1",
        *("rollout pull_weights 1", "env run 2", "rollout generate 2"),
        "actor learn 1 1",
    ]
    loop.iteration(2)
    assert told(log) == [
        "actor push_weights 2",
        "rollout pull_weights 2",
        "actor learn 2 2",
    ]  # it was the last


def test_held_out_prompts_wait_for_the_engines_and_all_else_for_them() -> None:
    loop, log = looping(2)
    loop.evaluate(0)
    loop.iteration(0)
    assert told(log)[:6] == [
        *("actor push_weights 0", "rollout pull_weights 0"),
        *("env evaluate 0", "rollout generate 0"),
        *("env run 0", "rollout generate 0"),
    ]
    loop.evaluate(1)
    assert told(log) == [
        "actor push_weights 1",
        "rollout pull_weights 1",
        "env evaluate 1",
        "rollout generate 1",
    ]


def test_a_checkpoint_waits_until_all_that_is_generated_is_whole() -> None:
    loop, log = looping(1, timeout_s=0.05)
    loop.iteration(0)
    rollout = cast(OpenGroup, loop._groups["rollout"])
    rollout.at_once = set(EVERYTHING) - {"generate"}
    loop.iteration(1)
    told(log)
    with pytest.raises(WorkerTimeout, match="rollout rank 0 in generate"):
        loop.write_state(Path("part"), ["actor", "env"])
    assert told(log) == []
    loop.write_state(
        Path("part"), ["actor"]
    )  # what can be saved of a run that fails does not wait
    assert told(log) == ["actor write_state part/actor"]
    rollout.end_all()
    loop.write_state(Path("part"), ["actor", "env"])
    assert told(log) == [
        "env forget 2",
        "actor write_state part/actor",
        "env write_state part/env",
    ]
    assert {
        name: loop.generated[2][name] for name in ("env/ended", "rollout/ended")
    } == {
        "env/ended": 1.0,
        "rollout/ended": 2.0,  # of its pull, too
    }
    loop.iteration(2)
    assert told(log) == [
        "actor push_weights 2",
        "rollout pull_weights 2",
        "actor learn 2 2",
    ]


def test_an_iteration_that_was_generated_before_a_resume_keeps_its_numbers() -> None:
    loop, _ = looping(1)
    loop.generated = {0: {"env/ended": 5.0, "time/rollout_s": 30.0}}
    numbers = loop.iteration(0)
    assert (
        numbers["env/ended"],
        numbers["time/rollout_s"],
        numbers["actor/ended"],
    ) == (5.0, 30.0, 2.0)
    loop.write_state(Path("part"), ["actor", "env"])
    assert list(loop.generated) == [1]


def test_ranks_that_do_not_end_are_named() -> None:
    loop, _ = looping(
        1, at_once=("move", "push_weights", "pull_weights"), timeout_s=0.01
    )
    with pytest.raises(WorkerTimeout) as caught:
        loop.iteration(0)
    assert (
        "actor rank 0 in learn; env rank 0 in run; rollout rank 0 in generate"
        in str(caught.value)
    )


def test_room_is_made_for_a_lost_rank_although_its_calls_have_failed() -> None:
    loop, log = looping(1, at_once=("move", "pull_weights", "begin_again"))
    assert isinstance(loop, Overlap)
    groups = cast(dict[str, OpenGroup], loop._groups)
    for number, group in enumerate(groups.values()):
        vars(group).update(world_size=1, accelerators={number})
    generation = loop._generation
    generation.push(0)
    generation.go_on()
    died = WorkerError(
        component="rollout", rank=0, node=0, method="generate", what="died"
    )
    (call,) = groups["rollout"].open
    call.set_exception(died)
    log.clear()
    loop._make_room(0, {"rollout": [0]})
    assert log == []
