"""Variables of the environment in a config: each is text, and the fixes of errors keep them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplace.config import compose
from rlplace.config.read import read_config
from rlplace.errors import ConfigError, Problem

MINE = """
defaults: [hybrid_ppo_cartpole, _self_]
runner: {total_iterations: "${oc.env:N}"}
"""


def problem_of(*words: str) -> Problem:
    def read() -> None:
        (composed,) = compose.with_hydra([*words])
        read_config(composed.mapping, composed.sources)

    with pytest.raises(ConfigError) as raised:
        read()
    (problem,) = raised.value.problems
    return problem


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE, encoding="utf-8")
    return str(file)


def test_a_number_from_the_environment_keeps_its_variable(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("N", "7")
    assert problem_of(mine).fix == "total_iterations: ${oc.decode:${oc.env:N}}"
    Path(mine).write_text(
        MINE.replace("${oc.env:N}", "${oc.decode:${oc.env:N}}"), encoding="utf-8"
    )
    (composed,) = compose.with_hydra([mine])
    assert read_config(composed.mapping, composed.sources).runner.total_iterations == 7


def test_a_switch_with_a_default_keeps_both(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("N", "7")
    text = (
        MINE.replace("${oc.env:N}", "${oc.decode:${oc.env:N}}")
        + 'checkpoint: {on_signal: "${oc.env:SAVES,true}"}\n'
    )
    Path(mine).write_text(text, encoding="utf-8")
    assert problem_of(mine).fix == "on_signal: ${oc.decode:${oc.env:SAVES,true}}"


def test_an_override_keeps_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", "7")
    problem = problem_of("cartpole", "runner.total_iterations=${oc.env:N}")
    assert problem.pasted == "'runner.total_iterations=\"${oc.decode:${oc.env:N}}\"'"
    (composed,) = compose.with_hydra(
        ["cartpole", 'runner.total_iterations="${oc.decode:${oc.env:N}}"']
    )
    assert composed.mapping["runner"]["total_iterations"] == 7


def test_a_variable_that_does_not_fit_is_named(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("N", "many")
    assert (
        problem_of(mine).fix
        == "export N=<such a value>        (with total_iterations: ${oc.decode:${oc.env:N}})"
    )


def test_a_variable_that_is_not_set_is_named(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("N", raising=False)
    problem = problem_of(mine)
    assert problem.what == "the environment has no N"
    assert (
        problem.fix
        == "export N=<a value>        (or total_iterations: ${oc.env:N,<a default>})"
    )
