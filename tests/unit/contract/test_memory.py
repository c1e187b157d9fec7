"""What is known of the memory of a custom job: declared, measured, or said to be unknown."""

from __future__ import annotations

import json
from typing import Any

from rlplace import Job, Stage, Worker, full
from rlplace.config.open_job import JOB
from rlplace.execution.memory_monitor import MemoryMonitor
from rlplace.placement.memory.ledger import Measurements
from rlplace.placement.memory.records import (
    ledger_record,
    read_measurements,
    record_measurements,
)
from rlplace.placement.schedule import Residency
from rlplace.placement.show.explain import explain_component
from rlplace.placement.show.text import render_text
from rlplace.report.summary import compare_memory, summary_text
from rlplace.runtime.prepare import Prepared, prepare
from rlplace.workers.worker import MoveReport

GIB = 1 << 30


class Plain(Worker):
    """Works."""

    def work(self) -> None: ...


def prepared(measured: Measurements | None = None, **blocks: Any) -> Prepared:
    job = Job(
        components={"actor": Plain, "rollout": Plain, "replay": Plain},
        stages=[
            Stage("play", full("rollout").calls("work"), full("replay").calls("work")),
            Stage("learn", full("actor").calls("work")),
        ],
    )
    cluster = {
        "nodes": [{"accelerators": 1, "memory": "24GiB", "host_memory": "100GiB"}],
        "accelerator": {"kind": "emulated"},
        "component_placement": {"actor": "0", "rollout": "0", "replay": "cpu"},
    }
    leaving: dict[str, Any] = {"enable_offload": True}
    mapping = {
        "cluster": cluster,
        "actor": leaving,
        "rollout": leaving,
        JOB: job,
        **blocks,
    }
    return prepare(mapping, measured=measured)


def test_a_declared_host_counts_by_itself() -> None:
    found = prepared(replay={"memory": {"host": "400GiB"}})
    assert found.refused
    (shortage,) = found.view.shortages
    assert "400 GiB" in shortage.render()
    text = render_text(found.view)
    assert "memory: not known" in text
    assert "replay as declared 400 GiB" in text


def test_a_component_whose_host_alone_is_declared_is_unknown_on_its_accelerators() -> (
    None
):
    found = prepared(actor={"enable_offload": True, "memory": {"host": "1GiB"}})
    ledger = found.case.ledger()
    assert "actor" in ledger.uncounted
    assert ledger.host_bytes("actor", Residency.FULL) == GIB
    # What it holds on accelerators is no excess over a prediction.
    told: list[object] = []
    monitor = MemoryMonitor(found.case, tell=told.append)
    report = MoveReport(
        residency=Residency.FULL, accelerator_bytes=2 * GIB, host_bytes=0
    )
    monitor.moved("actor", [report])
    assert not told


def test_what_was_measured_on_accelerators_is_on_the_host_while_it_is_off_them() -> (
    None
):
    measured = {
        "actor": {Residency.OFF: 0, Residency.FULL: 8 * GIB},
        "rollout": {Residency.OFF: 0, Residency.FULL: 2 * GIB},
    }
    found = prepared(measured)
    (host,) = found.case.ledger().hosts
    assert host.worst.of("actor") == 8 * GIB
    assert host.worst.moment.stage == "play"
    assert "replay.memory.host: <bytes>" in " ".join(found.case.ledger().notes)


def planned_with(then: int, now: int) -> Prepared:
    """A plan with `now` ranks of the actor, which was measured with `then`."""
    sizes = {
        "actor": {Residency.OFF: 0, Residency.FULL: 8 * GIB},
        "rollout": {Residency.OFF: 0, Residency.FULL: 2 * GIB},
    }
    ranks = {"actor": then, "rollout": 1}
    record = json.loads(json.dumps(record_measurements(sizes, ranks)))
    cluster = {
        "nodes": [{"accelerators": 4, "memory": "24GiB", "host_memory": "100GiB"}],
        "accelerator": {"kind": "emulated"},
        "component_placement": {
            "actor": f"0-{now - 1}",
            "rollout": "0",
            "replay": "cpu",
        },
    }
    return prepared(read_measurements(record), cluster=cluster)


def test_memory_measured_with_fewer_ranks_proves_with_a_caveat() -> None:
    found = planned_with(2, 4)
    ledger = found.case.ledger()
    caveat = "measured with 2 ranks, planned with 4: what a rank holds may differ"
    assert ledger.caveats == {"actor": caveat}
    assert ledger.measured == ("actor", "rollout")
    assert "actor" not in ledger.uncounted
    text = " ".join(render_text(found.view).split())
    assert f"actor: {caveat}" in text
    assert caveat in explain_component(found.view, "actor")
    assert "measured with" not in explain_component(found.view, "rollout")
    assert ledger_record(ledger)["caveats"] == {"actor": caveat}


def test_memory_measured_with_more_ranks_proves_nothing() -> None:
    found = planned_with(4, 2)
    ledger = found.case.ledger()
    assert ledger.uncounted == ("actor", "replay")
    assert ledger.measured == ("rollout",)
    note = "actor: measured with 4 ranks, planned with 2: a rank may hold more"
    assert note in " ".join(render_text(found.view).split())
    assert note in explain_component(found.view, "actor")


def test_memory_measured_with_the_same_ranks_needs_no_caveat() -> None:
    assert not planned_with(2, 2).case.ledger().caveats
    # Files of earlier versions do not say how many ranks there were.
    record = {"rlplace_memory": 1, "components": {"actor": {"full": GIB}}}
    assert not prepared(read_measurements(record)).case.ledger().caveats


def test_a_summary_says_which_memory_was_not_known() -> None:
    found = prepared(rollout={"enable_offload": True, "memory": {"full": "1GiB"}})
    held = {
        "actor": {Residency.FULL: 3 * GIB},
        "rollout": {Residency.FULL: GIB},
        "replay": {Residency.FULL: 0},
    }
    compared = compare_memory(found.case.ledger(), held)
    assert compared["actor"]["full"] == {"predicted": None, "measured": 3 * GIB}
    report = {
        "steps_name": "iterations",
        "score_name": "",
        "iterations": 1,
        "iterations_per_s": 1.0,
        "return_first": None,
        "return_last": None,
        "seconds": {},
        "wall_s": 1.0,
        "start_s": 1.0,
        "train_s": 1.0,
        "overhead_share": 0.0,
        "folder": "runs/x",
        "memory": compared,
    }
    text = summary_text(report)
    assert "actor: full 3 GiB (not known)" in text
    assert "rollout: full 1 GiB (1 GiB)" in text
    assert "replay" not in text
