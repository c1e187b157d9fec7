"""docs/own_workers.md as it is printed: its scripts run, and print what the page says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks, read_page, shell

PAGE = ROOT / "docs" / "own_workers.md"


@pytest.mark.ray
def test_its_scripts_print_what_the_page_says(tmp_path: Path) -> None:
    read_page(PAGE, tmp_path, shell(tmp_path))
    assert (tmp_path / "logs" / "policy-1.txt").exists()


def test_its_other_code_is_python() -> None:
    for block in blocks(PAGE):
        if block.language == "python":
            ast.parse(block.text)
