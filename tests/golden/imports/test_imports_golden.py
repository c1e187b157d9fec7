"""Whole imports: the configs as in the files beside this one, one of them with its report; UPDATE_GOLDEN=1 rewrites."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from rlplace.config.yaml_text import to_yaml
from rlplace.imports import import_words, render_yaml
from rlplace.placement import HybridComponentPlacement

HERE = Path(__file__).parent
SOURCES = sorted(file.name for file in HERE.glob("*.in.*"))
IN_FULL = "openrlhf_70b_shared"  # has findings and all kinds of results


@pytest.mark.parametrize("name", SOURCES)
def test_import_is_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)  # so that the lines name files without a folder
    imported = import_words(name.split("_")[0], [name])
    stem = name.split(".in.")[0]
    text, expected = render_yaml(imported), HERE / f"{stem}.out.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        expected.write_text(
            text if stem == IN_FULL else to_yaml(imported.config), encoding="utf-8"
        )
    assert (
        yaml.safe_load(text)
        == imported.config
        == yaml.safe_load(expected.read_text(encoding="utf-8"))
    )
    assert stem != IN_FULL or text == expected.read_text(encoding="utf-8")
    HybridComponentPlacement(imported.config, imported.topology)


def test_there_is_one_for_each_library() -> None:
    assert {name.split("_")[0] for name in SOURCES} == {
        "openrlhf",
        "rlinf",
        "verl",
        "roll",
        "slime",
        "skyrl",
        "areal",
    }
