"""The Slurm script of docs/cluster.md, with stand-ins for what it calls."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks

PROGRAMS = {
    "scontrol": "printf 'one\\ntwo\\n'",
    "srun": 'echo "srun $* ($SRUN_CPUS_PER_TASK cpus)" >>calls',
    "sleep": ":",
    "rlplace": "trap 'echo saved >>calls; exit 143' TERM\necho started >>calls\nwhile :; do /bin/sleep 0.05; done",
}


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_run_saves_when_the_script_gets_the_signal(tmp_path: Path, nodes: int) -> None:
    (script,) = [block.text for block in blocks(ROOT / "docs" / "cluster.md") if block.title == "train.sbatch"]
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").touch()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    calls = tmp_path / "calls"
    slurm = {"SLURM_NNODES": str(nodes), "SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_NODELIST": "one,two"}
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, **slurm, "PATH": path}
    job = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=variables, start_new_session=True)
    try:
        while not (calls.exists() and "started" in calls.read_text(encoding="utf-8")):
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # the script, and the run that it has started
    lines = calls.read_text(encoding="utf-8").splitlines()
    assert lines.count("saved") == 1
    steps = [line for line in lines if line.startswith("srun ")]
    assert len(steps) == nodes
    assert all(line.endswith("(64 cpus)") for line in steps)
