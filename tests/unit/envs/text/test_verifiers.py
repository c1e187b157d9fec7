"""Environments of verifiers: with the library where it is installed, else with a stand-in of its interface."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlplace.config.blocks.language_model import TextEnvConfig
from rlplace.envs.registry import make_task
from rlplace.envs.text.contract import Message, NextTurn
from rlplace.errors import ConfigError, Problem
from tests import verifiers_stand_in
from tests.text_stage import TextStage
from tests.tiny_tokenizer import tiny_tokenizer

INSTALLED = importlib.util.find_spec("verifiers") is not None
RECIPES = Path(__file__).parents[4] / "recipes" / "agents"
WRITTEN = """
import verifiers.v1 as vf

class Sum(vf.TaskData):
    right: str

class Task(vf.Task[Sum]):
    @vf.reward(weight=0.75)
    async def right(self, trace) -> float:
        return float(self.data.right == trace.last_reply)

    @vf.reward(weight=0.25)
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply) < 3)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))

class Config(vf.TasksetConfig):
    most: int = 4

class Sums(vf.Taskset[Task, Config]):
    INFINITE = False

    def load(self):
        for a in range(self.config.most):
            yield Task(Sum(prompt=f"{a}+1", system_prompt="Add.", right=f"{a + 1}"), self.config.task)

class Endless(Sums):
    INFINITE = True

__all__ = ["Sums"]
"""


@pytest.fixture(params=["library" if INSTALLED else "stand-in"], autouse=True)
def library(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    if request.param == "stand-in":
        verifiers_stand_in.install(monkeypatch)
    ours = "rlplace.envs.text.verifiers_library"
    for name in (ours, "rlplace_chat", "sums_of_a_test", "verifiers_drawers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "sums_of_a_test.py").write_text(WRITTEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(RECIPES))
    yield
    gc.collect()


def task_of(**kwargs: Any) -> Any:
    config = TextEnvConfig(task="verifiers", kwargs=kwargs)
    return make_task(config, seed=0, split="train")


def problem_of(**kwargs: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        task_of(**kwargs)
    (problem,) = caught.value.problems
    return problem


def test_tasks_are_prompts_and_reward_functions_are_parts_of_the_score() -> None:
    taskset = {"id": "sums_of_a_test", "most": 3}
    task = task_of(environment={"taskset": taskset})
    seen = set()
    for number in range(3):
        right, wrong = task.episodes(number, 2)
        system, asked = right.prompt
        assert (system, asked.role) == (Message("system", "Add."), "user")
        seen.add(asked.text)
        assert right.reply(f"{int(asked.text[0]) + 1}") is None
        assert wrong.reply("no idea") is None
        facts = right.facts()
        assert facts["score"] == 1.0
        assert facts["parts"] == {"right": 1.0, "brief": 1.0}
        assert facts["measures"]["letters"] == 1.0
        facts = wrong.facts()
        assert facts["score"] == 0.0
        assert facts["parts"] == {"right": 0.0, "brief": 0.0}
    assert seen == {"0+1", "1+1", "2+1"}


def test_the_selected_tasks_alone_are_asked() -> None:
    task = task_of(environment="sums_of_a_test", select={"skip": 1, "limit": 2})
    asked = {task.episode(number).prompt[1].text for number in range(4)}
    assert asked == {"1+1", "2+1"}


def test_turns_go_on_from_the_answers_that_were_sampled() -> None:
    task = task_of(environment="verifiers_drawers", select={"limit": 1})
    episode = task.episode(0)
    assert episode.prompt == (Message("user", "day 0"),)
    empty = (Message("user", "empty"),)
    assert episode.reply(" 5") == NextTurn(messages=empty, after=0)
    assert episode.reply("it is 3") is None
    facts = episode.facts()
    assert facts["parts"] == {"found": 1.0, "quick": pytest.approx(2 / 3)}
    assert facts["score"] == pytest.approx(0.9)


def test_an_episode_that_is_cut_off_is_scored_with_what_was_said() -> None:
    episode = task_of(environment="verifiers_drawers").episode(0)
    assert episode.reply("5") is not None
    episode.end("max_turns")
    assert episode.facts()["score"] == 0.0
    assert episode.facts()["measures"]["guesses"] == 1.0


def test_the_parts_are_metrics_of_the_run(tmp_path: Path) -> None:
    env: Mapping[str, Any] = {
        "kind": "text",
        "task": "verifiers",
        "kwargs": {"environment": "verifiers_drawers", "select": {"limit": 1}},
        "max_turns": 3,
    }
    folder = tiny_tokenizer(tmp_path / "model")
    with TextStage(folder, lambda request, sample: "3<eos>", env=env) as stage:
        (metrics,) = stage.run()
    assert metrics["env/reward"].value == pytest.approx(1.0)
    assert metrics["env/part/found"].value == 1.0
    assert metrics["env/part/quick"].value == 1.0


def test_what_cannot_be_loaded_is_refused() -> None:
    assert "no_such_taskset" in f"{problem_of(environment='no_such_taskset').why}"
    taskset = {"id": "sums_of_a_test", "most": "many"}
    assert "most" in f"{problem_of(environment={'taskset': taskset}).why}"
    problem = problem_of(environment="sums_of_a_test", select={"skip": 4})
    assert "no task is selected" in f"{problem.why}"
    problem = problem_of(environment="sums_of_a_test", select={"limits": 4})
    assert problem.code == "bad-task-kwargs"


def test_tasks_without_an_end_need_a_limit(tmp_path: Path) -> None:
    written = WRITTEN.replace('["Sums"]', '["Endless"]')
    (tmp_path / "sums_of_a_test.py").write_text(written)
    problem = problem_of(environment="sums_of_a_test")
    assert "limit" in f"{problem.why}"
    task = task_of(environment="sums_of_a_test", select={"limit": 2})
    assert task.episode(0).prompt[1].text in {"0+1", "1+1"}


def test_without_the_library_its_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "verifiers.v1", raising=False)
    problem = problem_of(environment="sums_of_a_test")
    assert problem.code == "missing-library"
    assert "verifiers" in f"{problem.fix}"
