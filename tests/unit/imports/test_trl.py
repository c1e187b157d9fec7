"""TRL: arguments in Python scripts, flags and YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlplace.imports import Imported, import_words

SCRIPT = '''
"""Trains a model, not a person's patience."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen3-4B"
LENGTH = 2 * 1024

raise SystemExit("a script is not run")

config = GRPOConfig(
    output_dir="out",
    use_vllm=True,
    vllm_mode="colocate",
    vllm_enable_sleep_mode=True,
    num_generations=4,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    max_completion_length=LENGTH,
    beta=0.04,
    loss_type="grpo",
    epsilon_high=0.28,
    run_name=name_of_run(),
)
trainer = GRPOTrainer(
    model=MODEL,
    args=config,
    reward_funcs=[score],
    train_dataset=load_dataset("some/data"),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"]),
)
'''


def script(folder: Path, text: str) -> str:
    file = folder / "train.py"
    file.write_text(text, encoding="utf-8")
    return str(file)


def at(imported: Imported, path: str) -> Any:
    value: Any = imported.config
    for name in path.split("."):
        value = value.get(name, {})
    return value


def test_a_script_is_parsed_and_not_run(tmp_path: Path) -> None:
    imported = import_words("trl", [script(tmp_path, SCRIPT)], 8)
    expected = {
        "cluster.component_placement.actor": "0-7",
        "cluster.component_placement.rollout": "0-7",
        "cluster.component_placement.reference": "0-7",
        "rollout.enable_offload": True,
        "actor.model.path": "Qwen/Qwen3-4B",
        "actor.micro_batch": 8,
        "actor.lora_rank": 8,
        "actor.lora_targets": ["q_proj"],
        "algorithm.name": "grpo",
        "algorithm.prompts": 8 * 8 * 4 // 4,
        "algorithm.samples_per_prompt": 4,
        "algorithm.train_batch": 8 * 8 * 4,
        "algorithm.max_new_tokens": 2048,
        "algorithm.loss": "sequence",
        "algorithm.kl_coef": 0.04,
        "algorithm.kl_in": "loss",
        "algorithm.clip_ratio_high": 0.28,
        "algorithm.tis_cap": 3.0,
        "algorithm.tis_level": "sequence",
        "algorithm.tis_above": "drop",
        "runner.output_dir": "out",
    }
    assert {key: at(imported, key) for key in expected} == expected
    assert any("not run" in note for note in imported.notes)
    rows = {r.setting.key: r for r in imported.results}
    assert rows["run_name"].outcome == "unmapped"
    assert rows["beta"].setting.source is not None
    assert rows["beta"].setting.source.line == 22


COMMAND = '''"""It's started so:

accelerate launch \\\\
    --num_processes 4 \\\\
    train.py \\\\
    --model_name_or_path Qwen/Qwen3-0.6B \\\\
    --num_generations 8 --beta 0.0 --use_vllm
"""

parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
trainer = GRPOTrainer(model=model_args.model_name_or_path, args=training_args)
'''


def test_a_script_with_a_command_line_has_the_command_of_its_docstring(
    tmp_path: Path,
) -> None:
    imported = import_words("trl", [script(tmp_path, COMMAND)])
    assert at(imported, "cluster.component_placement.actor") == "0-3"
    assert at(imported, "actor.model.path") == "Qwen/Qwen3-0.6B"
    assert any("docstring" in note for note in imported.notes)
    typed = import_words(
        "trl", [script(tmp_path, COMMAND), "--num_generations", "2", "--beta", "0.1"], 2
    )
    assert at(typed, "algorithm.samples_per_prompt") == 2
    assert at(typed, "cluster.component_placement.reference") == "0-1"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--beta 0.0", {"rollout.engine": "transformers", "algorithm.tis_cap": None}),
        (
            "--use_vllm --vllm_mode server --vllm_tensor_parallel_size 2",
            {
                "cluster.component_placement.rollout": {
                    "placement": "8-9",
                    "accelerators_per_rank": 2,
                }
            },
        ),
        (
            "--use_vllm --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_cap 2.0",
            {
                "algorithm.tis_cap": 2.0,
                "algorithm.tis_level": "token",
                "algorithm.tis_above": "cap",
            },
        ),
        (
            "--loss_type cispo --epsilon_high 5.0",
            {
                "algorithm.surrogate": "cispo",
                "algorithm.clip_ratio_high": 4.0,
                "algorithm.clip_ratio_low": 0.99,
            },
        ),
        ("--scale_rewards none", {"algorithm.name": "dr_grpo"}),
        (
            "--generation_batch_size 1024 --num_generations 8",
            {"algorithm.prompts": 128},
        ),
        ("--bf16 false", {"actor.compute": "fp32"}),
    ],
)
def test_flags(flags: str, expected: dict[str, Any]) -> None:
    imported = import_words("trl", [f"trl grpo {flags}"], 8)
    assert {key: at(imported, key) for key in expected} == expected


def test_yaml_and_groups_that_do_not_divide(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "num_processes: 2\nper_device_train_batch_size: 1\nnum_generations: 3\naccelerate_config: zero2\n",
        encoding="utf-8",
    )
    imported = import_words("trl", [str(file)])
    assert at(imported, "actor.zero_stage") == 2
    (found,) = [p for p in imported.findings if p.code == "import-batches"]
    assert found.fix == "--num_generations 2"


def test_rloo_takes_the_kl_from_the_scores(tmp_path: Path) -> None:
    text = 'RLOOTrainer(model="Qwen/Qwen3-0.6B", args=RLOOConfig(num_generations=2))\n'
    imported = import_words("trl", [script(tmp_path, text)], 2)
    kl = {key: at(imported, f"algorithm.kl_{key}") for key in ("in", "coef")}
    assert at(imported, "algorithm.name") == "rloo"
    assert kl == {"in": "reward", "coef": 0.05}


OPTIONS = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--use-lora", action="store_true")
parser.add_argument("--share", type=float, default=0.15)
parser.add_argument("--length", type=int, default=None)
args = parser.parse_args()
adapter = None
if args.use_lora:
    adapter = LoraConfig(r=16)
trainer = GRPOTrainer(
    model="Qwen/Qwen3-4B",
    args=GRPOConfig(
        use_vllm=True,
        vllm_gpu_memory_utilization=args.share or 0.2,
        max_completion_length=args.length or 64,
    ),
    peft_config=adapter,
)
"""


def test_branches_and_values_follow_the_defaults_of_options(tmp_path: Path) -> None:
    imported = import_words("trl", [script(tmp_path, OPTIONS)])
    assert at(imported, "actor.lora_rank") == {}
    assert at(imported, "rollout.gpu_memory_utilization") == 0.15
    assert at(imported, "algorithm.max_new_tokens") == 64


def test_an_adapter_has_the_defaults_of_peft(tmp_path: Path) -> None:
    text = OPTIONS.replace("if args.use_lora:", "if True:").replace("r=16", "")
    imported = import_words("trl", [script(tmp_path, text)])
    assert at(imported, "actor.lora_rank") == 8
    assert at(imported, "actor.lora_alpha") == 8


def test_checkpoints_and_schedules_are_those_of_the_defaults(tmp_path: Path) -> None:
    text = OPTIONS.replace("GRPO", "AsyncGRPO")
    imported = import_words("trl", [script(tmp_path, text)])
    assert at(imported, "checkpoint.every") == 500
    assert at(imported, "actor.optimizer.schedule") == "constant"


def test_an_assumption_about_one_model_of_two_components_is_listed_once(
    tmp_path: Path,
) -> None:
    imported = import_words("trl", [script(tmp_path, SCRIPT)], 8)
    texts = [text for text, _ in imported.assumed]
    assert texts.count("actor.model: keys of config.json") == 1
