"""Where the time of a language model's iteration goes: a short real run, its sync and its moves as shares.

    python benchmarks/lm_iteration.py [name of a model, tiny] [iterations, 6] [overrides ...] [--ratios]

Trains `hybrid_grpo_llm` with vLLM, in which one engine sleeps at level 2 while the actor learns on its accelerator and
another stays awake. Shares are of the median iteration; the first one, in which everything is made, does not count.
`--ratios` also runs the two benchmarks of its halves: generating against vLLM alone, learning against a plain loop.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Answers of 8 tokens take tiny's two layers no time at all: these are long enough for shares to mean something.
TINY = ("algorithm.max_new_tokens=128", "algorithm.prompts=16")
STAGES = ("rollout", "learn", "sync", "moves", "overhead")
PARTS = {
    "sync": ("actor/push_s", "rollout/pull_s", "rollout/load_s"),
    "rollout": ("rollout/policy_s", "rollout/wait_s"),
    "learn": ("actor/learn_s",),
}


def train(model: str, iterations: int, overrides: Sequence[str], folder: Path) -> list[dict[str, float]]:
    """Metrics by iteration."""
    command = [sys.executable, "-m", "rlplace.train", "--config-name", "hybrid_grpo_llm", f"model@actor.model={model}"]
    command += [f"runner.total_iterations={iterations}", "runner.eval_every=0", "runner.sinks=[jsonl]"]
    command += [f"runner.output_dir={folder}", *(TINY if model == "tiny" else ()), *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (metrics,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def show(lines: Sequence[Mapping[str, float]]) -> None:
    def median(name: str) -> float:
        return statistics.median(line.get(name, 0.0) for line in lines)

    whole = median("time/iteration_s")
    print(f"{len(lines)} iterations of {whole:.3f} s, {median('rollout/tokens'):,.0f} tokens generated in each")
    for stage in STAGES:
        seconds = median(f"time/{stage}_s")
        parts = ", ".join(f"{name} {median(name):.3f}" for name in PARTS.get(stage, ()))
        print(f"    {stage:<9} {seconds:8.3f} s  {seconds / whole:6.1%}    {parts}".rstrip())
    size, seconds = median("actor/pushed_bytes"), median("time/sync_s")
    print(f"    a sync moves {size / 1e6:.1f} MB, {size / seconds / 1e9:.2f} GB/s with loading")
    apart = max(line["actor/mismatch_max"] for line in lines)
    probed = max(line.get("sync/verify_max_diff", 0.0) for line in lines)
    print(f"    engine and actor differ by {apart:.1e} at most on sampled tokens, {probed:.1e} on the probe, if asked")


def main(arguments: list[str]) -> None:
    ratios = "--ratios" in arguments
    rest = [a for a in arguments if a != "--ratios"]
    overrides, plain = [a for a in rest if "=" in a], [a for a in rest if "=" not in a]
    model, iterations = [*plain, *("tiny", "6")[len(plain) :]]
    with tempfile.TemporaryDirectory() as folder:
        show(train(model, int(iterations), overrides, Path(folder))[1:])
    for script in ("generation.py", "lm_learning.py") if ratios else ():
        print(f"\n{script}", flush=True)
        subprocess.run([sys.executable, str(ROOT / "benchmarks" / script)], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
