"""Which change of the placement is due before an iteration, also after a return to an earlier checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlplace.errors import ConfigError
from rlplace.placement.plan import Plan
from rlplace.report.summary import SIMULATED, Progress
from rlplace.runtime import run
from rlplace.runtime.draining import nodes_of
from rlplace.runtime.launched import job_spec
from rlplace.runtime.replace import Change, PlanFrom
from rlplace.runtime.run import _Driver
from tests.unit.test_changes import job
from tests.unit.test_draining import on_two_nodes


class NoRequests:
    """The requests to a run that nobody asks for anything."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    def take(self) -> None:
        return None

    def answer(self, outcome: str, text: str) -> None:
        self.answers.append(outcome)


def a_driver(monkeypatch: pytest.MonkeyPatch, plans: list[PlanFrom]) -> Any:
    """Return the driver of a run that has nothing but its plans."""
    monkeypatch.setattr(run, "_write_plan", lambda *_: None)
    monkeypatch.setattr(_Driver, "show", lambda _: None)
    monkeypatch.setattr(_Driver, "_look_for_machines", lambda _: None)
    named = [field.name for field in dataclasses.fields(_Driver) if field.init]
    fields: dict[str, Any] = dict.fromkeys(named)
    for name in ("changes", "passed", "nodes"):
        fields[name] = []
    fields["drained"] = {}
    fields["joined"] = set()
    fields["requests"] = NoRequests()
    return _Driver(**{**fields, "plans": plans, "plan": plans[0]})


def at(after: int, plan: Plan, progress: Progress) -> PlanFrom:
    planned = job("")
    spec = job_spec(planned.config, planned.plan)
    spec = dataclasses.replace(spec, plan=plan, progress=progress)
    return PlanFrom(after=after, job=spec, view=planned.view)


def test_a_change_is_not_made_again_after_a_return_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request at an earlier iteration than a change that was made holds for good."""
    progress = Progress(measures=SIMULATED, began=0.0)
    before = job("").plan
    made = at(5, job("", cluster={}).plan, progress)
    driver = a_driver(monkeypatch, [at(0, before, progress), made])
    progress.iterations = 5
    assert driver._due() is made
    driver._change(made, None, Change(after=5, moved={}))
    # The run has gone back to a checkpoint, and is asked for another placement there
    progress.iterations = 3
    asked = at(3, before, progress)
    driver.plans = [driver.plans[0], asked, made]
    driver._change(asked, None, Change(after=3, moved={}))
    progress.iterations = 5
    assert driver._due() is None
    assert driver.plan is asked


def test_a_change_that_needs_a_drained_node_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(measures=SIMULATED, began=0.0)
    later = at(5, on_two_nodes(), progress)
    driver = a_driver(monkeypatch, [at(0, job("").plan, progress), later])
    assert nodes_of(later.job) == {0, 1}
    progress.iterations = 5
    driver.drained = {1: ""}
    assert driver._due() is None
    assert driver._due() is None
    said = capsys.readouterr().out
    assert said.count("after iteration 5 is left out: node 1 was drained") == 1


def test_a_requested_change_comes_again_after_a_return_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """State was lost while it was saved. Another change was made before the same iteration."""
    progress = Progress(measures=SIMULATED, began=0.0)
    plan = job("").plan
    made = at(4, plan, progress)
    driver = a_driver(monkeypatch, [at(0, plan, progress), made])
    driver._change(made, None, Change(after=4, moved={}))
    asked = at(4, plan, progress)
    driver.plans = [*driver.plans, asked]
    driver.requested = asked
    # The run has gone back to its start, where it takes no request
    progress.iterations = 0
    assert driver._due() is None
    progress.iterations = 1
    assert driver._due() is asked
    driver._change(asked, None, Change(after=1, moved={}))
    assert driver.requests.answers == ["changed"]
    progress.iterations = 4
    assert driver._due() is None


def machines(driver: Any, again: str | None, joined: tuple[str, ...] = ()) -> None:
    """Give a driver a cluster of two nodes. `again`: the machine that is there for node 1. `joined`: other machines."""
    driver.folder = Path("runs/job/now")
    driver.drained = {1: "cluster.component_placement.env=4-7"}
    driver.cluster = SimpleNamespace(
        nodes=lambda: {0: "10.0.0.1", 1: "10.0.0.2"},
        return_to=lambda node: again,
        joined=lambda: list(joined),
    )


def test_a_released_node_may_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(measures=SIMULATED, began=0.0)
    driver = a_driver(monkeypatch, [at(0, job("").plan, progress)])
    machines(driver, "10.0.0.7")
    assert driver._release("1") == (
        "node 1 (10.0.0.7) may be used again: "
        "rlplace replace runs/job/now cluster.component_placement.env=4-7"
    )
    assert driver.drained == {}
    assert [event["event"] for event in driver.nodes] == ["released"]


def test_a_node_without_a_machine_stays_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress = Progress(measures=SIMULATED, began=0.0)
    driver = a_driver(monkeypatch, [at(0, job("").plan, progress)])
    machines(driver, None)
    with pytest.raises(ConfigError) as refused:
        driver._release("10.0.0.2")
    assert "no machine is there for the node" in str(refused.value)
    assert list(driver.drained) == [1]


def test_a_machine_that_joins_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = _Driver._look_for_machines
    progress = Progress(measures=SIMULATED, began=0.0)
    driver = a_driver(monkeypatch, [at(0, job("").plan, progress)])
    machines(driver, None, ("10.0.0.7",))
    for _ in range(2):
        driver.looked_s = -1000.0
        looks(driver)
    told = "machine 10.0.0.7 has joined: rlplace drain runs/job/now 1 --release"
    assert capsys.readouterr().out.count(told) == 1
    assert [event["event"] for event in driver.nodes] == ["joined"]
