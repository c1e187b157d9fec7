"""What a run keeps of a job that was given in Python: a name by which commands find it again."""

from __future__ import annotations

import sys
import types

import pytest

from rlplace import Job, Stage, Worker, full
from rlplace.contract.registry import named_job, saved_mapping


class Probe(Worker):
    def work(self, iteration: int) -> None:
        """Do nothing."""


def test_a_job_of_a_module_is_found_by_the_name_that_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(
        components={"probe": Probe}, stages=[Stage("s", full("probe").calls("work"))]
    )
    module = types.ModuleType("a_job_of_a_test")
    module.__dict__["probing"] = job
    monkeypatch.setitem(sys.modules, module.__name__, module)
    saved = saved_mapping({"job": job, "runner": {}})
    assert saved == {"job": "a_job_of_a_test:probing", "runner": {}}
    assert named_job(saved, {}) is job


def test_the_last_line_of_a_custom_run_offers_no_command_that_it_cannot_take() -> None:
    from pathlib import Path

    job = Job(
        components={"probe": Probe}, stages=[Stage("s", full("probe").calls("work"))]
    )
    assert job.last_line(Path("runs/a b")) == "go on      resume='runs/a b'"
