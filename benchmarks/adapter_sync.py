"""Bytes and seconds of a weight sync of LoRA factors, by `actor.sync.mode`.

    python benchmarks/adapter_sync.py MODEL [--engine vllm] [--rank 16] [--syncs 4] [--modes all adapter]

`MODEL`: folder of a language model. Each mode is one run in one process: an actor, and an engine that keeps its
accelerator. The first sync sends all weights and does not count; the other numbers are medians. `push s`: until the
actor has written its weights; `load s`: until the engine has loaded what arrived.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODES = ("all", "trainable", "lora", "adapter")
JOB = (
    "hybrid_grpo_llm",
    "cluster.launcher=inline",
    "cluster.component_placement.actor=0",
    "cluster.component_placement.env=1",
    "cluster.component_placement.rollout=2",
    "rollout.enable_offload=false",
    "rollout.kv_cache_memory=64MiB",
    "actor.sync.verify=logprobs",
    "actor.sync.verify_every=1",
    "algorithm.prompts=1",
    "algorithm.samples_per_prompt=2",
    "algorithm.max_prompt_length=64",
    "algorithm.max_new_tokens=4",
    "runner.eval_every=0",
    "runner.sinks=[jsonl]",
)
COLUMNS = {
    "MB sent": ("actor/pushed_bytes", 1e-6),
    "push s": ("actor/push_s", 1.0),
    "load s": ("rollout/load_s", 1.0),
    "largest difference": ("sync/verify_max_diff", 1.0),
}


def measured(mode: str, options: argparse.Namespace) -> list[float]:
    """Return the median of each column over all syncs but the first."""
    with tempfile.TemporaryDirectory() as folder:
        words = (
            *JOB,
            f"actor.model.path={options.model}",
            f"actor.lora_rank={options.rank}",
            f"actor.sync.mode={mode}",
            f"rollout.engine={options.engine}",
            f"runner.total_iterations={options.syncs + 1}",
            f"runner.output_dir={folder}/run",
        )
        command = [sys.executable, "-m", "rlplace.train", *words]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        (file,) = Path(folder).rglob("metrics.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        factor * statistics.median(line[name] for line in lines[1:])
        for name, factor in COLUMNS.values()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--syncs", type=int, default=4)
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    options = parser.parse_args()
    print(f"{'mode':12}" + "".join(f"{name:>20}" for name in COLUMNS))
    for mode in options.modes:
        found = measured(mode, options)
        print(f"{mode:12}" + "".join(f"{value:20.3g}" for value in found), flush=True)


if __name__ == "__main__":
    main()
