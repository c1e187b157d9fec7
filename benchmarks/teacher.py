"""A tiny teacher learns to reverse words by SFT, and a smaller student learns it from the teacher by distillation.

    python benchmarks/teacher.py FOLDER [--distill 400]

A row is four of six letters, and the same letters from the last to the first: `cgcd=` and `dcgc`. Of the 1,296 words,
1,000 are for training and 200 are held out. The student begins with a short SFT on the same rows; distillation has only
their prompts. The program prints the share of held-out words that a greedy answer reverses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import rlplace
from rlplace.api.run import Run
from tests.tiny_lm import tiny_model

LETTERS = "bcdfgp"
TRAINED = 1_000  # words for training
HELD_OUT = 200
SHARED = (
    "cluster.launcher=inline",
    "cluster.accelerator.kind=emulated",
    "cluster.component_placement.actor=0",
    "env.task=prompts",
    "env.rewards=[{name: exact_match}]",
    "runner.eval_prompts=null",
    "runner.eval_every=20",
    "runner.sinks=[jsonl]",
)


def write_rows(folder: Path) -> tuple[str, ...]:
    """Write the words for training and the held-out words. Return the overrides that name both files."""
    words = ["".join(letters) for letters in itertools.product(LETTERS, repeat=4)]
    random.Random(0).shuffle(words)
    parts = {
        "kwargs": words[:TRAINED],
        "eval_kwargs": words[TRAINED : TRAINED + HELD_OUT],
    }
    overrides = []
    for key, part in parts.items():
        rows = [{"prompt": f"{word}=", "answer": word[::-1]} for word in part]
        file = folder / f"{key}.jsonl"
        lines = [json.dumps(row) for row in rows]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        overrides.append(f"env.{key}={{path: {file}}}")
    return tuple(overrides)


def taught_by_rows(
    name: str, model: Path, iterations: int, data: Sequence[str]
) -> Path:
    """Train a model by SFT, print its held-out accuracy, and return the folder of the trained model."""
    run = rlplace.train(
        "sft_tiny",
        (
            *SHARED,
            *data,
            f"actor.model.path={model}",
            f"runner.total_iterations={iterations}",
            f"runner.output_dir={model.parent / 'runs' / name}",
        ),
    )
    show(name, run, "eval/accuracy")
    return Path(run.folder) / "policy"


def taught_by_teacher(
    student: Path, teacher: Path, iterations: int, data: Sequence[str], output: Path
) -> None:
    """Distil the teacher into the student, and print the held-out accuracy of the student."""
    run = rlplace.train(
        "hybrid_grpo_llm",
        (
            *SHARED,
            *data,
            "cluster.accelerators_per_node=4",
            "cluster.component_placement.env=0",
            "cluster.component_placement.rollout=1",
            "+cluster.component_placement.teacher=2",
            "model@actor.model=tiny",
            f"actor.model.path={student}",
            f"+teacher.model.path={teacher}",
            "actor.optimizer.lr=1.0e-3",
            "algorithm.name=distill",
            "algorithm.prompts=32",
            "algorithm.samples_per_prompt=2",
            "algorithm.max_prompt_length=8",
            "algorithm.max_new_tokens=6",
            "rollout.engine=transformers",
            "rollout.kv_cache_memory=16MiB",
            "+env.chat=false",
            f"runner.total_iterations={iterations}",
            f"runner.output_dir={output}",
        ),
    )
    show("student, distilled", run, "eval/reward")


def show(name: str, run: Run, metric: str) -> None:
    """Print a metric of the evaluations of a run, by iteration."""
    print(name)
    for numbers in run.rows():
        if metric in numbers:
            print(f"  {numbers['iteration']:5}  {numbers[metric]:6.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for rows, models and runs")
    parser.add_argument("--distill", type=int, default=400, help="iterations")
    given = parser.parse_args()
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    data = write_rows(folder)
    large = tiny_model(folder / "large", hidden=128, seed=1)
    small = tiny_model(folder / "small", hidden=64, seed=2)
    teacher = taught_by_rows("teacher", large, 250, data)
    student = taught_by_rows("student", small, 40, data)
    taught_by_teacher(student, teacher, given.distill, data, folder / "runs" / "distil")


if __name__ == "__main__":
    main()
