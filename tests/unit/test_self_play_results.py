"""The results of recipes/self_play.py: what is kept of each run, and the page and the picture made of it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from benchmarks import self_play
from benchmarks.self_play import PAGE, PICTURE, RECIPE, SEEDS, kept, picture, table_of

KEPT = kept()


def test_the_page_and_the_picture_are_those_of_the_kept_runs() -> None:
    """python benchmarks/self_play.py --write"""
    assert table_of(KEPT) in PAGE.read_text(encoding="utf-8")
    assert PICTURE.read_text(encoding="utf-8") == picture(KEPT)
    assert ElementTree.fromstring(picture(KEPT)).tag.endswith("svg")


def test_kept_runs_have_the_shipped_settings() -> None:
    """Other settings need other runs: python benchmarks/self_play.py train"""
    file = RECIPE.with_suffix(".yaml")
    shipped = self_play.settings_of(yaml.safe_load(file.read_text(encoding="utf-8")))
    assert [run.seed for run in KEPT if run.settings != shipped] == []


def test_all_seeds_that_were_announced_are_kept() -> None:
    assert tuple(run.seed for run in KEPT) == SEEDS


def test_what_is_kept_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_play, "KEPT", tmp_path)
    self_play.keep(KEPT[0])
    assert kept() == KEPT[:1]


def test_a_table_is_replaced_in_its_page() -> None:
    page = "before\n\n| seed |\n| old |\n\nafter\n"
    written = self_play.with_table(page, "| seed | Elo |\n| new |")
    assert written == "before\n\n| seed | Elo |\n| new |\n\nafter\n"
