"""Variables of the environment in a config: each is text, and the fixes of errors keep them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplace.config import compose
from rlplace.config.from_environment import with_numbers
from rlplace.config.read import read_config
from rlplace.contract.reading import try_job
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


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("runner.total_iterations", "7", 7),
        ("runner.total_iterations", " +7 ", 7),
        ("actor.optimizer.lr", "1e-3", 1e-3),
        ("actor.optimizer.lr", "1", 1),
        ("checkpoint.on_signal", "False", False),
        ("cluster.accelerators_per_node", "4", 4),  # or a word
        ("env.id", "1", "1"),  # a text is due
        ("actor.model.hidden[1]", "32", 32),
    ],
)
def test_a_number_is_read_where_one_is_due(
    key: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("N", text)
    word = f"{key}=${{oc.env:N}}"
    if key.endswith("[1]"):
        word = "actor.model.hidden=[64,${oc.env:N}]"
    (composed,) = compose.with_hydra(["cartpole", word])
    _, wrong = try_job(composed.mapping, composed.sources)
    found = with_numbers(composed.mapping, composed.sources, wrong)
    assert (found is None) == isinstance(value, str)
    if found is not None:
        assert try_job(found, composed.sources)[1] == []
        read: object = found
        for step in key.replace("[1]", "").split("."):
            assert isinstance(read, dict)
            read = read[step]
        assert read == ([64, value] if key.endswith("[1]") else value)


@pytest.mark.parametrize("text", ["many", "0x7", "1_000", "", "7 8"])
def test_other_texts_are_no_numbers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", text)
    (composed,) = compose.with_hydra(
        ["cartpole", "runner.total_iterations=${oc.env:N}"]
    )
    _, wrong = try_job(composed.mapping, composed.sources)
    assert [problem.code for problem in wrong] == ["wrong-type"]
    assert with_numbers(composed.mapping, composed.sources, wrong) is None
