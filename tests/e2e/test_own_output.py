"""The output of a script with a job of one's own, whose reader leaves early or whose disk is full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "recipes" / "pipeline.py"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    script = subprocess.Popen(
        [sys.executable, str(RECIPE), "--dry-run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    script.stdout.close()
    assert script.stderr is not None
    errors = script.stderr.read()
    assert script.wait(timeout=120) == 0
    assert errors == ""


def test_a_full_disk_is_told() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, str(RECIPE), "--dry-run"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 1
    assert ended.stderr == "standard output: cannot write: No space left on device\n"
