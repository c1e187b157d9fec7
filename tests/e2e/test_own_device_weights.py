"""Weights of a job of one's own from accelerator to accelerator: a lost rank takes all that exchange them back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("own_device_job.py")
ROOT = Path(__file__).parents[2]
ITERATIONS = 5
YAML = """
cluster:
  accelerators_per_node: 3
  accelerator: {{kind: emulated, memory: 1GiB}}
  component_placement: {{learner: 0-1, sampler: 1-2}}
runner: {{total_iterations: {iterations}, output_dir: {folder}/runs}}
checkpoint: {{every: 1}}
learner: {{enable_offload: true}}
sampler: {{enable_offload: true, folder: {folder}}}
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_goes_on_after_a_rank_that_takes_weights_is_lost(tmp_path: Path) -> None:
    text = YAML.format(folder=tmp_path, iterations=ITERATIONS)
    (tmp_path / "on_devices.yaml").write_text(text)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "sampler_died").exists()
    (run,) = (tmp_path / "runs" / "on_devices").iterdir()
    assert "2 copies on accelerators" in (run / "plan.txt").read_text()
    (event,) = json.loads((run / "summary.json").read_text())["faults"]["events"]
    assert event["went_back"]
    # A new rank cannot join a group of NCCL: all ranks of both components begin anew.
    assert sorted(event["replaced"]) == [
        "learner rank 0",
        "learner rank 1",
        "sampler rank 0",
        "sampler rank 1",
    ]
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["sampler/weight"] for line in lines] == list(range(ITERATIONS))
    for line in lines:
        assert line["learner/pushed_shared_tensor_bytes"] == 4
        assert line["learner/pushed_gloo_bytes"] == 4
        assert line["sampler/pull_bytes"] == 8
