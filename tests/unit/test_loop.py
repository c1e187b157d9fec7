"""The order of an iteration, with and without held-out prompts, over groups that only write down what they are told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

from rlplace.config import ClusterConfig
from rlplace.loop import Loop
from rlplace.metrics import Metric
from rlplace.placement import Topology
from rlplace.placement.layout import make_layout
from rlplace.placement.needs import rlhf_needs
from rlplace.placement.schedule import Residency
from rlplace.workers.group import Pending, WorkerGroup
from rlplace.workers.worker import MoveReport

COMPONENTS = ("actor", "rollout", "env")


class Group:
    """One rank whose calls have all ended."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def __getattr__(self, method: str) -> Callable[..., Pending]:
        def call(*args: object) -> Pending:
            told = args[0].word if isinstance(args[0], Residency) else method
            self._log.append(f"{self._name} {told}")
            future: Future[Any] = Future()
            numbers = {f"{'eval' if method == 'evaluate' else self._name}/{method}": Metric(1.0)}
            moved = MoveReport(residency=Residency.OFF, accelerator_bytes=1, host_bytes=0, seconds=0.0)
            future.set_result(moved if method == "move" else numbers)
            return Pending(cast(WorkerGroup, self), method, {0: future})

        return call


def loop() -> tuple[Loop, list[str]]:
    """Of a job whose components take turns on one accelerator."""
    cluster = ClusterConfig(component_placement=dict.fromkeys(COMPONENTS, "0"))
    layout = make_layout(
        cluster, Topology.uniform(1, 1, "emulated", 1 << 30), needs=rlhf_needs(COMPONENTS), offload=COMPONENTS
    )
    log: list[str] = []
    groups = {name: cast(WorkerGroup, Group(name, log)) for name in COMPONENTS}
    return Loop(layout.schedule, groups, stage_timeout_s=1.0), log


def test_an_iteration_goes_through_its_stages() -> None:
    made, log = loop()
    numbers = made.iteration(0)
    assert [told for told in log if told.split()[1] not in ("off", "weights", "full")] == [
        "actor push_weights",
        "rollout pull_weights",
        "env run",
        "rollout generate",
        "actor learn",
    ]
    assert made.version == numbers["policy/version"] == 1
    assert "time/evaluate_s" not in numbers


def test_held_out_prompts_come_first_and_what_generating_them_took_is_not_counted() -> None:
    made, log = loop()
    numbers = made.iteration(0, evaluate=True)
    assert log.index("env evaluate") < log.index("env run")
    assert log.count("rollout generate") == 2
    assert (numbers["eval/evaluate"], numbers["rollout/generate"]) == (1.0, 1.0)
    assert {"time/evaluate_s", "time/rollout_s", "time/learn_s"} <= set(numbers)


def test_an_evaluation_learns_nothing_and_leaves_everything_where_learning_did() -> None:
    made, log = loop()
    made.iteration(0)
    before = [told for told in log if told.startswith("actor")][-2]  # before it learned
    log.clear()
    numbers = made.evaluate(1)
    assert before == "actor full"
    assert [told for told in log if told.startswith("actor")][-1] == "actor full"
    assert [told for told in log if told.startswith("rollout")][-1] == "rollout off"
    assert not {"env run", "actor learn"} & set(log)
    assert "rollout/generate" not in numbers
    assert made.version == 1
