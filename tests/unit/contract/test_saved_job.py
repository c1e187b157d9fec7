"""What a run keeps of a job that was given in Python: a name by which commands find it again."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from rlplace import Job, Stage, Worker, full
from rlplace.contract.registry import named_job, saved_mapping
from rlplace.errors import ConfigError


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


def test_the_last_line_of_a_custom_run_offers_no_command_that_it_cannot_take(
    tmp_path: Path,
) -> None:
    job = Job(
        components={"probe": Probe}, stages=[Stage("s", full("probe").calls("work"))]
    )
    run = tmp_path / "a b"
    # One that was cut short is none.
    (run / "checkpoints" / "000001.part").mkdir(parents=True)
    assert (
        job.last_line(run)
        == f"files      {run}: there is no checkpoint to continue from"
    )
    (run / "checkpoints" / "000001").mkdir()
    assert job.last_line(run) == f"continue   resume='{run}'"


def test_a_class_that_needs_arguments_is_refused_with_the_way_to_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("a_class_of_a_test")
    module.__dict__["Base"] = Job
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ConfigError) as wrong:
        named_job({"job": "a_class_of_a_test:Base"}, {})
    (problem,) = wrong.value.problems
    assert problem.code == "not-a-job"
    assert problem.fix is not None
    assert "job: a_class_of_a_test:job" in problem.fix


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        (
            "simulatr",
            "no job is called so, did you mean 'simulator'?",
            "job: simulator",
        ),
        ("robot", "no job is called so", "job: my_package.my_module:job"),
        ("no_such_module:job", "cannot be imported", "PYTHONPATH="),
        ("json:dmps", "the module has no dmps, did you mean 'dump", "job: json:dump"),
        ("json:job", "the module has no job", "job: json:<name of a Job>"),
        ("json:dumps", "is no job", "job: <module>:<name of a Job>"),
    ],
)
def test_a_name_that_leads_to_no_job_is_told_with_the_nearest_one(
    name: str, what: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as wrong:
        named_job({"job": name}, {})
    (problem,) = wrong.value.problems
    assert (problem.key, problem.got) == ("job", name)
    assert problem.what.startswith(what)
    assert (problem.fix or "").startswith(fix)
    assert ("did you mean" in problem.what) == ("did you mean" in what)


def test_passwords_of_addresses_are_not_saved() -> None:
    """Neither in lists nor in blocks; the config itself keeps them."""
    mapping = {
        "runner": {"sinks": [{"uri": "postgresql://me:hidden@host/runs"}]},
        "seed": 1,
    }
    saved = saved_mapping(mapping)
    uri = "postgresql://***@host/runs"
    assert saved == {"runner": {"sinks": [{"uri": uri}]}, "seed": 1}
    assert "hidden" in str(mapping)
