"""docs/own_job.md as it is printed: its job is planned and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import ROOT, read_page, shell


@pytest.mark.ray
def test_the_job_of_the_page_runs(tmp_path: Path) -> None:
    read_page(ROOT / "docs" / "own_job.md", tmp_path, shell(tmp_path))
    (run,) = (tmp_path / "runs" / "my_job").iterdir()
    assert (run / "memory.json").is_file()
    assert (run / "checkpoints" / "000005").is_dir()
