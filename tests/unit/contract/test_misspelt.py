"""Misspelt keys of a config of one's own job, and names of jobs: each is told with what was meant."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from rlplace import Job, Stage, Worker, full
from rlplace.contract.reading import try_job
from rlplace.errors import ConfigError


class Probe(Worker):
    def work(self, iteration: int) -> None:
        """Do nothing."""


JOB = Job(
    components={"probe": Probe}, stages=[Stage("work", full("probe").calls("work"))]
)
CLUSTER = {"accelerators_per_node": 1, "component_placement": {"probe": "0"}}


def fixes(mapping: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    _, problems = try_job({"cluster": CLUSTER, **mapping}, {})
    return [(problem.key, problem.fix) for problem in problems]


def test_a_misspelt_key_of_the_engine_in_a_block_of_a_component() -> None:
    given = {"job": JOB, "probe": {"enable_ofload": True, "rate": 3}}
    assert fixes(given) == [("probe.enable_ofload", "enable_offload: true")]


def test_a_misspelt_block_of_a_component_or_of_the_engine() -> None:
    assert fixes({"job": JOB, "prob": {"rate": 3}}) == [("prob", "probe: {rate: 3}")]
    assert fixes({"job": JOB, "runer": {"total_iterations": 3}}) == [
        ("runer", "runner: {total_iterations: 3}")
    ]


def test_blocks_with_other_names_are_the_users() -> None:
    assert fixes({"job": JOB, "optimizer": {"rate": 3}}) == []


def test_a_misspelt_key_job_is_the_only_problem() -> None:
    assert fixes({"jobb": "my_job:job", "probe": {"rate": 3}}) == [
        ("jobb", "job: my_job:job")
    ]


def test_a_misspelt_name_is_compared_with_jobs_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("a_module_with_a_job")
    vars(module).update(Job=Job, job=JOB)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ConfigError) as wrong:
        try_job({"job": "a_module_with_a_job:jbo"}, {})
    assert wrong.value.problems[0].fix == "job: a_module_with_a_job:job"
