"""The order of an iteration, with and without held-out prompts, over groups that only log their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from rlplace.config.blocks.engine import RunnerConfig
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.contract.stages import (
    Stage,
    Work,
    full,
    needs_of_stages,
    steps_of_stage,
    weights,
)
from rlplace.errors import WorkerError, WorkerTimeout
from rlplace.execution.faults import Fault, Recovery, StateLost
from rlplace.execution.lease import Lease
from rlplace.execution.loop import Loop, _not_metrics
from rlplace.execution.memory_monitor import MemoryMonitor
from rlplace.jobs.language_model.iteration import work
from rlplace.metrics import Metric, Metrics
from rlplace.placement import Topology
from rlplace.placement.language.slots import Slot
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan, plan_components
from rlplace.placement.schedule import Residency, text_needs
from rlplace.workers.launch.group import Call, Pending, WorkerGroup
from rlplace.workers.worker import MoveReport
from tests.open_calls import OpenGroup, slot_of

COMPONENTS = ("actor", "rollout", "env")


class Group:
    """One rank whose calls have all ended."""

    def __init__(self, name: str, log: list[str], slots: tuple[Slot, ...]) -> None:
        self.name, self.slots, self._log = name, slots, log
        self.fails: list[str] = []  # methods of which the next call fails

    def hold(self) -> None:
        """Hold nothing back: each call is seen when it is made."""

    flush = drop = hold

    def execute_on(self, ranks: set[int]) -> Group:
        return self

    def __getattr__(self, method: str) -> Callable[..., Pending]:
        def call(*args: object) -> Pending:
            word = method
            if args and isinstance(args[0], Residency):
                word = args[0].word
            self._log.append(f"{self.name} {word}")
            if method in self.fails:
                self.fails.remove(method)
                raise WorkerError(
                    component=self.name, rank=0, node=0, method=method, what="died"
                )
            future = Call(slot_of(self.name), method)
            numbers = {
                f"{'eval' if method == 'evaluate' else self.name}/{method}": Metric(1.0)
            }
            moved = MoveReport(
                residency=Residency.OFF, accelerator_bytes=1, host_bytes=0
            )
            future.set_result(moved if method == "move" else numbers)
            return Pending(cast(WorkerGroup, self), [future])

        return call


def loop(**apart: str) -> tuple[Loop, list[str]]:
    """Of a job whose components take turns on one accelerator, but for more of them that are placed `apart`."""
    where = {**dict.fromkeys(COMPONENTS, "0"), **apart}
    layout = plan_components(
        ClusterConfig(component_placement=where),
        Topology.uniform(1, 4, "emulated", 1 << 30),
        needs=text_needs(
            where, actor_infers="critic" in where, refreshed="reference" in where
        ),
        offload=tuple(where),
    )
    return loop_of(layout, work(layout.needs))


def loop_of(layout: Plan, calls: Work) -> tuple[Loop, list[str]]:
    """Of a plan in which all components take turns, with these calls; and the log of its calls."""
    log: list[str] = []
    groups = {
        n: cast(WorkerGroup, Group(n, log, tuple(layout.placement.slots(n))))
        for n in layout.placement.components
    }
    case = MemoryCase(
        placement=layout.placement,
        needs=layout.needs,
        offload=dict.fromkeys(groups, True),
        demands={},
    )
    return Loop(
        layout.schedule,
        groups,
        MemoryMonitor(case),
        RunnerConfig(stage_timeout_s=1.0),
        calls,
    ), log


def works(log: list[str]) -> list[str]:
    """The calls that are no moves."""
    return [call for call in log if call.split()[1] not in ("off", "weights", "full")]


def test_an_iteration_goes_through_its_stages() -> None:
    made, log = loop()
    numbers = made.iteration(0)
    assert works(log) == [
        "actor push_weights",
        "rollout pull_weights",
        "env run",
        "rollout generate",
        "actor learn",
    ]
    assert made.version == numbers["policy/version"] == 1
    assert "time/evaluate_s" not in numbers


def test_an_iteration_goes_on_where_an_evaluation_has_begun_it() -> None:
    made, log = loop()
    made.iteration(0)
    log.clear()
    evaluated = made.evaluate(1)
    assert set(evaluated) == {"time/evaluate_s", "eval/evaluate"}
    assert made.has_begun
    numbers = made.iteration(1)
    assert works(log) == [
        "actor push_weights",
        "rollout pull_weights",
        "env evaluate",
        "rollout generate",  # of held-out prompts; weights are sent once
        "env run",
        "rollout generate",
        "actor learn",
    ]
    # The same moves as without an evaluation, and the same metrics.
    with_evaluation = list(log)
    plain, plain_log = loop()
    plain.iteration(0)
    plain_log.clear()
    expected = plain.iteration(1)
    for call in ("env evaluate", "rollout generate"):
        with_evaluation.remove(call)
    assert with_evaluation == plain_log
    assert set(numbers) == set(expected)
    assert not made.has_begun


class Turns(Lease):
    """Grants everything at once, after a second, and writes into the log of calls."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.waited_s = 0.0

    def enter(self, before: str | None, stage: str) -> None:
        self._log.append(f"lease {before} -> {stage}")
        self.waited_s += 1.0

    def take_all(self, why: str, *, keeping: bool = False) -> None:
        self._log.append(f"lease all: {why}{' keeping' * keeping}")


def test_a_run_gives_accelerators_back_before_it_waits_for_others() -> None:
    made, log = loop()
    made.lease = Turns(log)
    made.iteration(0)
    log.clear()
    numbers = made.iteration(1)
    # Whatever leaves has left before the run waits, and whatever comes comes after
    assert log == [
        "actor weights",
        "lease learn -> sync",
        *("rollout weights", "actor push_weights", "rollout pull_weights"),
        "actor off",
        "lease sync -> rollout",
        *("rollout full", "env full", "env run", "rollout generate"),
        *("rollout off", "env off"),
        "lease rollout -> learn",
        *("actor full", "actor learn"),
    ]
    assert numbers["time/turns_s"] == 3.0
    assert numbers["time/moves_s"] < 1.0


def test_a_recovery_waits_for_all_accelerators_and_keeps_what_it_has() -> None:
    made, log = loop()
    made.lease = Turns(log)
    made.recovery = cast(Recovery, Replacing())
    made.iteration(0)
    log.clear()
    cast(dict[str, Group], made._groups)["rollout"].fails = ["generate"]
    made.iteration(1)
    leases = [call for call in log if call.startswith("lease")]
    assert leases == [
        "lease learn -> sync",
        "lease sync -> rollout",
        "lease all: recovery keeping",
        "lease sync -> sync",
        "lease sync -> rollout",
        "lease rollout -> learn",
    ]
    asked = log.index("lease all: recovery keeping")
    assert log[asked + 1] == "actor begin_again"


def test_a_run_alone_has_no_turns() -> None:
    made, log = loop()
    assert "time/turns_s" not in made.iteration(0)
    assert not [call for call in log if "lease" in call]


def test_an_evaluation_after_a_fault_sends_the_weights_again() -> None:
    made, log = loop()
    made.evaluate(0)
    made.go_back(0, lambda: None)
    assert not made.has_begun
    log.clear()
    made.iteration(0)
    assert works(log)[:2] == ["actor push_weights", "rollout pull_weights"]


def test_seconds_of_sending_weights_are_sync_in_a_stage_of_any_name() -> None:
    stages = [
        Stage("send", weights("actor", to="rollout")),
        Stage("learn", weights("rollout", to="env"), full("actor").calls("learn")),
    ]
    where = dict.fromkeys(COMPONENTS, "0")
    layout = plan_components(
        ClusterConfig(component_placement=where),
        Topology.uniform(1, 1, "emulated", 1 << 30),
        needs=needs_of_stages(stages),
        offload=COMPONENTS,
    )
    work_of_stages = Work(
        stages={stage.name: steps_of_stage(stage, {}) for stage in stages},
        trains=("learn",),
        collects=True,
    )
    made, _ = loop_of(layout, work_of_stages)
    made.iteration(0)
    send, learn = made.usage.last
    assert send.only_sync
    assert 0.0 < learn.sync_s < learn.seconds


def test_it_says_at_any_time_what_it_does_and_what_is_resident(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _ = loop()
    seen: list[tuple[str, str]] = []
    wait = made._wait

    def look(pending: Sequence[Pending]) -> list[list[object]]:
        assert made.doing is not None
        seen.append(
            (
                made.doing[0],
                ", ".join(f"{c} {held.word}" for c, held in made.held.items()),
            )
        )
        return wait(pending)

    monkeypatch.setattr(made, "_wait", look)
    made.iteration(0)
    assert made.doing is None
    assert [
        stage for stage, _ in dict.fromkeys((stage, None) for stage, _ in seen)
    ] == [
        "moves into sync",
        "sync",
        "moves into rollout",
        "rollout",
        "moves into learn",
        "learn",
    ]
    assert seen[-1] == ("learn", "actor full, rollout off, env off")


def test_ranks_that_are_at_work_have_been_asked_for_their_releases_too_and_nothing_comes_before_these() -> (
    None
):
    made, log = loop()
    ends = ("move", "push_weights", "pull_weights", "run")
    groups = {
        n: OpenGroup(n, log, slots=group.slots, at_once=ends)
        for n, group in made._groups.items()
    }
    made._groups, made._timeout_s = (
        {n: cast(WorkerGroup, group) for n, group in groups.items()},
        0.01,
    )
    with pytest.raises(WorkerTimeout) as caught:
        made.iteration(0)
    full, off = (f"move {int(r)}" for r in (Residency.FULL, Residency.OFF))
    work = ["env run 0", "rollout generate 0"]
    asked = [f"rollout {full}", f"env {full}", *work, f"rollout {off}", f"env {off}"]
    assert log[log.index(f"rollout {full}") :] == asked
    assert "still working: rollout rank 0 in generate" in str(caught.value), (
        "not the release behind it"
    )
    assert not [call for call in log if call in (f"actor {full}", "actor learn 0 0")]


def test_an_evaluation_learns_nothing_and_leaves_everything_where_rollout_has_it() -> (
    None
):
    made, log = loop()
    made.iteration(0)
    log.clear()
    numbers = made.evaluate(1)
    assert made.held["actor"] == Residency.OFF
    assert made.held["rollout"] == Residency.FULL
    assert not {"env run", "actor learn"} & set(log)
    assert "rollout/generate" not in numbers
    assert made.version == 1


def test_all_that_score_take_turns_where_they_share() -> None:
    made, log = loop(critic="0", reference="0", reward="1")
    numbers = made.iteration(0)
    assert works(log) == [
        "actor push_weights",
        "rollout pull_weights",
        "actor refresh",
        "reference refresh",
        "env run",
        "rollout generate",
        "reward infer",  # no other component is on its accelerator
        "reference infer",
        "actor infer",
        "critic infer",  # where it stays to learn
        "actor compute_advantages",
        "critic learn",
        "actor learn",
    ]
    assert made.version == 1
    for stage, number in (("infer", 3), ("learn", 2)):
        each = [numbers[f"time/{stage}_{turn}_s"] for turn in range(1, number + 1)]
        assert numbers[f"time/{stage}_s"] >= sum(each) - 1e-9
    assert "time/compute_advantages_s" in numbers


def test_advantages_are_computed_after_rollout_where_all_scorers_keep_up_and_an_evaluation_asks_none() -> (
    None
):
    made, log = loop(reward="1")
    made.iteration(0)
    assert works(log)[2:] == [
        "env run",
        "rollout generate",
        "reward infer",
        "actor compute_advantages",
        "actor learn",
    ]
    log.clear()
    made.evaluate(1)
    assert works(log) == [
        "actor push_weights",
        "rollout pull_weights",
        "env evaluate",
        "rollout generate",
    ]


def test_each_model_is_saved_where_it_is() -> None:
    made, log = loop(critic="0")
    made.iteration(0)
    log.clear()
    made.save({"actor": Path("policy"), "critic": Path("critic")})
    assert log == ["actor save_model", "actor off", "critic full", "critic save_model"]


class Replacing:
    """A Recovery that replaces nothing."""

    state_lost = False

    def recover(
        self,
        error: WorkerError,
        *,
        iteration: int,
        stage: str,
        redone_s: float,
        back: bool,
        **_: object,
    ) -> Fault:
        what, why = f"{error.component} in {error.method}", error.what
        times = {"at_s": 1.0, "redone_s": redone_s, "recovery_s": 2.0}
        return Fault(
            iteration=iteration,
            stage=stage,
            what=what,
            why=why,
            replaced=(),
            went_back=back,
            **times,
        )


def test_an_iteration_begins_anew_until_weights_may_have_changed() -> None:
    made, log = loop(reward="1")
    made.recovery = cast(Recovery, Replacing())
    made.iteration(0)
    log.clear()
    groups = cast(dict[str, Group], made._groups)
    groups["rollout"].fails, groups["reward"].fails = ["generate"], ["infer"]
    numbers = made.iteration(1)
    once = ["actor push_weights", "rollout pull_weights", "env run", "rollout generate"]
    again = [f"{name} begin_again" for name in groups]
    rest = ["reward infer", "actor compute_advantages", "actor learn"]
    assert works(log) == [*once, *again, *once, "reward infer", *again, *once, *rest]
    assert (made.version, numbers["faults/restarts"], numbers["faults/recovery_s"]) == (
        2,
        2.0,
        4.0,
    )
    assert numbers["env/begin_again"] == 1.0, (
        "what a rank has lost counts once, however often it begins again"
    )
    assert not {"faults/restarts", "env/begin_again"} & made.iteration(2).keys()


def test_once_weights_may_have_changed_all_ranks_go_back_to_what_was_saved() -> None:
    made, log = loop(reward="1")
    made.recovery = cast(Recovery, Replacing())
    for index in range(3):
        made.iteration(index)
    groups = cast(dict[str, Group], made._groups)
    groups["actor"].fails, groups["env"].fails = ["learn"], ["begin_again"]
    with pytest.raises(StateLost):
        made.iteration(3)
    log.clear()
    loads: list[str] = []
    with pytest.raises(StateLost):
        made.go_back(1, lambda: loads.append("again"))
    made.go_back(1, lambda: loads.append("loaded"))
    assert loads == ["loaded"]
    begun = [f"{name} begin_again" for name in groups]
    assert works(log) == [*begun[:-1], *begun]  # the first until env fails
    log.clear()
    assert made.iteration(1)["policy/version"] == 2
    assert log[0] == "actor push_weights", "all ranks are where an iteration begins"


def test_ranks_of_an_iteration_that_begins_anew_are_taken_from_where_they_are() -> None:
    made, log = loop()
    made.recovery = cast(Recovery, Replacing())
    made.iteration(0)
    groups = cast(dict[str, Group], made._groups)
    groups["env"].fails = ["run"]
    log.clear()
    made.iteration(1)
    begun = max(at for at, call in enumerate(log) if call.endswith("begin_again"))
    second = log[begun + 1 : log.index("actor push_weights", begun)]
    assert second[:2] == ["rollout weights", "env off"], "what leaves goes first"
    assert "actor weights" in second[2:]


def test_a_worker_that_is_lost_when_its_state_is_asked_for_is_replaced_and_asked_again(
    tmp_path: Path,
) -> None:
    made, log = loop()
    made.recovery = cast(Recovery, Replacing())
    made.iteration(0)
    groups = cast(dict[str, Group], made._groups)
    groups["env"].fails = ["write_state"]
    log.clear()
    made.write_state(tmp_path, ["actor", "env"])
    saves = ["actor write_state", "env write_state"]
    assert works(log) == [*saves, *[f"{name} begin_again" for name in groups], *saves]
    log.clear()
    groups["env"].fails = ["run"]
    numbers = made.iteration(1)
    assert (
        numbers["policy/version"],
        numbers["faults/restarts"],
        numbers["env/begin_again"],
    ) == (2, 2.0, 1.0)
    assert log[0] == "actor push_weights", "all ranks are where an iteration begins"


def test_values_of_a_result_that_are_no_metrics_are_named() -> None:
    def found(result: object) -> list[Metrics]:
        call = SimpleNamespace(method="learn")
        pending = SimpleNamespace(group=SimpleNamespace(name="actor"), calls=[call])
        return _not_metrics([cast(Pending, pending)], [[result, result]])

    mixed = {"loss": 0.5, "text": "low", "all": torch.zeros(2)}
    named = (
        "actor.learn returned 'text': a str is no number, and no metric",
        "actor.learn returned 'all': a Tensor is no number, and no metric",
    )
    for result in (mixed, {"text": "low", "all": torch.zeros(2)}):
        assert found(result) == [{"actor/not_metrics": Metric(2.0, "max", notes=named)}]
    for result in (None, {}, {"loss": torch.tensor(0.5)}, [1.0], {1: "one"}):
        assert found(result) == []


def test_components_are_lowered_between_two_iterations_and_the_next_loop_knows() -> (
    None
):
    before, log = loop()
    before.iteration(0)
    held = before.held
    assert held["actor"] == Residency.FULL
    log.clear()
    most = {"actor": Residency.WEIGHTS, "rollout": Residency.FULL}
    assert before.lower(most) == {
        "actor": Residency.WEIGHTS,
        "rollout": held["rollout"],
    }
    assert log == ["actor weights"]
    after = Loop(
        before._schedule,
        before._groups,
        before.memory,
        RunnerConfig(stage_timeout_s=1.0),
        before._work,
        first=1,
        held={"actor": Residency.WEIGHTS},
    )
    assert after.held["actor"] == Residency.WEIGHTS
    assert after.held["rollout"] == Residency.OFF
    after.iteration(1)
    assert after.held["actor"] == Residency.FULL


def test_the_seconds_of_changes_before_one_iteration_are_added_up() -> None:
    before, _ = loop()
    before.changed(2.0)
    after, _ = loop()
    after.continue_metrics(before)
    after.changed(1.5)
    assert after.iteration(0)["time/change_s"] == 3.5
    assert "time/change_s" not in after.iteration(1)


@pytest.mark.parametrize("method", ["move", "write_state"])
def test_what_a_rank_has_lost_before_a_change_counts_in_the_next_iteration(
    method: str, tmp_path: Path
) -> None:
    before, _ = loop()
    before.recovery = cast(Recovery, Replacing())
    before.iteration(0)
    cast(dict[str, Group], before._groups)["env"].fails = [method]
    before.ask(["env"])
    before.write_state(tmp_path, ["env"])
    after, _ = loop()
    after.continue_metrics(before)
    numbers = after.iteration(0)
    assert (numbers["env/begin_again"], numbers["faults/restarts"]) == (1.0, 1.0)
    assert not {"faults/restarts", "env/begin_again"} & after.iteration(1).keys()
