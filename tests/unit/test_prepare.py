"""What a language-model run needs beside its config: the model's folder, checked before anything is launched."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlplace.checks.rule import broken
from rlplace.config.blocks.training import AlgorithmConfig
from rlplace.config.compose import with_hydra
from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.contract.planning import make_plan
from rlplace.contract.registry import job_of
from rlplace.errors import ConfigError, Problem, ProblemsError, Source
from rlplace.jobs.language_model.folders import with_folder
from rlplace.jobs.language_model.rules import engines, experts, images
from rlplace.jobs.language_model.rules.case import PlannedJob
from rlplace.models.heads import reward_head_problem, value_head_problem
from rlplace.placement import Topology
from rlplace.placement.plan import Plan
from rlplace.runtime.prepare import (
    check_env,
    check_launch,
    check_plan,
    prepare,
    prepare_composed,
)
from rlplace.workers.engines.contract import engine_args_problems

KEYS = {
    "model_type": "llama",
    "vocab_size": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SOURCES = {
    "actor.model.path": Source(file="mine.yaml", line=4),
    "env.task": Source(file="mine.yaml", line=9),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with files that are right and nothing in them; every letter of its prompts is unknown to it."""
    model = {
        "type": "WordLevel",
        "vocab": {"<eos>": 0, "<unk>": 1},
        "unk_token": "<unk>",
    }
    write(tmp_path / "config.json", KEYS | {"eos_token_id": 0})
    write(
        tmp_path / "tokenizer.json",
        {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": None},
    )
    write(
        tmp_path / "tokenizer_config.json",
        {"eos_token": "<eos>", "chat_template": "{{ messages[-1]['content'] }}"},
    )
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


def write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def config(
    folder: Path, *, model: dict[str, Any] | None = None, **blocks: dict[str, Any]
) -> Config:
    mapping: dict[str, Any] = {
        "cluster": {
            "component_placement": {"actor": "0", "env": "1", "rollout": "2-3"}
        },
        "algorithm": {
            "name": "grpo",
            "prompts": 2,
            "samples_per_prompt": 2,
            "max_prompt_length": 40,
            "max_new_tokens": 8,
        },
        "env": {"task": "arithmetic"},
        "rollout": {"engine": "transformers"},
        "actor": {"model": {"path": str(folder)} | (model or {})},
    }
    return read_config(
        mapping
        | {name: mapping.get(name, {}) | block for name, block in blocks.items()}
    )


def everything(
    config: Config, layout: Plan, sources: Mapping[str, Source]
) -> list[Problem]:
    return [
        *without_machine(config, layout, sources),
        *check_launch(config, layout, sources),
    ]


def without_machine(
    config: Config, layout: Plan, sources: Mapping[str, Source]
) -> list[Problem]:
    return [*check_env(config, sources), *check_plan(config, layout, sources)]


def problems(config: Config, check: Any = everything) -> list[Problem]:
    whole = job_of(config).completed(config, SOURCES)
    found: list[Problem] = check(
        whole, make_plan(whole, Topology.uniform(1, 4, "emulated", 1 << 30)), SOURCES
    )
    return found


def test_a_whole_folder_is_read_and_counts(folder: Path) -> None:
    found = with_folder(config(folder, model={"vocab_size": 999}), {})
    assert found.model is not None
    assert (found.model["vocab_size"], found.model["path"]) == (8, str(folder))
    assert problems(config(folder)) == []


def test_a_plan_needs_no_folder_where_the_config_has_the_keys(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    written = config(nowhere, model=KEYS)
    assert problems(written, without_machine) == []
    assert [p.code for p in problems(written)] == ["no-model-folder"]
    for name in ("9" * 400, "~nobody-of-that-name/model"):  # no folder can be called so
        assert [p.code for p in problems(config(Path(name), model=KEYS))] == [
            "no-model-folder"
        ]
    with pytest.raises(ConfigError) as caught:
        with_folder(config(nowhere), SOURCES)
    (problem,) = caught.value.problems
    assert (problem.code, str(problem.source)) == ("no-model-folder", "mine.yaml:4")
    assert problem.fix is not None
    assert "scripts/get_model" in problem.fix


def test_models_of_its_own_are_read_for_each_component(
    folder: Path, tmp_path: Path
) -> None:
    own = {"model": {"path": str(folder)}}
    found = with_folder(
        config(folder, critic=own, reference=own, reward={"math": own, "style": {}}), {}
    )
    assert (
        found.critic.model
        == found.reference.model
        == found.reward_of("reward.math").model
        == found.model
    )
    assert found.reward_of("reward.style").model is None
    nowhere = {"math": {"model": {"path": str(tmp_path / "nowhere")}}}
    with pytest.raises(ConfigError) as caught:
        with_folder(config(folder, reward=nowhere), {})
    assert [(p.code, p.key) for p in caught.value.problems] == [
        ("no-model-folder", "reward.math.model.path")
    ]


@pytest.mark.parametrize("content", [None, "not JSON", '{"hidden_size": 8}'])
def test_a_folder_without_a_config_of_a_model_is_none(
    folder: Path, content: str | None
) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        with_folder(config(folder), SOURCES)
    assert caught.value.codes == ("not-a-model",)


def test_an_adapter_is_no_whole_model(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ConfigError) as caught:
        with_folder(config(folder), SOURCES)
    (problem,) = caught.value.problems
    assert (problem.code, problem.what) == (
        "not-a-model",
        "is a LoRA adapter, and a run starts from whole models",
    )
    assert (
        problem.fix
        == f"scripts/merge_adapter {folder} {folder}-merged        (then path: {folder}-merged)"
    )
    odd = folder.rename(folder.with_name("my model"))
    with pytest.raises(ConfigError) as caught:
        with_folder(config(f"{odd}/"), SOURCES)  # as it is typed
    assert str(caught.value.problems[0].fix).startswith(
        f"scripts/merge_adapter '{odd}/' '{odd}-merged'        (then"
    )


@pytest.mark.parametrize(
    ("part", "code"),
    [("tokenizer.json", "no-tokenizer"), ("model.safetensors", "not-a-model")],
)
def test_every_part_has_to_be_there(folder: Path, part: str, code: str) -> None:
    content = (folder / part).read_bytes()
    (folder / part).unlink()
    (problem,) = problems(config(folder))
    assert (problem.code, str(problem.source)) == (code, "mine.yaml:4")
    (folder / part).write_bytes(content[:-1])
    (problem,) = problems(config(folder))
    assert (problem.code, str(problem.source)) == (
        code.replace("not-a-model", "model-weights"),
        "mine.yaml:4",
    )


def test_a_tokenizer_that_belongs_to_another_model_is_noticed(folder: Path) -> None:
    write(folder / "config.json", KEYS | {"vocab_size": 1})
    (problem,) = problems(config(folder))
    assert (problem.code, problem.what) == (
        "not-a-model",
        "the tokenizer knows 2 tokens, the model 1",
    )


def test_something_ends_the_answers_of_a_conversation(folder: Path) -> None:
    turns = {"env": {"max_turns": 2}}
    assert problems(config(folder, **turns)) == []
    write(folder / "config.json", KEYS)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write(
        folder / "tokenizer_config.json",
        {n: value for n, value in settings.items() if n != "eos_token"},
    )
    assert [(p.code, p.key) for p in problems(config(folder, **turns))] == [
        ("nothing-ends", "env.max_turns")
    ]
    assert problems(config(folder)) == []
    assert problems(config(folder, **turns, rollout={"stop": ["\n"]})) == []


def test_a_chat_needs_a_template(folder: Path) -> None:
    write(folder / "tokenizer_config.json", {"eos_token": "<eos>"})
    assert [p.code for p in problems(config(folder))] == ["no-chat-template"]
    assert problems(config(folder, env={"chat": False})) == []


LINE = {
    "component_placement": {"actor": "0", "env": "1", "rollout": "2-3:0"}
}  # two accelerators for one engine
ROLLOUT = "cluster.component_placement.rollout"


@pytest.mark.parametrize(
    ("blocks", "code", "key"),
    [
        ({"algorithm": {"max_new_tokens": 64}}, "context-too-long", "rollout"),
        (
            {"algorithm": {"sequence_length": 20}},
            "context-too-short",
            "algorithm.sequence_length",
        ),
        (
            {"cluster": LINE, "rollout": {"engine": "vllm"}},
            "tensor-parallel-heads",
            ROLLOUT,
        ),
        ({"cluster": LINE}, "plan-only", ROLLOUT),
        ({"actor": {"zero_stage": 1}}, "plan-only", "actor.zero_stage"),
        ({"actor": {"optimizer": {"kind": "adamw_8bit"}}}, None, None),
        (
            {"actor": {"weights": "bf16", "optimizer": {"kind": "adamw_8bit"}}},
            "rounded-away",
            "actor.weights",
        ),
        ({"actor": {"weights": "bf16"}}, "rounded-away", "actor.weights"),
        # Only factors are trained, and those are float32.
        ({"actor": {"weights": "bf16", "lora_rank": 2}}, None, None),
        (
            {"actor": {"activation_offload": True, "checkpointing": False}},
            "nothing-to-offload",
            "actor.activation_offload",
        ),
        ({"actor": {"activation_offload": True}}, None, None),
        (
            {"actor": {"weights": "bf16", "optimizer": {"kind": "adamw_master"}}},
            None,
            None,
        ),
        ({"actor": {"weights": "bf16", "optimizer": {"on_host": True}}}, None, None),
        (
            {"algorithm": {"surrogate": "cispo", "dual_clip": 3.0}},
            "roles-contradict",
            "algorithm.dual_clip",
        ),
        ({"algorithm": {"surrogate": "cispo"}}, None, None),
        (
            {"algorithm": {"tis_cap": None, "tis_level": "sequence"}},
            "roles-contradict",
            "algorithm.tis_level",
        ),
        (
            {"algorithm": {"tis_cap": 2.0, "tis_floor": 3.0}},
            "roles-contradict",
            "algorithm.tis_floor",
        ),
        (
            {"algorithm": {"tis_cap": 2.0, "tis_floor": 2.0}},
            "roles-contradict",
            "algorithm.tis_floor",
        ),
        (
            {
                "algorithm": {
                    "tis_level": "sequence",
                    "tis_above": "drop",
                    "tis_floor": 0.5,
                }
            },
            None,
            None,
        ),
        ({"actor": {"sync": {"mode": "lora"}}}, "no-factors", "actor.sync.mode"),
        ({"actor": {"sync": {"mode": "lora"}, "lora_rank": 2}}, None, None),
        ({"actor": {"sync": {"mode": "adapter"}}}, "no-factors", "actor.sync.mode"),
        ({"actor": {"sync": {"mode": "adapter"}, "lora_rank": 2}}, None, None),
        (
            {
                "actor": {"sync": {"mode": "adapter"}, "lora_rank": 600},
                "rollout": {"engine": "vllm"},
            },
            "plan-only",
            "actor.sync.mode",
        ),
        ({"env": {"task": "arithmetics"}}, "unknown-task", "env.task"),
        (
            {"env": {"rewards": [{"name": "math_anwser"}]}},
            "unknown-reward",
            "env.rewards[0].name",
        ),
        (
            {"rollout": {"dtype": "fp32", "cache_dtype": "bf16"}},
            "cache-dtype",
            "rollout.cache_dtype",
        ),
        ({"rollout": {"cache_dtype": "fp8"}}, "cache-dtype", "rollout.cache_dtype"),
        ({"rollout": {"cache_dtype": "fp8", "engine": "vllm"}}, None, None),
    ],
    ids=str,
)
def test_what_no_machine_could_run(
    tmp_path: Path, blocks: dict[str, dict[str, Any]], code: str | None, key: str | None
) -> None:
    heads = {"num_attention_heads": 3 if code == "tensor-parallel-heads" else 4}
    actor = {
        "actor": {"model": KEYS | heads | {"path": str(tmp_path / "nowhere")}}
        | blocks.get("actor", {})
    }
    found = problems(config(tmp_path, **(blocks | actor)), without_machine)
    assert [(p.code, p.key) for p in found] == ([] if code is None else [(code, key)])
    fix = (
        "actor.optimizer.kind: adamw_master"
        if "optimizer" not in actor["actor"]
        else "actor.weights: fp32"
    )
    assert code != "rounded-away" or found[0].fix == fix
    assert code != "unknown-task" or str(found[0].source) == "mine.yaml:9"


FIVE = {
    "component_placement": {"actor": "0", "critic": "1", "env": "2", "rollout": "3"}
}
PPO = {"name": "ppo"}


def test_a_critic_is_checked_where_one_is_placed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    own = tmp_path_factory.mktemp("critic")
    write(own / "config.json", KEYS | {"vocab_size": 7})
    header = json.dumps(
        {"score.weight": {"dtype": "F32", "shape": [3, 8], "data_offsets": [0, 96]}}
    ).encode()
    (own / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(96)
    )
    critic = {"model": {"path": str(own)}, "zero_stage": 1}
    placed = config(folder, cluster=FIVE, algorithm=PPO, critic=critic)
    assert [(p.code, p.key) for p in problems(placed)] == [
        ("plan-only", "critic.zero_stage"),
        ("critic-vocabulary", "critic.model"),
        ("value-head", "critic.model.path"),
    ]
    assert problems(config(folder, critic=critic)) == []
    assert problems(config(folder, cluster=FIVE, algorithm=PPO)) == []


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, (99).to_bytes(8, "little") + b"{"]
)
def test_a_file_that_is_cut_short_has_no_head(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert value_head_problem(tmp_path) is None
    assert reward_head_problem(tmp_path, "reward") is None


def test_a_run_needs_the_folder_of_its_model(folder: Path) -> None:
    keys = config(folder, model=KEYS)
    without = dataclasses.replace(
        keys, actor=dataclasses.replace(keys.actor, model=KEYS)
    )
    assert problems(without, without_machine) == []
    (problem,) = problems(without)
    assert (problem.code, problem.key) == ("missing-key", "actor.model.path")


@pytest.mark.parametrize(
    ("component", "line", "engine", "fix"),
    [
        (
            "rollout",
            {"placement": "2-3", "tensor_parallel_size": 2},
            "vllm",
            "accelerators_per_rank: 2",
        ),
        ("rollout", {"placement": "2-3", "accelerators_per_rank": 2}, "vllm", None),
        ("rollout", {"placement": "2-3:0", "tensor_parallel_size": 2}, "vllm", None),
        (
            "rollout",
            {"placement": "0-1:0,2-3:1-2", "tensor_parallel_size": 2},
            "vllm",
            "accelerators_per_rank: 2",
        ),
        (
            "rollout",
            {"placement": "2-3", "context_parallel_size": 2},
            "vllm",
            "no context_parallel_size",
        ),
        ("rollout", "cpu", "transformers", None),
        (
            "actor",
            {"placement": "0-1", "tensor_parallel_size": 2},
            "transformers",
            None,
        ),
        (
            "actor",
            {"placement": "0-1", "accelerators_per_rank": 2},
            "transformers",
            "tensor_parallel_size: 2",
        ),
        ("actor", "cpu", "transformers", None),
        ("env", {"placement": "2-3", "accelerators_per_rank": 2}, "transformers", None),
    ],
)
def test_slices_of_a_model_are_those_that_a_run_makes(
    folder: Path, component: str, line: object, engine: str, fix: str | None
) -> None:
    leaving = {c: {"enable_offload": True} for c in ("actor", "env")}
    rollout = {"rollout": {"engine": engine, "enable_offload": True}}
    placement = {"actor": "0", "env": "1", "rollout": "2-3"} | {component: line}
    found = problems(
        config(
            folder, cluster={"component_placement": placement}, **leaving, **rollout
        ),
        without_machine,
    )
    assert [(p.code, p.key) for p in found] == [
        ("plan-only", f"cluster.component_placement.{component}")
    ] * (fix is not None)
    assert all(str(p.fix).startswith(str(fix)) for p in found)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "context_parallel_size"])
@pytest.mark.parametrize("component", ["actor", "rollout", "env"])
def test_ranks_without_a_language_model_divide_none(
    folder: Path, component: str, size: str
) -> None:
    line = {"placement": "0-1", size: 2}
    lines = dict.fromkeys(("actor", "env", "rollout"), "0-1") | {component: line}
    cluster = {"accelerators_per_node": 2, "component_placement": lines}
    leaving = {c: {"enable_offload": True} for c in ("actor", "env", "rollout")}
    simulated = read_config(
        {"cluster": cluster, **leaving, "env": leaving["env"] | {"id": "Pendulum-v1"}}
    )
    jobs = [simulated]
    if component == "env":
        jobs.append(
            config(
                folder,
                cluster={
                    "component_placement": {"actor": "0", "env": line, "rollout": "2"}
                },
                **leaving,
            )
        )
    for job in jobs:
        (problem,) = (
            p for p in problems(job, without_machine) if p.code == "parallel-sizes"
        )
        assert (problem.key, problem.fix) == (
            f"cluster.component_placement.{component}",
            f"no {size}",
        )


WHOLE = "no tensor_parallel_size        (ranks then share the state by FSDP)"
TWELVE = {"num_attention_heads": 12, "vocab_size": 12}
HEADS, FAMILY, TOKENS = (
    "tensor-parallel-heads",
    "tensor-parallel-family",
    "context-parallel-heads",
)


@pytest.mark.parametrize(
    ("model", "ranks", "size", "code", "fix"),
    [
        ({"num_key_value_heads": 4, "intermediate_size": 24}, 4, 4, None, ""),
        ({"num_key_value_heads": 2}, 4, 4, HEADS, "tensor_parallel_size: 2"),
        (TWELVE | {"intermediate_size": 18}, 8, 4, HEADS, "tensor_parallel_size: 2"),
        (TWELVE, 12, 4, None, ""),
        ({"vocab_size": 7}, 2, 2, HEADS, WHOLE),
        (
            {"num_attention_heads": 9, "vocab_size": 9},
            6,
            2,
            HEADS,
            f"one of\n{WHOLE}\ntensor_parallel_size: 3",
        ),
        ({"model_type": "phi3"}, 2, 2, FAMILY, WHOLE),
        ({"attention_bias": True}, 2, 2, FAMILY, WHOLE),
        ({"model_type": "phi3"}, 2, 1, None, ""),
        ({}, 4, {"context_parallel_size": 2}, None, ""),
        (
            {"num_key_value_heads": 2},
            4,
            {"context_parallel_size": 4},
            None,
            "",
        ),  # two ranks have the same keys
        ({"model_type": "phi3"}, 4, {"context_parallel_size": 2}, None, ""),
        (
            TWELVE | {"num_key_value_heads": 3},
            12,
            {"context_parallel_size": 12},
            None,
            "",
        ),
        (TWELVE, 8, {"context_parallel_size": 8}, TOKENS, "context_parallel_size: 4"),
        (
            TWELVE | {"num_key_value_heads": 3},
            4,
            {"context_parallel_size": 2},
            TOKENS,
            "context_parallel_size: 1",
        ),
        (TWELVE, 12, {"tensor_parallel_size": 2, "context_parallel_size": 6}, None, ""),
    ],
    ids=str,
)
def test_a_model_that_ranks_cannot_cut_is_refused(
    folder: Path,
    model: dict[str, object],
    ranks: int,
    size: int | dict[str, int],
    code: str | None,
    fix: str,
) -> None:
    write(folder / "config.json", KEYS | model | {"eos_token_id": 0})
    sizes = size if isinstance(size, dict) else {"tensor_parallel_size": size}
    placement = {
        "actor": {"placement": f"0-{ranks - 1}", **sizes},
        "env": "12",
        "rollout": "13",
    }
    prompts = ranks // math.prod(sizes.values())
    blocks = {
        "cluster": {"component_placement": placement},
        "algorithm": {"prompts": prompts},
    }
    whole = with_folder(
        config(folder, **blocks), SOURCES
    )  # of one sample for each copy
    found = check_plan(
        whole, make_plan(whole, Topology.uniform(1, 14, "emulated", 1 << 30)), SOURCES
    )
    expected = (code, "cluster.component_placement.actor", fix)
    assert [(p.code, p.key, p.fix) for p in found] == [expected] * (code is not None)


LIMITS = {"num_attention_heads": 12, "max_position_embeddings": 2048}
WINDOW = {"sliding_window": 512}


@pytest.mark.parametrize(
    ("config", "context", "ranks", "code", "fix"),
    [
        (LIMITS, 2048, 4, None, ""),
        ({}, 2048, 4, None, ""),
        (
            LIMITS,
            2048,
            8,
            "tensor-parallel-heads",
            "6 for each rank, as in {placement: 0-5, accelerators_per_rank: 6}",
        ),
        (
            LIMITS,
            2049,
            1,
            "context-too-long",
            "algorithm.max_new_tokens=2047        (prompts may have 1)",
        ),
        (WINDOW, 513, 1, "attention-not-full", "rollout.engine: vllm"),
        (WINDOW, 512, 1, None, ""),
        (WINDOW | {"use_sliding_window": False}, 513, 1, None, ""),
        ({"model_type": "qwen3_moe", "num_experts": 8}, 64, 1, None, ""),
    ],
)
def test_what_a_model_cannot_do_is_refused(
    config: dict[str, int], context: int, ranks: int, code: str | None, fix: str
) -> None:
    asked = AlgorithmConfig(max_prompt_length=1, max_new_tokens=context - 1)
    case = engines.ServedModel(
        model=config,
        engine="transformers",
        algorithm=asked,
        accelerators_per_engine=ranks,
    )
    found = [(p.code, p.fix) for p in broken(engines.OF_MODEL, case)]
    assert found == ([] if code is None else [(code, fix)])


ACTOR = "cluster.component_placement.actor"


@pytest.mark.parametrize(
    ("blocks", "placed", "keys"),
    [
        ({}, {}, []),
        ({"rollout": {"engine": "vllm"}}, {}, ["rollout.engine"]),
        ({"actor": {"sync": {"mode": "delta"}}}, {}, ["actor.sync.mode"]),
        ({"algorithm": {"name": "ppo"}}, {"critic": "4"}, ["critic"]),
        (
            {"algorithm": {"name": "ppo"}, "critic": {"on_actor": True}},
            {},
            ["critic.on_actor"],
        ),
        ({}, {"actor": {"placement": "0,4", "context_parallel_size": 2}}, [ACTOR]),
        ({"reward": {"model": {"model_type": "llama"}}}, {"reward": "4"}, ["reward"]),
        ({"algorithm": {"kl_coef": 0.1}}, {"reference": "4"}, []),
        (
            {
                "algorithm": {"kl_coef": 0.1},
                "reference": {"model": {"model_type": "llama"}},
            },
            {"reference": "4"},
            ["reference.model"],
        ),
    ],
)
def test_what_is_not_done_with_a_model_that_sees_is_planned_and_not_run(
    folder: Path, blocks: dict[str, Any], placed: dict[str, Any], keys: list[str]
) -> None:
    placement = {"actor": "0", "env": "1", "rollout": "2-3"} | placed
    model = {
        "model_type": "qwen2_5_vl",
        "text_config": {"num_attention_heads": 4, "num_key_value_heads": 2},
    }
    write(folder / "config.json", KEYS | model)
    job = with_folder(
        config(folder, cluster={"component_placement": placement}, **blocks), {}
    )
    layout = make_plan(job, Topology.uniform(1, 5, "emulated", 1 << 40))
    case = PlannedJob(config=job, plan=layout)
    found = list(broken(images.RULES, case))
    assert [(p.code, p.key) for p in found] == [("plan-only", key) for key in keys]
    assert {(p.code, p.key) for p in found} <= {
        (p.code, p.key) for p in check_plan(job, layout, {})
    }


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8}


@pytest.mark.parametrize(
    ("actor", "blocks", "code", "key", "fix"),
    [
        (EXPERTS, {}, None, None, None),
        (
            {"model_type": "qwen3"},
            {},
            "no-experts",
            "actor.router_replay",
            "router_replay: false",
        ),
        (
            {"model_type": "qwen3"},
            {"actor": {"router_replay": False, "router_loss_coef": 0.1}},
            "no-experts",
            "actor.router_loss_coef",
            "router_loss_coef: 0",
        ),
        (
            EXPERTS,
            {"rollout": {"engine": "vllm"}},
            "plan-only",
            "actor.router_replay",
            "router_replay: false        (or rollout.engine: transformers)",
        ),
        (
            EXPERTS,
            {
                "actor": {"router_replay": False, "router_loss_coef": 0.1},
                "placed": {"placement": "0,4", "context_parallel_size": 2},
            },
            "plan-only",
            "actor.router_loss_coef",
            "router_loss_coef: 0        (or context_parallel_size: 1)",
        ),
        (
            EXPERTS,
            {"placed": {"placement": "0,4", "context_parallel_size": 2}},
            None,
            None,
            None,
        ),
    ],
    ids=["experts", "dense", "dense loss", "vllm", "parts", "replayed parts"],
)
def test_experts_are_replayed_and_balanced_where_there_are_experts_and_routes(
    folder: Path,
    actor: dict[str, Any],
    blocks: dict[str, Any],
    code: str | None,
    key: str | None,
    fix: str | None,
) -> None:
    placed = blocks.get("placed", "0")
    others = {name: block for name, block in blocks.items() if name != "placed"}
    job = config(
        folder,
        **{
            **others,
            "cluster": {
                "component_placement": {"actor": placed, "env": "1", "rollout": "2-3"}
            },
            "actor": {
                "model": KEYS | actor,
                "router_replay": True,
                **blocks.get("actor", {}),
            },
        },
    )
    layout = make_plan(job, Topology.uniform(1, 5, "emulated", 1 << 40))
    case = PlannedJob(config=job, plan=layout)
    found = list(broken(experts.RULES, case))
    expected = [] if code is None else [(code, key, fix)]
    assert [(p.code, p.key, p.fix) for p in found] == expected
    assert {(p.code, p.key) for p in found} <= {
        (p.code, p.key) for p in check_plan(job, layout, {})
    }


@pytest.mark.parametrize(
    ("engine", "fix"),
    [
        ("transformers", None),
        ("vllm", "mode: lora        (or rollout.engine: transformers)"),
    ],
)
def test_factors_beside_experts_are_those_of_the_transformers_engine(
    folder: Path, engine: str, fix: str | None
) -> None:
    job = config(
        folder,
        rollout={"engine": engine},
        actor={"model": KEYS | EXPERTS, "lora_rank": 2, "sync": {"mode": "adapter"}},
    )
    layout = make_plan(job, Topology.uniform(1, 4, "emulated", 1 << 40))
    found = list(broken(engines.PLANNED, PlannedJob(config=job, plan=layout)))
    assert [p.fix for p in found] == ([] if fix is None else [fix])


def test_written_answers_have_no_routes(folder: Path) -> None:
    job = config(
        folder,
        cluster={"component_placement": {"actor": "0", "env": "1"}},
        algorithm={"name": "sft"},
        actor={"model": KEYS | EXPERTS, "router_replay": True},
    )
    layout = make_plan(job, Topology.uniform(1, 2, "emulated", 1 << 40))
    found = list(broken(experts.RULES, PlannedJob(config=job, plan=layout)))
    assert [(p.code, p.what) for p in found] == [
        ("plan-only", "sft has no rollout that records routes")
    ]


@pytest.mark.parametrize("component", ["actor", "critic", "reference", "reward"])
@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"model_type": "gemma2", "hidden_size": 8}, "caps its scores by a tanh"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "see those behind them",
        ),
        ({"model_type": "llama", "is_causal": False}, "see those behind them"),
        ({"model_type": "lfm2"}, "no run has been compared with transformers"),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {"type": "longrope"},
                "original_max_position_embeddings": 40,
            },
            "40 tok",
        ),
    ],
    ids=["capped", "both ways", "not causal", "unknown", "rope"],
)
def test_models_that_no_worker_computes_are_planned_and_not_run(
    folder: Path, component: str, model: dict[str, Any], why: str
) -> None:
    placed = {"actor": "0", "env": "1", "rollout": "2-3"} | (
        {} if component == "actor" else {component: "4"}
    )
    algorithm = {
        "name": "ppo" if component == "critic" else "grpo",
        "kl_coef": 0.1 * (component == "reference"),
    }
    blocks: dict[str, Any] = {component: {"model": model}}
    job = config(
        folder, cluster={"component_placement": placed}, algorithm=algorithm, **blocks
    )
    layout = make_plan(job, Topology.uniform(1, 5, "emulated", 1 << 40))
    found = [p for p in check_plan(job, layout, {}) if p.key == f"{component}.model"]
    assert [p.code for p in found] == ["plan-only"]
    assert why in str(found[0].why)


@pytest.mark.parametrize(
    ("rollout", "fix"),
    [
        ({"top_p": 0.7}, "top_p: 1.0"),
        ({"top_k": 40}, "top_k: 0"),
        ({"top_k": 40, "temperature": 0.0}, None),
        ({}, None),
    ],
)
def test_a_cut_distribution_is_not_learned_from(
    folder: Path, rollout: dict[str, float], fix: str | None
) -> None:
    found = [
        p
        for p in problems(config(folder, rollout=rollout), without_machine)
        if p.code == "cut-distribution"
    ]
    assert [str(p.fix).partition("   ")[0] for p in found] == (
        [] if fix is None else [fix]
    )


@pytest.mark.parametrize(
    ("rollout", "cap", "found"),
    [
        (
            {"repetition_penalty": 1.1},
            None,
            [("cut-distribution", "rollout.repetition_penalty")],
        ),
        (
            {"presence_penalty": 0.5, "min_tokens": 1},
            None,
            [
                ("cut-distribution", "rollout.min_tokens"),
                ("cut-distribution", "rollout.presence_penalty"),
            ],
        ),
        ({"frequency_penalty": 0.5}, 2.0, []),
        # Greedy answers have penalised probabilities too.
        (
            {"frequency_penalty": 0.5, "temperature": 0.0},
            None,
            [("cut-distribution", "rollout.frequency_penalty")],
        ),
        ({"temperature": 0.0, "top_k": 5}, None, []),
        ({"min_tokens": 10_000}, 2.0, [("context-too-short", "rollout.min_tokens")]),
        ({"stop": ["", "x y"]}, 2.0, [("stop-text", "rollout.stop")]),
    ],
)
def test_what_is_drawn_otherwise_than_the_actor_knows_is_corrected_or_refused(
    folder: Path,
    rollout: dict[str, Any],
    cap: float | None,
    found: list[tuple[str, str]],
) -> None:
    # An algorithm that compares all answers learns from greedy ones too
    algorithm = {"tis_cap": cap, "name": "reinforce_pp"}
    job = config(folder, rollout=rollout, algorithm=algorithm)
    assert [(p.code, p.key) for p in problems(job, without_machine)] == found


@pytest.mark.parametrize(
    ("runner", "rollout", "found"),
    [
        ({"eval_every": 1, "eval_samples": 4}, {}, []),
        (
            {"eval_every": 1, "eval_samples": 4, "eval_temperature": 0.0},
            {},
            [("runner.eval_samples", "runner.eval_temperature is 0")],
        ),
        (
            {"eval_every": 1, "eval_samples": 4},
            {"temperature": 0.0},
            [("runner.eval_samples", "rollout.temperature is 0")],
        ),
        ({"eval_every": 1, "eval_samples": 1, "eval_temperature": 0.0}, {}, []),
        ({"eval_every": 1, "stop_at_eval": 0.9, "eval_patience": 2}, {}, []),
        (
            {"stop_at_eval": 0.9, "eval_patience": 2},
            {},
            [
                ("runner.stop_at_eval", "runner.eval_every is 0"),
                ("runner.eval_patience", "runner.eval_every is 0"),
            ],
        ),
    ],
)
def test_keys_of_evaluations_that_have_no_effect_are_refused(
    folder: Path,
    runner: dict[str, Any],
    rollout: dict[str, Any],
    found: list[tuple[str, str]],
) -> None:
    said = problems(config(folder, runner=runner, rollout=rollout))
    refused = [p for p in said if p.code == "evaluation-of-no-use"]
    assert [p.key for p in refused] == [key for key, _ in found]
    for problem, (_, why) in zip(refused, found, strict=True):
        assert why in str(problem.why)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enable_chunked_prefill": False}, []),
        ({"enable_chunked_prefil": False}, ["enable_chunked_prefill"]),
        ({"max_model_len": 8, "nothing": 1}, ["engine_args: {}", "engine_args: {}"]),
    ],
)
def test_arguments_of_the_engine_are_known_and_not_decided_elsewhere(
    given: dict[str, Any], said: list[str]
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    found = [*engine_args_problems(given)]
    assert [str(p.fix).partition("   ")[0] for p in found] == said
    assert {p.code for p in found} <= {"engine-args"}


def test_only_a_reward_behind_an_address_needs_the_library_that_asks_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "urllib3" else find(name),
    )
    placed = {
        "component_placement": {
            "actor": "0",
            "env": "1",
            "rollout": "2-3",
            "reward": "cpu",
        }
    }
    (problem,) = problems(
        config(folder, cluster=placed, reward={"url": "http://127.0.0.1:9/"})
    )
    assert (problem.code, problem.key) == ("missing-library", "reward.url")
    assert "urllib3" in (problem.fix or "")
    assert (
        problems(config(folder, cluster=placed, reward={"function": "exact_match"}))
        == []
    )


def test_a_job_of_ray_is_told_to_join_it_and_to_write_where_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(**ray: str) -> list[Problem]:
        cluster = {
            "component_placement": {"actor": "0", "env": "1", "rollout": "2"},
            "ray": ray,
        }
        job = read_config(
            {
                "cluster": cluster,
                "env": {"id": "CartPole-v1"},
                "algorithm": {"name": "ppo"},
            }
        )
        return check_launch(
            job, make_plan(job, Topology.uniform(1, 4, "emulated", 1 << 40)), {}
        )

    assert found() == []
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert [(p.code, p.fix) for p in found()] == [
        ("inside-a-ray-job", "cluster.ray.address=auto")
    ]
    assert found(address="auto") == []
    package = tmp_path / "working_dir_files" / "_ray_pkg_1"
    package.mkdir(parents=True)
    monkeypatch.chdir(package)
    monkeypatch.setenv("HOME", "/home/me")
    (problem,) = found(address="auto")
    assert (problem.key, problem.fix) == (
        "runner.output_dir",
        "runner.output_dir=/home/me/runs",
    )


def test_a_text_with_a_special_token_ends_no_answer(folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    write(
        folder / "tokenizer.json",
        stored
        | {"added_tokens": [{"id": 0, "content": "<eos>", "special": True} | flags]},
    )
    (problem,) = problems(config(folder, rollout={"stop": ["<eos>", "x", "x<eos>"]}))
    assert (problem.code, problem.got, problem.fix) == (
        "stop-text",
        "'x<eos>'",
        "stop: ['<eos>']",
    )


def unplaced(*words: str) -> list[tuple[str, str]]:
    """Code and key of each problem of blocks without a component; also of those with which a job can run."""
    (composed,) = with_hydra(words)
    try:
        found = prepare_composed(composed).plan.warnings
    except ProblemsError as error:
        found = tuple(error.problems)
    codes = ("block-not-placed", "unused-block")
    return [(each.code, each.key) for each in found if each.code in codes]


def test_a_block_of_a_component_that_is_not_placed_is_refused() -> None:
    grpo = "hybrid_grpo_llm"
    refused = "block-not-placed"
    assert unplaced(grpo) == []
    # Nothing differs from the defaults
    assert unplaced(grpo, "+reference={}", "+critic.warmup_iterations=0") == []
    reward = "+reward={function: exact_match}"
    assert unplaced(grpo, reward) == [(refused, "reward.function")]
    placed = "cluster.component_placement={reward: cpu}"
    assert unplaced(grpo, reward, placed) == []
    url = "+reward.url=http://localhost:1/"
    assert unplaced(grpo, url) == [(refused, "reward.url")]
    assert unplaced(grpo, "+critic.optimizer.lr=1e-3", "+reference.dtype=fp32") == [
        (refused, "critic.optimizer"),
        (refused, "reference.dtype"),
    ]
    # A config without a file
    (composed,) = with_hydra([grpo])
    mapping = {**composed.mapping, "reference": {"on_host": True, "dtype": "fp32"}}
    with pytest.raises(ConfigError) as error:
        prepare(mapping)
    assert [each.key for each in error.value.problems] == ["reference.dtype"]
    # What changes no number is told
    mapping["reference"] = {"enable_offload": True, "micro_batch": 2}
    (warning,) = [w for w in prepare(mapping).plan.warnings if "block" in w.code]
    assert (warning.code, warning.key) == ("unused-block", "reference.micro_batch")


def test_an_unplaced_block_of_a_shipped_config_is_told() -> None:
    reference = (
        "rlhf_tiny",
        "~cluster.component_placement.reference",
        "algorithm.kl_coef=0",
    )
    assert unplaced("rlhf_tiny") == []
    assert unplaced(*reference) == [("unused-block", "reference.enable_offload")]
    assert unplaced(*reference, "~reference") == []
    # A run saves its config without the block, so that another run can be started with it
    (composed,) = with_hydra(reference)
    saved = prepare_composed(composed).mapping
    assert "reference" in composed.mapping
    assert "reference" not in saved
    assert [w.code for w in prepare(saved).plan.warnings if "block" in w.code] == []
    # What the user sets is refused
    assert unplaced(*reference, "reference.refresh_every=7") == [
        ("block-not-placed", "reference.refresh_every")
    ]
    # The file of a group counts too
    reward = ("rlhf_tiny", "~cluster.component_placement.reward")
    assert unplaced(*reward) == [("unused-block", "reward.model")]
    # A head on the actor is a critic
    critic = ("~cluster.component_placement.critic", "critic.on_actor=true")
    assert unplaced("rlhf_tiny", *critic, "critic.warmup_iterations=0") == []


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        (["actor.lora_alpha=32"], ["unused-lora-alpha"]),
        (["actor.lora_alpha=32", "actor.lora_rank=8"], []),
        # The alpha of every config
        ([], []),
    ],
)
def test_a_lora_alpha_without_factors_is_told(
    words: list[str], codes: list[str]
) -> None:
    (composed,) = with_hydra(["--config-name", "disaggregated_grpo_llm", *words])
    job = prepare_composed(composed)
    about_lora = [each.code for each in job.plan.warnings if "lora" in each.key]
    assert about_lora == codes


# A run of the off-policy job with 1,000 steps
SHORT = (
    "++algorithm.steps_per_iteration=1000",
    "++algorithm.learning_starts=100",
    "++algorithm.updates_per_step=1.0",
    "++algorithm.sync_every=8",
    "env.total_num_envs=1",
    "runner.total_iterations=1",
    "++algorithm.epsilon_steps=1000",
)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["rlhf_tiny"], []),
        (["rlhf_tiny", "critic.warmup_iterations=30"], ["critic.warmup_iterations"]),
        (["rlhf_tiny", "critic.warmup_iterations=29"], []),
        (["rlhf_tiny", "reference.refresh_every=31"], ["reference.refresh_every"]),
        # One optimizer step in each of 30 iterations
        (
            ["rlhf_tiny", "critic.optimizer.warmup_steps=30"],
            ["critic.optimizer.warmup_steps"],
        ),
        (["rlhf_tiny", "critic.optimizer.warmup_steps=29"], []),
        (["rlhf_tiny", "actor.ema_decay=0.99"], ["actor.ema_decay"]),
        (["rlhf_tiny", "actor.ema_decay=0.9"], []),
        (["sac"], []),
        (["td3"], []),
        (["dqn"], []),
        # 1,000 steps; updates begin after 100 steps
        (["sac", *SHORT, "++algorithm.target_every=901"], ["algorithm.target_every"]),
        # One step of tau = 0.005 in the run
        (["sac", *SHORT, "++algorithm.target_every=900"], ["algorithm.tau"]),
        (["sac", *SHORT, "++algorithm.target_every=900", "algorithm.tau=1.0"], []),
        (["dqn", *SHORT, "algorithm.tau=0.005"], ["algorithm.tau"]),
        (["dqn", *SHORT, "algorithm.tau=0.5"], []),
        (["td3", *SHORT, "algorithm.policy_delay=901"], ["algorithm.policy_delay"]),
        (
            ["dqn", *SHORT, "++algorithm.epsilon_steps=1001"],
            ["algorithm.epsilon_steps"],
        ),
        (["dqn", *SHORT, "algorithm.epsilon_steps=1000"], []),
    ],
)
def test_settings_that_come_too_late_in_the_run_are_told(
    words: list[str], keys: list[str]
) -> None:
    (composed,) = with_hydra(["--config-name", *words])
    late = [
        each
        for each in prepare_composed(composed).plan.warnings
        if each.code == "too-late-in-run"
    ]
    assert [each.key for each in late] == keys
    for each in late:
        # The fix is pasted
        fix = str(each.fix).partition("   ")[0]
        word = fix if "=" in fix else f"{each.key.rpartition('.')[0]}.{fix}"
        (fixed,) = with_hydra(
            ["--config-name", *words, word.replace(": ", "=")],
        )
        told = [w.code for w in prepare_composed(fixed).plan.warnings]
        assert "too-late-in-run" not in told


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["td3", "++algorithm.target_every=4"], "has no effect in td3"),
        (["sac", "algorithm.target_entropy=0.7"], "entropy of 0.7"),
        (["crossq", "++algorithm.target_entropy=0.7"], "entropy of 0.7"),
        (["sac", "algorithm.target_entropy=0.6"], ""),
        # With a constant temperature, nothing aims at it
        (["sac", "algorithm.target_entropy=0.7", "algorithm.temperature=0.2"], ""),
    ],
)
def test_off_policy_settings_without_effect_or_out_of_reach_are_refused(
    words: list[str], error: str
) -> None:
    def told(*more: str) -> list[Problem]:
        (composed,) = with_hydra(["--config-name", *words, *more])
        try:
            job = prepare_composed(composed)
        except ProblemsError as refused:
            return [*refused.problems]
        return check_launch(job.config, job.plan, {})

    if not error:
        assert told() == []
        return
    (found,) = told()
    assert error in found.what
    # The fix is pasted
    assert told(*str(found.fix).partition("   ")[0].split()) == []


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["sac"], []),
        (["td3"], []),
        (["dqn"], []),
        (["crossq"], []),
        (["crossq", "++algorithm.expectile=0.9"], ["algorithm.expectile"]),
        (["sac", "++algorithm.exploration_noise=0.3"], ["algorithm.exploration_noise"]),
        (["td3", "++algorithm.epsilon_steps=500"], ["algorithm.epsilon_steps"]),
        (["td3", "++algorithm.exploration_noise=0.3"], []),
        (["dqn", "++actor.critics=4"], ["actor.critics"]),
        # The shipped config has 8,000
        (["dqn", "algorithm.learning_starts=10000"], ["algorithm.epsilon_steps"]),
        (
            ["dqn", "algorithm.learning_starts=500", "algorithm.epsilon_steps=500"],
            ["algorithm.epsilon_steps"],
        ),
        (["dqn", "algorithm.learning_starts=500", "algorithm.epsilon_steps=501"], []),
        (["sac", "algorithm.learning_starts=10000"], []),
        (["sac", "actor.critics=4", "++actor.layer_norm=true"], []),
        (["sac", "++replay.priority_exponent=0.9"], ["replay.priority_exponent"]),
        (["sac", "++replay.demonstration_share=0.25"], ["replay.demonstration_share"]),
        (
            [
                "sac",
                "++replay.priority_exponent=0.9",
                "replay.sampling=prioritised",
            ],
            [],
        ),
    ],
)
def test_off_policy_settings_without_effect_are_told(
    words: list[str], keys: list[str]
) -> None:
    (composed,) = with_hydra(["--config-name", *words])
    found = [
        each.key
        for each in prepare_composed(composed).plan.warnings
        if each.code == "setting-without-effect"
    ]
    assert found == keys
