"""The tables of docs/coming_from.md, row by row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from rlplace.imports import Imported, import_words

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "coming_from.md"
BASE = {
    "OpenRLHF": "--vllm_num_engines 8 ",
    "RLinf": "".join(
        f"cluster.component_placement.{c}={n} " for c, n in (("actor", "0-7"), ("env", "0-3"), ("rollout", "4-7"))
    ),
    "verl": "trainer.n_gpus_per_node=8 ",
}


def rows() -> Iterator[tuple[str, str, str]]:
    library = ""
    for line in GUIDE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            library = line.removeprefix("## ")
        elif row := re.fullmatch(r"\| `(.+?)` \| (.+) \|", line):
            yield library, row[1], row[2]


def value_at(config: object, key: str) -> object:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def imported_with(library: str, words: str) -> Imported:
    return import_words(library.lower(), [BASE[library] + words])


@pytest.mark.parametrize(("library", "theirs", "ours"), list(rows()))
def test_row(library: str, theirs: str, ours: str) -> None:
    imported = imported_with(library, theirs)
    if promised := re.fullmatch(r"`([\w.]+): (.+)`", ours):
        assert value_at(imported.config, promised[1]) == yaml.safe_load(promised[2])
    elif absent := re.fullmatch(r"no `([\w.]+)`", ours):
        assert value_at(imported.config, absent[1]) is None
        assert value_at(imported_with(library, "").config, absent[1]) is not None
    else:
        assert ours.startswith("nothing: ")
        outcomes = {r.outcome for r in imported.results if str(r.setting) in theirs}
        assert outcomes
        assert outcomes <= {"unmapped", "implied"}


def test_the_guide_has_rows_for_three_libraries() -> None:
    assert len(list(rows())) > 50
    assert {library for library, _, _ in rows()} == {*BASE}
