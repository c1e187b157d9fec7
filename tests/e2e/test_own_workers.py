"""docs/own_workers.md as it is printed: its scripts run, and print what the page says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks, read_page, shell

PAGE = ROOT / "docs" / "own_workers.md"
SCRIPTS = ("pipeline.py", "messages.py", "learner.py", "weights.py", "failing.py")
FIRST = "pipeline.py"


def test_its_scripts_are_all_tried() -> None:
    assert tuple(block.title for block in blocks(PAGE) if block.title) == SCRIPTS


# Each script starts a Ray. What the scripts show has tests in tests/contract, on Ray too.
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("script", SCRIPTS)
def test_its_scripts_print_what_the_page_says(script: str, tmp_path: Path) -> None:
    read_page(PAGE, tmp_path, shell(tmp_path), of=f"python {script}")
    if script == FIRST:
        assert (tmp_path / "logs" / "policy-1.txt").exists()


def test_its_other_code_is_python() -> None:
    for block in blocks(PAGE):
        if block.language == "python":
            ast.parse(block.text)
