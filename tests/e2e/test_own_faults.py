"""Ranks of a job of one's own are killed: the run goes on, and no sample is lost or learned twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("own_killed_job.py")
ITERATIONS = 6
NUMBERS = 2 * 8  # of an iteration: ranks x rows
YAML = """
cluster:
  accelerators_per_node: 3
  accelerator: {{kind: emulated, memory: 1GiB}}
  component_placement: {{env: 0-1, learner: 2}}
runner: {{total_iterations: {iterations}, output_dir: {folder}/runs}}
checkpoint: {{every: 1}}
env: {{folder: {folder}}}
learner: {{folder: {folder}}}
"""


@pytest.mark.ray
@pytest.mark.slow
def test_no_sample_is_lost_or_learned_twice(tmp_path: Path) -> None:
    text = YAML.format(folder=tmp_path, iterations=ITERATIONS)
    (tmp_path / "killed.yaml").write_text(text)
    ended = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "env_died").exists()
    assert (tmp_path / "learner_died").exists()
    (run,) = (tmp_path / "runs" / "killed").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    events = summary["faults"]["events"]
    replaced = [name for event in events for name in event["replaced"]]
    assert replaced == ["env rank 1", "learner rank 0"]
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    learned = [(line["learner/count"], line["learner/total"]) for line in lines]
    expected = []
    for iteration in range(1, ITERATIONS + 1):
        count = iteration * NUMBERS
        expected.append((count, sum(range(count))))
    assert learned == expected
