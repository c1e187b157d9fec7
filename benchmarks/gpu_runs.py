"""Whole runs of GRPO on one GPU, through the command that users type.

    python -m benchmarks.gpu_runs learns|turns|vllm [--emulated]     as gpu_check runs them

`learns`: one process, the transformers engine, a tiny model whose reward must rise. `turns`: actor, env and rollout are
Ray workers that take turns on one GPU, with a model of a real size; their memory beside the plan. `vllm`: a tiny model,
generated for by vLLM.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_measure import (
    MIB,
    ON_CPU,
    expect,
    models_folder,
    try_named_on_command_line,
)
from benchmarks.random_models import model_config, random_model
from tests.e2e.text_tasks import LEARNABLE
from tests.tiny_lm import tiny_model, tiny_tokenizer

_COMPONENTS = ("actor", "env", "rollout")
_IN_BF16 = ("rollout.dtype=bf16", "actor.compute=bf16")
LEARNED = 0.7  # mean reward, of 1 at most; it begins below 0.5
SMALL_BYTES = (
    256 * MIB
)  # of a component, in which torch's allocator rounds: within 5 % only above it


def learns() -> str:
    """One process, a tiny model: the reward rises."""
    with models_folder() as folder:
        model = tiny_model(Path(folder) / "model", "qwen3")
        summary = _run(
            Path(folder),
            *one_gpu(ON_CPU),
            *inline_words(model),
            *([] if ON_CPU else _IN_BF16),
        )
    expect("reward of the last iteration", summary["return_last"], least=LEARNED)
    return f"reward {summary['return_first']:.3f} -> {summary['return_last']:.3f}; {_spent(summary)}"


def inline_words(model: Path) -> list[str]:
    return [
        *("model@actor.model=tiny", f"actor.model.path={model}"),
        *("cluster.launcher=inline", "rollout.engine=transformers"),
        *LEARNABLE,
        "runner.total_iterations=12",
    ]


def turns() -> str:
    """Ray workers take turns on one GPU: memory of each beside the plan, weights from one to the other."""
    with models_folder() as folder:
        size = "emulated" if ON_CPU else "Qwen3-0.6B"
        model = random_model(Path(folder) / "model", size)
        tiny_tokenizer(320).save_pretrained(model)
        summary = _run(
            Path(folder),
            *one_gpu(ON_CPU),
            *turns_words(model, size),
            *([] if ON_CPU else _IN_BF16),
        )
    _check_memory(summary)
    return _spent(summary)


def turns_words(model: Path, size: str) -> list[str]:
    config = model_config(size)
    shape = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    keys = (
        *shape,
        "num_key_value_heads",
        "head_dim",
        "tie_word_embeddings",
        "max_position_embeddings",
    )
    return [
        *("model@actor.model=qwen3_8b", f"actor.model.path={model}"),
        *(f"actor.model.{key}={str(config[key]).lower()}" for key in keys),
        *(
            "rollout.engine=transformers",
            "rollout.kv_cache_memory=512MiB",
            "actor.checkpointing=true",
        ),
        *(
            "env.chat=false",
            "algorithm.max_prompt_length=192",
            "actor.sync.verify_every=1",
        ),
        *("runner.total_iterations=3", "runner.eval_every=0", "checkpoint.every=0"),
    ]


def vllm() -> str:
    """A tiny model on one GPU that all share; its memory against the plan's."""
    with models_folder() as folder:
        model = tiny_model(Path(folder) / "model", "qwen3")
        summary = _run(
            Path(folder),
            *one_gpu(ON_CPU),
            *vllm_words(ON_CPU),
            f"actor.model.path={model}",
        )
    if not summary["tokens_learned"] or not math.isfinite(summary["return_last"]):
        sys.exit("nothing was learned")
    _check_memory(summary)
    return _spent(summary)


def vllm_words(emulated: bool) -> list[str]:
    # vLLM measures its share of the GPU
    own = (
        []
        if emulated
        else ["rollout.kv_cache_memory=null", "rollout.cache_dtype=bf16", *_IN_BF16]
    )
    own += ["model@actor.model=tiny"]
    return [
        *own,
        "algorithm.max_prompt_length=192",
        "runner.total_iterations=4",
        "runner.eval_every=0",
    ]


def one_gpu(emulated: bool) -> list[str]:
    return [
        *("--config-name", "collocated_grpo_llm"),
        f"cluster.accelerator.kind={'emulated' if emulated else 'cuda'}",
        "cluster.accelerators_per_node=1",
        *(f"cluster.component_placement.{component}=0" for component in _COMPONENTS),
    ]


def _run(folder: Path, *words: str) -> Mapping[str, Any]:
    """Train, and return the run's summary. Ends this process where the run fails, with what it said."""
    runs = folder / "runs"
    command = [
        sys.executable,
        "-m",
        "rlplace.train",
        *words,
        f"runner.output_dir={runs}",
        "runner.sinks=[jsonl]",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(
            f"{done.stderr}\n{_last_of(done.stdout)}\nthe run ended with {done.returncode}"
        )
    (file,) = runs.glob("*/*/summary.json")
    found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _last_of(told: str) -> str:
    return "\n".join(told.splitlines()[-15:])


def _check_memory(summary: Mapping[str, Any]) -> None:
    for component, states in summary["memory"].items():
        for residency, found in states.items():
            room = max(0.05 * found["predicted"], SMALL_BYTES)
            beyond = abs(found["measured"] - found["predicted"])
            what = f"memory of {component} {residency}, from {found['predicted'] / MIB:,.0f} MiB as planned"
            expect(what, beyond / MIB, most=room / MIB, unit=" MiB")


def _spent(summary: Mapping[str, Any]) -> str:
    per_iteration = summary["train_s"] / summary["iterations"]
    stages = ", ".join(
        f"{name} {value / summary['iterations']:.2f}"
        for name, value in summary["seconds"].items()
    )
    return f"{per_iteration:.2f} s per iteration ({stages}), start {summary['start_s']:.0f} s"


RUNS = {"learns": learns, "turns": turns, "vllm": vllm}


if __name__ == "__main__":
    try_named_on_command_line(RUNS)
