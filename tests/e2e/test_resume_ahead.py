"""Runs that generate ahead of learning, are killed and go on: what was generated is learned once, not asked again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.language import tiny
from tests.e2e.learned_run import recorded
from tests.e2e.training import LIMIT_S, ROOT, Finished, placed, train

CONFIG = "disaggregated_grpo_llm"
JOB = (
    "rollout.seed=0",
    "checkpoint.every=1",
    "cluster.launcher=inline",
    *placed("0", "1", "2"),
)
TIMES = (
    "time/",
    "util/",
    "_s",
    "_per_s",
    "_share",
    "rollout/pull",
    "rollout/load",
    "rollout/updates",
)


def learned(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def numbers(run: Finished) -> list[dict[str, Any]]:
    return [
        {
            k: v
            for k, v in line.items()
            if not k.startswith(TIMES) and not k.endswith(TIMES)
        }
        for line in run.metrics()
    ]


def killed(output: Path, file: Path, *job: str) -> Path:
    """Run the job and kill it at some moment after its third checkpoint; return the newest."""
    command = [
        sys.executable,
        "-m",
        "tests.e2e.learned_run",
        str(file),
        "--config-name",
        CONFIG,
    ]
    command += [f"runner.output_dir={output}", *job, "runner.total_iterations=100000"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        ends = time.monotonic() + LIMIT_S
        while (
            not (found := [*output.glob("*/*/checkpoints/latest")])
            or int(found[0].read_text()) < 3
        ):
            assert process.poll() is None, (
                process.stderr.read() if process.stderr else ""
            )
            assert time.monotonic() < ends
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    return found[0].parent / found[0].read_text().strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ahead", "prompts", "env"),
    [(1, 1, "1"), (2, 4, "[1,3]")],
    ids=["in place", "on more env ranks"],
)
def test_what_was_generated_ahead_is_learned_once(
    model: Path, tmp_path: Path, ahead: int, prompts: int, env: str
) -> None:
    """With one version, generation is idle before each, and with one prompt an engine's batches are always the same:
    then nothing depends on timing, and all numbers are equal to the bit."""
    job = (
        *tiny(model),
        *JOB,
        f"algorithm.prompts={prompts}",
        f"algorithm.max_staleness={ahead}",
    )
    checkpoint = killed(tmp_path / "cut", tmp_path / "before", *job)
    saved, generated = (
        int(checkpoint.name),
        json.loads((checkpoint / "run.json").read_text())["generated"],
    )
    done = saved + ahead + 2
    last = f"runner.total_iterations={done}"
    with recorded(tmp_path / "after"):
        words = (*placed("0", env, "2"), last, f"resume={checkpoint}")
        run = train(CONFIG, tmp_path / "cut", *job, *words)
    assert run.code == 0, run.err
    assert ("env: its prompts are dealt to 2 ranks instead of 1" in run.out) == (
        ahead == 2
    )
    assert 1 <= len(generated) <= ahead
    assert (
        f"{len(generated) * prompts} groups that were generated ahead are learned next"
        in run.out
    )
    before, after = learned(tmp_path / "before"), learned(tmp_path / "after")
    parts = [sample for sample in before if sample["version"] < saved] + after
    ids = [(s["version"], s["group"], s["sample"]) for s in parts]
    assert ids == [
        (i, group, sample)
        for i in range(done)
        for group in range(prompts)
        for sample in range(8)
    ]
    for sample in parts:
        oldest = sample["version"] - ahead
        assert (
            max(0, oldest)
            <= min(sample["versions"])
            <= max(sample["versions"])
            <= sample["version"]
        )
        assert (
            str(sample["version"]) not in generated or max(sample["versions"]) < saved
        )
    lines = run.metrics()
    assert [line["iteration"] for line in lines] == list(range(1, done + 1))
    assert all(
        line["actor/samples"] == line["rollout/answers"] == line["env/episodes"]
        for line in lines
    )
    if ahead == 1:
        with recorded(tmp_path / "expected"):
            whole = train(CONFIG, tmp_path / "whole", *job, last)
        assert parts == learned(tmp_path / "expected")
        assert numbers(run) == numbers(whole)


def test_a_job_that_asks_otherwise_now_asks_again(model: Path, tmp_path: Path) -> None:
    job = (*tiny(model), *JOB)
    first = train(
        CONFIG, tmp_path, *job, "algorithm.max_staleness=2", "runner.total_iterations=2"
    )
    assert first.code == 0, first.err
    again = (
        "resume_allow=[algorithm.max_staleness]",
        f"resume={first.folder}/checkpoints/000001",
    )
    run = train(
        CONFIG,
        tmp_path,
        *job,
        "algorithm.max_staleness=1",
        "runner.total_iterations=3",
        *again,
    )
    assert run.code == 0, run.err
    assert (
        "continues after iteration 1; what was generated ahead is asked again\n"
        in run.out
    )
    assert [line["rollout/answers"] for line in run.metrics()] == [32] * 3
