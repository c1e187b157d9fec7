"""Configs as a task in a placement: `task=hopper placement=hybrid`, and a task's name in the place of a config's."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

import rlplace
from rlplace.cli import plan, train
from rlplace.config.compose import (
    CONFIG_DIR,
    PLACEMENT,
    TASK,
    Composed,
    config_names,
    group_names,
    with_hydra,
)
from rlplace.config.validate import config_schema
from rlplace.errors import ConfigError, Problem
from rlplace.runtime.prepare import prepare_composed

TASKS = sorted(group_names(TASK))
PLACEMENTS = sorted(group_names(PLACEMENT))


def one(*words: str) -> Composed:
    (job,) = with_hydra(words)
    return job


def refused(*words: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        with_hydra(words)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_planned_in_every_placement(task: str, placement: str) -> None:
    job = one(f"task={task}", f"placement={placement}")
    prepared = prepare_composed(job)
    assert not prepared.refused
    assert job.name == task
    # The goal of another environment has gone
    assert job.mapping["runner"]["stop_at_return"] is None


@pytest.mark.parametrize("group", [TASK, PLACEMENT])
def test_every_file_of_a_group_is_valid_and_says_what_it_is(group: str) -> None:
    validator = jsonschema.Draft202012Validator(config_schema())
    for name, about in group_names(group).items():
        text = (CONFIG_DIR / group / f"{name}.yaml").read_text(encoding="utf-8")
        assert text.startswith("# @package _global_\n# ")
        assert about
        assert "@" not in about
        errors = [e.message for e in validator.iter_errors(yaml.safe_load(text))]
        assert errors == []


def test_the_name_of_a_task_stands_in_the_place_of_a_config() -> None:
    named = one("hopper", "placement=hybrid")
    assert named.mapping == one("task=hopper", "placement=hybrid").mapping
    assert named.mapping == one("ppo", "task=hopper", "placement=hybrid").mapping
    assert named.mapping == one("--config-name", "hopper", "placement=hybrid").mapping
    # The words that compose the config compose it again
    assert one(*named.words).mapping == named.mapping
    assert rlplace.plan("hopper", ["placement=hybrid"]).view.name == "hopper"


def test_a_config_of_the_same_name_comes_before_the_task(tmp_path: Path) -> None:
    (tmp_path / "hopper.yaml").write_text("defaults: [cartpole, _self_]\n", "utf-8")
    job = one("--config-dir", str(tmp_path), "hopper")
    assert job.mapping["env"]["id"] == "CartPole-v1"


def test_a_task_of_ones_own_is_a_file_in_the_folder_task(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text(
        "# @package _global_\n# Mine.\nenv: {id: Acrobot-v1}\n", "utf-8"
    )
    job = one("--config-dir", str(tmp_path), "mine", "placement=hybrid")
    assert job.mapping["env"]["id"] == "Acrobot-v1"
    assert job.name == "mine"
    assert "hybrid" in prepare_composed(job).text


def test_another_config_takes_a_task_and_a_placement() -> None:
    job = one("hybrid_ppo", "task=swimmer")
    assert job.mapping["env"]["id"] == "Swimmer-v5"
    assert job.mapping["cluster"]["component_placement"]["rollout"] == "part 2/2 of 8"
    # Nothing but the placement
    moved = one("cartpole_memory", "placement=collocated")
    assert moved.mapping["cluster"]["component_placement"]["env"] == "all of 8"
    assert moved.mapping["env"]["id"] == "CartPole-v1"
    assert moved.mapping["env"]["wrappers"]


def test_a_value_has_the_line_of_the_file_that_sets_it(tmp_path: Path) -> None:
    job = one("hopper", "placement=hybrid")
    assert "task/hopper.yaml" in str(job.sources["env.id"])
    assert "placement/hybrid.yaml" in str(
        job.sources["cluster.component_placement.env"]
    )
    assert "hybrid_ppo.yaml" in str(job.sources["runner.watchdog_s"])
    # One that the command line adds to another config
    added = one("hybrid_ppo", "task=swimmer", "algorithm.gamma=0.5")
    assert "task/swimmer.yaml" in str(added.sources["algorithm.gae_lambda"])
    assert "command line" in str(added.sources["algorithm.gamma"])
    # A config of one's own that changes a task
    (tmp_path / "mine.yaml").write_text(
        "defaults: [hybrid_ppo, /task: hopper, _self_]\nalgorithm: {gamma: 0.5}\n",
        "utf-8",
    )
    mine = one("--config-dir", str(tmp_path), "mine")
    assert "mine.yaml" in str(mine.sources["algorithm.gamma"])
    assert mine.mapping["algorithm"]["gamma"] == 0.5
    assert mine.mapping["env"]["id"] == "Hopper-v5"


def test_a_sweep_takes_several_tasks() -> None:
    jobs = with_hydra(["-m", "ppo", "task=hopper,ant"])
    assert [job.name for job in jobs] == ["hopper", "ant"]
    assert [job.mapping["env"]["id"] for job in jobs] == ["Hopper-v5", "Ant-v5"]


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("hoper", "hopper"),
        ("walker", "walker2d"),
        ("Walker2d-v5", "walker2d"),
        ("invertedpendulum", "inverted_pendulum"),
        ("half_cheetah", "halfcheetah"),
    ],
)
def test_a_wrong_task_gets_the_nearest(word: str, near: str) -> None:
    problem = refused(f"task={word}")
    assert problem.code == "undeclared-task"
    assert (problem.fix or "").startswith(f"task={near} ")
    named = refused(word)
    assert (named.code, named.fix) == ("unknown-config", near)


@pytest.mark.parametrize("words", [(), ("quite_another",)])
def test_where_no_config_is_meant_the_tasks_are_listed_too(
    words: tuple[str, ...],
) -> None:
    assert ", ".join(TASKS) in (refused(*words).why or "")


def test_a_wrong_placement_gets_the_nearest() -> None:
    problem = refused("hopper", "placement=colocated")
    assert problem.code == "unknown-placement"
    assert (problem.fix or "").startswith("placement=collocated ")


def test_help_lists_tasks_and_placements(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (train, plan):
        assert command.main(["--help"]) == 0
        text = capsys.readouterr().out
        for names in (config_names(), group_names(TASK), group_names(PLACEMENT)):
            assert [name for name in names if f"    {name} " not in text] == []


def test_a_task_trains(tmp_path: Path) -> None:
    run = rlplace.train(
        "acrobot",
        {
            "runner.total_iterations": 1,
            "algorithm.rollout_steps": 8,
            "runner.output_dir": str(tmp_path),
        },
    )
    assert run.summary["env_steps"] == 128
    assert run.folder.parent == tmp_path / "acrobot"
