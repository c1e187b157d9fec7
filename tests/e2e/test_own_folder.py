"""A job is found beside its YAML file, whatever the working folder is, by the driver and by workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

JOB = """
from helper import number
from rlplace import Job, Stage, Worker, full


class Probe(Worker):
    def work(self, iteration: int) -> dict[str, float]:
        return {"number": number()}


job = Job(name="beside", components={"probe": Probe}, stages=[Stage("work", full("probe").calls("work"))])
"""
YAML = """
job: my_job_beside:job
cluster:
  accelerators_per_node: 1
  accelerator: {kind: emulated, memory: 1GiB}
  component_placement: {probe: 0}
runner: {total_iterations: 2}
"""


def test_a_run_finds_the_modules_beside_its_file(tmp_path: Path) -> None:
    code = tmp_path / "code"
    elsewhere = tmp_path / "elsewhere"
    code.mkdir()
    elsewhere.mkdir()
    (code / "my_job_beside.py").write_text(JOB)
    (code / "helper.py").write_text("def number() -> float:\n    return 7.0\n")
    (code / "beside.yaml").write_text(YAML)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "rlplace.train",
            str(code / "beside.yaml"),
            f"runner.output_dir={tmp_path / 'runs'}",
        ],
        cwd=elsewhere,
        check=True,
        timeout=240,
        capture_output=True,
    )
    (metrics,) = (tmp_path / "runs").glob("beside/*/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["probe/number"] == 7.0
