"""What would stop a judge after the workers have started is said before."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rlplace.config import CriticConfig
from rlplace.models.reward_head import reward_head_problem
from rlplace.workers.roles.scorer_text import check_scorers
from tests.judge_ranks import JudgeScenario
from tests.tiny_lm import tiny_model, tiny_reward_model
from tests.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Path:
    return tiny_reward_model(tmp_path_factory.mktemp("scorer"), like=policy, head="value_head")


def problems(policy: Path, component: str, block: Mapping[str, object], **env: object) -> list[tuple[str, str]]:
    job = JudgeScenario(model=policy, component=component, block=block, env=env).job
    return [(p.code, p.key) for p in check_scorers(job.config, job.components)]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"function": "math_answer"}, []),
        ({"function": "math_anwser"}, [("unknown-reward", "reward.function")]),
        ({"function": "exact_match", "kwargs": {"cse": 1}}, [("bad-reward-kwargs", "reward.kwargs.cse")]),
        ({"url": "http://localhost:5000/get_reward"}, []),
        ({"url": "localhost:5000"}, [("bad-reward-url", "reward.url")]),
        ({"url": "http://host/", "api_key_env": "NOT_SET_ANYWHERE"}, [("no-api-key", "reward.api_key_env")]),
        ({}, [("reward-head", "reward.model")]),  # the policy itself scores nothing
    ],
)
def test_rewards(policy: Path, block: Mapping[str, object], expected: list[tuple[str, str]]) -> None:
    assert problems(policy, "reward", block) == expected


def test_a_reward_model_with_a_usual_head(policy: Path, scorer: Path) -> None:
    assert problems(policy, "reward", {"model": {"path": str(scorer)}}) == []
    wrong = problems(policy, "reward", {"model": {"path": str(scorer)}, "head": "worth"})
    assert wrong == [("reward-head", "reward.head")]


def test_the_fix_names_the_head_that_is_there(scorer: Path) -> None:
    problem = reward_head_problem(scorer, "reward.math", "worth")
    assert problem is not None
    assert (problem.key, problem.fix) == ("reward.math.head", "head: value_head")


@pytest.mark.parametrize(("rows", "bias", "says"), [(3, False, "3 classes"), (1, True, "would be left out")])
def test_a_head_that_does_not_give_one_number(scorer: Path, tmp_path: Path, rows: int, bias: bool, says: str) -> None:
    shutil.copytree(scorer, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["value_head.weight"] = weights["value_head.weight"].repeat(rows, 1)
    if bias:
        weights["value_head.bias"] = weights["value_head.weight"][:, 0].clone()
    save_file(weights, tmp_path / "model.safetensors")
    problem = reward_head_problem(tmp_path, "reward")
    assert problem is not None
    assert says in str(problem.why)


def test_a_reward_model_of_other_tokens_needs_a_chat_template(policy: Path, scorer: Path, tmp_path: Path) -> None:
    shutil.copytree(scorer, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    tiny_tokenizer(tmp_path, chat=None)
    block = {"model": {"path": str(tmp_path)}}
    assert problems(policy, "reward", block) == [("no-chat-template", "reward.model.path")]
    assert problems(policy, "reward", block, chat=False) == []


def test_a_reference_reads_the_tokens_of_the_policy(policy: Path, scorer: Path, tmp_path: Path) -> None:
    other = tiny_tokenizer(tmp_path)
    assert problems(policy, "reference", {"model": {"path": str(scorer)}}) == []
    assert problems(policy, "reference", {"model": {"path": str(other)}}) == [
        ("other-tokenizer", "reference.model.path")
    ]


def test_a_critic_reads_them_too(policy: Path, scorer: Path, tmp_path: Path) -> None:
    job = JudgeScenario(model=policy, component="reference", block={}).job

    def said_of(folder: Path) -> list[tuple[str, str]]:
        config = replace(job.config, critic=CriticConfig(model={"path": str(folder)}))
        return [(p.code, p.key) for p in check_scorers(config, ["actor", "critic"])]

    assert said_of(scorer) == []
    assert said_of(tiny_tokenizer(tmp_path)) == [("other-tokenizer", "critic.model.path")]
