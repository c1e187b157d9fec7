"""docs/own_job.md as it is printed: its jobs are planned and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks, read_page, shell

PAGE = ROOT / "docs" / "own_job.md"


def test_the_first_job_has_forty_lines_in_all_places() -> None:
    first = next(block for block in blocks(PAGE) if block.language == "python")
    assert first.title == "loop.py"
    assert len(first.text.splitlines()) <= 40
    for name in ("README.md", "README.zh.md"):
        assert first.text in [block.text for block in blocks(ROOT / name)]


@pytest.mark.ray
def test_the_first_job_of_the_page_runs_and_learns(tmp_path: Path) -> None:
    read_page(PAGE, tmp_path, shell(tmp_path), of="python loop.py")
    # Whatever the first weights are, 20 steps bring them near.
    (metrics,) = (tmp_path / "runs" / "loop").glob("*/metrics.jsonl")
    lines = metrics.read_text(encoding="utf-8").splitlines()
    errors = [json.loads(line)["rollout/error"] for line in lines]
    assert len(errors) == 20
    assert errors[-1] < 0.2


@pytest.mark.slow  # the same engine on Ray as of the first job
@pytest.mark.ray
def test_the_second_job_of_the_page_runs(tmp_path: Path) -> None:
    read_page(PAGE, tmp_path, shell(tmp_path), of="python my_job.py")
    (run,) = (tmp_path / "runs" / "my_job").iterdir()
    assert (run / "memory.json").is_file()
    assert (run / "checkpoints" / "000005").is_dir()
