"""Whole imports, letter by letter as in the files beside this one; UPDATE_GOLDEN=1 rewrites them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from rlplace.imports import render_yaml
from rlplace.imports.command import import_words
from rlplace.placement import HybridComponentPlacement

HERE = Path(__file__).parent
SOURCES = sorted(file.name for file in HERE.glob("*.in.*"))


@pytest.mark.parametrize("name", SOURCES)
def test_import_is_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)  # so that the lines name files without a folder
    imported = import_words(name.split("_")[0], [name])
    text = render_yaml(imported)
    expected = HERE / (name.split(".in.")[0] + ".out.yaml")
    if os.environ.get("UPDATE_GOLDEN"):
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8")
    assert yaml.safe_load(text) == imported.config
    HybridComponentPlacement(imported.config, imported.topology)


def test_there_is_one_for_each_library() -> None:
    assert {name.split("_")[0] for name in SOURCES} == {"openrlhf", "rlinf", "verl", "roll", "slime", "skyrl", "areal"}
