"""The config of a job: its kinds, what a run requires, defaults, all problems at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from rlplace.config.blocks.training import AlgorithmConfig
from rlplace.config.found import Found
from rlplace.config.read import read_config
from rlplace.config.which_job import find_job
from rlplace.errors import ConfigError, Source

RUNS: dict[str, Any] = {
    "cluster": {"component_placement": {"actor": 0, "env": 0, "rollout": 0}},
    "algorithm": {"name": "grpo", "prompts": 4},
    "env": {"task": "arithmetic"},
    "actor": {"model": {"path": "somewhere"}},
}


def test_a_run_says_what_is_asked_of_whom_and_how_often() -> None:
    config = read_config(RUNS)
    assert (config.env.task, config.algorithm.prompts, config.model_path) == (
        "arithmetic",
        4,
        "somewhere",
    )
    mapping = {"cluster": RUNS["cluster"], "algorithm": {"name": "grpo"}}
    with pytest.raises(ConfigError) as caught:
        read_config(
            mapping,
            {
                "algorithm.name": Source(file="a.yaml", line=3),
                "algorithm": Source(file="a.yaml"),
            },
        )
    assert {p.key: p.code for p in caught.value.problems} == dict.fromkeys(
        ("algorithm.prompts", "env.task", "actor.model"), "missing-key"
    )
    assert str(caught.value.problems[0].source) == "a.yaml"
    unnamed = read_config({**RUNS, "actor": {}})  # its placement can be planned
    assert (unnamed.runs, [*unnamed.missing]) == (False, ["actor.model"])


def test_an_engine_of_ones_own_is_of_a_language_model() -> None:
    config = read_config(
        {**RUNS, "rollout": {"engine": "engines:Mine", "engine_args": {"url": "x"}}}
    )
    assert (config.job, config.rollout.own, config.rollout.engine) == (
        "language_model",
        True,
        "engines:Mine",
    )
    for engine in ("engines.Mine", "vllm:", "engine:"):
        with pytest.raises(ConfigError) as caught:
            read_config({**RUNS, "rollout": {"engine": engine}})
        assert [p.key for p in caught.value.problems] == ["rollout.engine"]


def test_engines_of_language_models_have_time_to_compile_and_to_capture_graphs() -> (
    None
):
    small = {
        "cluster": {"component_placement": {"actor": 0, "env": 0, "rollout": 0}},
        "env": {"id": "CartPole-v1"},
    }
    assert [
        read_config(each).cluster.ray.start_timeout_s for each in (RUNS, small)
    ] == [1800, 120]


def test_all_problems_are_raised_at_once_with_their_places() -> None:
    placement = {
        "actor": "0-7",
        "env": ["0-1", "4-5"],
        "rollout": 3,
        "critic,reference": "all",
    }
    right = {
        "cluster": {"component_placement": placement},
        "env": {"id": "CartPole-v1"},
    }
    assert read_config(right).cluster.component_placement == placement  # verbatim
    wrong = {
        **right,
        "algorithm": {"gama": 0.98, "epochs": 0},
        "runner": {"sinks": ["console", "comet"]},
    }
    del wrong["cluster"]
    with pytest.raises(ConfigError) as caught:
        read_config(wrong, {"algorithm.gama": Source(file="mine.yaml", line=12)})
    assert {p.key: p.code for p in caught.value.problems} == {
        "cluster.component_placement": "missing-key",
        "algorithm.gama": "unknown-key",
        "algorithm.epochs": "out-of-bounds",
        "runner.sinks[1]": "unknown-choice",
    }
    assert "mine.yaml:12" in str(caught.value)


def test_every_default_obeys_its_own_bounds() -> None:
    """Writing all defaults out reads back as the same config."""
    language = {"env": {"kind": "text"}, "actor": {"model": {"path": "somewhere"}}}
    for block in ({"env": {"id": "CartPole-v1"}}, language):
        config = read_config({"cluster": RUNS["cluster"], **block})
        assert read_config(dataclasses.asdict(config)) == config


@pytest.mark.parametrize(
    ("written", "job"),
    [
        ({}, "simulator"),
        ({"algorithm": {"name": "ppo"}}, "simulator"),
        ({"algorithm": {"name": "grpo"}}, "language_model"),
        ({"env": {"kind": "text"}}, "language_model"),
        ({"env": {"kind": "mine.simulators:Mine"}}, "simulator"),
        ({"rollout": {"engine": "vllm"}}, "language_model"),
        ({"rollout": {"engine": "torch"}, "algorithm": {"name": "grpo"}}, "simulator"),
        ({"actor": {"model": {"kind": "mlp"}}}, "simulator"),
        ({"actor": {"model": {"kind": "causal_lm"}}}, "language_model"),
        ({"actor": {"model": {"path": "somewhere"}}}, "language_model"),
        ({"actor": {"model": {"hidden": [8]}}}, "simulator"),
    ],
)
def test_the_tags_decide_which_job_it_is(written: dict[str, Any], job: str) -> None:
    assert find_job(written, Found(sources={})) == job


@pytest.mark.parametrize(
    ("written", "key", "why"),
    [
        (
            {"env": {"id": "CartPole-v1"}, "rollout": {"temperature": 0.5}},
            "rollout.temperature",
            "only in jobs on language models; this one is on simulators",
        ),
        (
            {**RUNS, "env": {"task": "arithmetic", "id": "CartPole-v1"}},
            "env.id",
            "only in jobs on simulators; this one is on language models",
        ),
        (
            {
                **RUNS,
                "env": {"kind": "text", "task": "arithmetic"},
                "rollout": {"engine": "torch"},
            },
            "rollout.engine",
            "it is for jobs on simulators; this one is on language models",
        ),
        (
            {"env": {"kind": "gymnasium", "id": "A-v0"}, "algorithm": {"name": "grpo"}},
            "algorithm.name",
            "grpo compares answers of a language model; choices: ppo",
        ),
    ],
)
def test_keys_of_the_other_job_are_explained_by_what_jobs_are_on(
    written: dict[str, Any], key: str, why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"cluster": RUNS["cluster"], **written})
    assert [(p.key, p.code, p.why) for p in caught.value.problems] == [
        (key, "wrong-kind", why)
    ]


@pytest.mark.parametrize(
    ("written", "key", "code", "fix"),
    [
        (
            {"rollout": {"engine": "torch"}},
            "rollout.engine",
            "wrong-kind",
            "engine: vllm",
        ),
        ({"env": {"kind": "gymnasium"}}, "env.kind", "wrong-kind", "kind: text"),
        ({"env": {"kind": "txt"}}, "env.kind", "unknown-choice", "kind: text"),
        ({"env": {"kind": ["text"]}}, "env.kind", "unknown-choice", "kind: text"),
        (
            {"algorithm": {"rollout_steps": 8}},
            "algorithm.rollout_steps",
            "wrong-kind",
            None,
        ),
        ({"env": {"id": "CartPole-v1"}}, "env.id", "wrong-kind", None),
        (
            {"rollout": {"merge_requests": True}},
            "rollout.merge_requests",
            "wrong-kind",
            None,
        ),
        (
            {"critic": {"model": {"kind": "mlp"}}},
            "critic.model.kind",
            "wrong-kind",
            "kind: causal_lm",
        ),
        (
            {"reference": {"model": {"kind": "lm"}}},
            "reference.model.kind",
            "unknown-choice",
            "kind: causal_lm",
        ),
        (
            {"reward": {"a": {"model": {"kind": "mlp"}}}},
            "reward.a.model.kind",
            "wrong-kind",
            "kind: causal_lm",
        ),
        (
            {"algorithm": {"name": "gae"}},
            "algorithm.name",
            "unknown-choice",
            "name: <one of ppo",
        ),
    ],
)
def test_a_key_of_another_kind_is_one_problem(
    written: dict[str, Any], key: str, code: str, fix: str | None
) -> None:
    """A wrong word must not turn the job into another kind, whose keys would all be unknown."""
    base = {
        "cluster": RUNS["cluster"],
        "actor": {"model": {"kind": "causal_lm"}},
        "critic": {"micro_batch": 2},
    }
    with pytest.raises(ConfigError) as caught:
        read_config({**base, **written})
    expected = f"remove {key}" if fix is None else fix
    assert [
        (p.key, p.code, str(p.fix).partition(",")[0]) for p in caught.value.problems
    ] == [(key, code, expected)]


@pytest.mark.parametrize(
    ("block", "key"),
    [("env", "task"), ("rollout", "temperature"), ("algorithm", "kl_coef")],
)
def test_a_key_of_a_language_model_is_none_of_a_simulator_job(
    block: str, key: str
) -> None:
    base: dict[str, Any] = {"cluster": RUNS["cluster"], "env": {"id": "CartPole-v1"}}
    with pytest.raises(ConfigError) as caught:
        read_config({**base, block: {**base.get(block, {}), key: 0.5}})
    assert [(p.key, p.code) for p in caught.value.problems] == [
        (f"{block}.{key}", "wrong-kind")
    ]


@pytest.mark.parametrize(
    ("written", "mean", "high", "mixed"),
    [
        ({"name": "ppo"}, "token", 0.2, False),
        ({"name": "grpo"}, "sequence", 0.2, False),
        ({"name": "dr_grpo"}, "constant", 0.2, False),
        ({"name": "rloo", "clip_ratio_low": 0.1}, "sequence", 0.1, False),
        ({"name": "reinforce_pp"}, "token", 0.2, False),
        ({"name": "dapo"}, "token", 0.28, True),
        (
            {
                "name": "dapo",
                "loss": "sequence",
                "clip_ratio_high": 0.3,
                "dynamic_sampling": False,
            },
            "sequence",
            0.3,
            False,
        ),
    ],
)
def test_the_name_stands_for_settings_that_can_be_written_out(
    written: dict[str, Any], mean: str, high: float, mixed: bool
) -> None:
    algorithm = AlgorithmConfig(**written)
    assert (algorithm.mean, algorithm.clip_high, algorithm.only_with_signal) == (
        mean,
        high,
        mixed,
    )
    assert algorithm.advantages_normalized == (algorithm.name == "ppo")
    assert (
        dataclasses.replace(algorithm, max_prompt_length=10, max_new_tokens=5).longest
        == 15
    )
    assert dataclasses.replace(algorithm, sequence_length=40).longest == 40


def test_rewards_have_one_block_or_one_each() -> None:
    one = read_config({**RUNS, "reward": {"dtype": "fp32", "weight": 2}})
    assert one.reward_of("reward").weight == one.reward_of("reward.math").weight == 2
    assert (one.key_of("reward.math"), one.reward_of("reward").kind) == (
        "reward",
        "model",
    )
    blocks = {
        "math": {"function": "numeric", "weight": 0.5},
        "safe": {"url": "http://a"},
    }
    several = read_config({**RUNS, "reward": blocks})
    kinds = [
        several.reward_of(f"reward.{name}").kind for name in ("math", "safe", "style")
    ]
    assert kinds == ["function", "url", "model"]
    assert (several.key_of("reward.math"), several.reward_of("reward.math").weight) == (
        "reward.math",
        0.5,
    )
    with pytest.raises(ConfigError) as caught:
        read_config({**RUNS, "reward": {"math": {"functon": "numeric"}, "weight": 2.0}})
    found = {p.key: (p.code, p.fix) for p in caught.value.problems}
    assert found["reward.math.functon"] == ("unknown-key", "function: numeric")
    assert found["reward.weight"][0] == "wrong-type"


def test_rlhf_runs_once_it_says_what_a_run_needs() -> None:
    rlhf = {**RUNS, "algorithm": {"name": "ppo", "prompts": 4}}
    assert read_config(rlhf).runs
    assert read_config(RUNS).runs
    for block, tag, missing in (
        ("env", {"kind": "text"}, "env.task"),
        ("actor", {"model": {"kind": "causal_lm"}}, "actor.model"),
    ):
        config = read_config({**rlhf, block: tag})
        assert (config.runs, list(config.missing)) == (False, [missing])
    nobody_asks = {
        **rlhf,
        "cluster": {"component_placement": {"actor": 0, "rollout": 0}},
    }
    assert list(read_config(nobody_asks).missing) == ["cluster.component_placement.env"]


@pytest.mark.parametrize(
    ("blocks", "infers"),
    [
        ({}, False),
        ({"algorithm": {"name": "ppo", "prompts": 4}}, True),
        (
            {
                "algorithm": {
                    "name": "grpo",
                    "prompts": 4,
                    "kl_coef": 0.1,
                    "kl_in": "reward",
                }
            },
            True,
        ),
        (
            {
                "algorithm": {
                    "name": "grpo",
                    "prompts": 4,
                    "kl_coef": 0.1,
                    "kl_in": "loss",
                }
            },
            False,
        ),
        ({"reference": {"share_actor": True}}, True),
        ({"critic": {"on_actor": True}}, True),
    ],
)
def test_who_asks_the_actor_before_it_learns(
    blocks: dict[str, Any], infers: bool
) -> None:
    assert read_config({**RUNS, **blocks}).actor_infers is infers


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("all", "component_placement: {preset: colocate_all}"),
        (
            [{"actor": "0-7"}, {"env": "0-3,5"}],
            'component_placement: {actor: 0-7, env: "0-3,5"}',
        ),
        ("0-7", "component_placement: <a block of keys>"),  # of which component?
        (["0-7", 1], "component_placement: <a block of keys>"),
    ],
)
def test_a_placement_that_is_no_block_is_told_its_forms(
    written: object, fix: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(
            {"cluster": {"component_placement": written}, "env": {"id": "CartPole-v1"}}
        )
    (problem,) = caught.value.problems
    assert (problem.code, problem.fix) == ("wrong-type", fix)
    assert problem.why is not None
    assert "such as actor: 0-7, or a preset" in problem.why


def test_a_key_of_a_block_below_is_suggested_with_the_block() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({**RUNS, "actor": {**RUNS["actor"], "lr": 0.3}})
    (problem,) = caught.value.problems
    assert problem.what == "unknown key, did you mean 'optimizer.lr'?"
    assert problem.fix == "optimizer: {lr: 0.3}"
    mended = read_config(
        {**RUNS, "actor": {**RUNS["actor"], **yaml.safe_load(problem.fix)}}
    )
    assert mended.actor.optimizer.lr == 0.3


def test_a_simulator_job_that_places_no_env_is_told_so_by_the_plan() -> None:
    config = read_config(
        {
            "cluster": {"component_placement": {"actor": "0"}},
            "env": {"id": "CartPole-v1"},
        }
    )
    assert config.placed == ("actor",)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_sizes_of_a_model_may_be_a_whole_config_json(name: str) -> None:
    sizes = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 320,
        "transformers_version": "5.9.0",
        name: "bfloat16",
    }
    read = read_config({**RUNS, "reward": {"dtype": "fp32", "model": sizes}})
    assert read.reward_of("reward").dtype == "fp32"
    # Beside a folder alone, it would have no effect
    with pytest.raises(ConfigError, match=r"reward\.dtype"):
        read_config({**RUNS, "reward": {"model": {"path": "/m", "dtype": "bfloat16"}}})
