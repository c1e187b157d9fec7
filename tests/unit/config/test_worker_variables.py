"""Environment variables of workers: which are given, which are refused, and that no secret is shown."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.config.worker_variables import (
    _OF_WORKERS,
    exported,
    missing_variables,
    not_given,
    variables_of,
    wrong_variables,
)
from rlplace.contract.registry import job_of


def config(variables: dict[str, Any], **cluster: Any) -> Config:
    placed = {
        "component_placement": {"actor": "0", "env": "1", "rollout": "2"},
        "env_vars": variables,
    }
    return read_config({"cluster": placed | cluster, "env": {"id": "CartPole-v1"}})


def test_values_are_text_and_null_is_the_value_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hidden")
    given = config(
        {
            "HF_HOME": "/data/hf",
            "OMP_NUM_THREADS": 4,
            "SWITCH": True,
            "EMPTY": "",
            "MY_TOKEN": None,
        }
    )
    expected = {
        "HF_HOME": "/data/hf",
        "OMP_NUM_THREADS": "4",
        "SWITCH": "true",
        "EMPTY": "",
        "MY_TOKEN": "hidden",
    }
    assert variables_of(given) == expected
    assert [*wrong_variables(given), *missing_variables(given)] == []


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("A B", "1", "bad-env-var"),
        ("CUDA_VISIBLE_DEVICES", "0", "bad-env-var"),
        ("LIST", [1, 2], "bad-env-var"),
        ("HF_TOKEN", "secret-1", "secret-in-config"),
        ("OPENAI_API_KEY", "secret-1", "secret-in-config"),
        ("db_password", "secret-1", "secret-in-config"),
        ("PGPASSWORD", "secret-1", "secret-in-config"),
        ("WANDB_APIKEY", "secret-1", "secret-in-config"),
        ("GITHUB_PAT", "secret-1", "secret-in-config"),
        ("MYSQL_PWD", "secret-1", "secret-in-config"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/key.json", None),
        (
            "AWS_SECRET_ACCESS_KEY",
            "/secret-1",
            "secret-in-config",
        ),  # base64 may begin so
        ("https_proxy", "http://me:secret-1@proxy:3128", "secret-in-config"),
        ("TOKENIZERS_PARALLELISM", "false", None),
        ("https_proxy", "http://proxy:3128", None),
        ("HF_TOKEN", None, None),
    ],
)
def test_what_cannot_be_given_is_refused_and_secrets_are_not_shown(
    name: str, value: Any, code: str | None
) -> None:
    problems = [*wrong_variables(config({name: value}))]
    assert [problem.code for problem in problems] == ([] if code is None else [code])
    assert not any("secret-1" in problem.render() for problem in problems)


def test_one_that_is_missing_names_where_it_has_to_be_set() -> None:
    (problem,) = missing_variables(config({"NOT_SET_ANYWHERE": None}))
    assert problem.code == "env-var-missing"
    assert problem.key == "cluster.env_vars.NOT_SET_ANYWHERE"
    assert "export NOT_SET_ANYWHERE=..." in str(problem.fix)


def test_keys_of_reward_endpoints_are_given_without_being_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REWARD_KEY", "hidden")
    placed = {"actor": "0", "env": "1", "rollout": "2", "reward": "cpu"}
    text = read_config(
        {
            "cluster": {"component_placement": placed, "num_nodes": 1},
            "algorithm": {"name": "grpo", "prompts": 2},
            "env": {"task": "arithmetic"},
            "rollout": {"engine": "transformers"},
            "actor": {"model": {"kind": "causal_lm", "path": "model"}},
            "reward": {
                "url": "http://localhost:5000/score",
                "api_key_env": "REWARD_KEY",
            },
        }
    )
    named = job_of(text).variables(text)
    assert variables_of(text, named) == {"REWARD_KEY": "hidden"}


def test_what_does_not_reach_workers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in filter(
        _OF_WORKERS.fullmatch, list(os.environ)
    ):  # vLLM sets some where it is imported
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HOME", "/data/hf")
    joined = {"ray": {"address": "auto"}}
    assert not_given(config({})) is None, "a Ray that the run starts inherits them"
    said = not_given(config({}, **joined))
    assert said is not None
    assert "HF_HOME" in said
    assert "cluster.env_vars={HF_HOME: null}" in said
    assert "/data/hf" not in said
    assert not_given(config({"HF_HOME": None}, **joined)) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    said = not_given(config({}))
    assert said is not None
    assert "cluster.env_vars={OMP_NUM_THREADS: null}" in said
    assert not_given(config({"OMP_NUM_THREADS": 8})) is None


def test_variables_of_this_process_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BEFORE", "1")
    with exported({"BEFORE": "2", "NEW_ONE": "3"}):
        assert (os.environ["BEFORE"], os.environ["NEW_ONE"]) == ("2", "3")
    assert os.environ["BEFORE"] == "1"
    assert "NEW_ONE" not in os.environ


@pytest.mark.parametrize(
    ("name", "written"), [("MY_SWITCH", True), ("MY_TOKEN", False)]
)
def test_no_fix_has_a_secret_written(
    name: str, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    (problem,) = missing_variables(config({name: None}))
    assert ("or write the value" in (problem.fix or "")) == written
