"""Runs on written answers, in processes of Ray: workers that are killed cost no row, and the curve stays the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.training import LIMIT_S, ROOT, finish

CONFIG = "sft_tiny"
ITERATIONS = 6
SAME_CURVE = ("actor/loss", "actor/tokens_learned", "actor/grad_norm", "env/rows")


def run(model: Path, output: Path, *faults: list[object]) -> list[dict[str, float]]:
    """Return the metrics of a run with two actor ranks, of which workers are killed."""
    words = [
        "cluster.accelerator.kind=emulated",
        f"actor.model.path={model}",
        "algorithm.prompts=16",
        f"runner.total_iterations={ITERATIONS}",
        "runner.eval_every=0",
        "checkpoint.every=1",
        f"runner.output_dir={output}",
    ]
    given = json.dumps({"config": CONFIG, "overrides": words, "faults": list(faults)})
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.faulty_run", given],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    found = finish(process, output, limit_s=LIMIT_S)
    assert found.code == 0, found.err
    assert found.out.count("sent SIGKILL") == len(faults)
    return found.metrics()


@pytest.mark.slow
def test_workers_that_are_killed_change_nothing(model: Path, tmp_path: Path) -> None:
    whole = run(model, tmp_path / "whole")
    faulty = run(
        model,
        tmp_path / "faulty",
        ["env", 0, 2, None, "SIGKILL"],
        ["actor", 1, 4, None, "SIGKILL"],
    )
    by_iteration = {line["iteration"]: line for line in faulty}
    for line in whole:
        again = by_iteration[line["iteration"]]
        for name in SAME_CURVE:
            assert again[name] == pytest.approx(line[name], rel=1e-4), name
