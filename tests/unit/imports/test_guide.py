"""The tables of docs/coming_from.md, row by row."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlplace.config.compose import with_hydra
from rlplace.config.read import try_config
from rlplace.imports import Imported, import_words

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "coming_from.md"
BASE = {
    "OpenRLHF": "--vllm_num_engines 8 ",
    "RLinf": "".join(
        f"cluster.component_placement.{c}={n} "
        for c, n in (("actor", "0-7"), ("env", "0-3"), ("rollout", "4-7"))
    ),
    "verl": "trainer.n_gpus_per_node=8 ",
    "NeMo-RL": "cluster.gpus_per_node=8 ",
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
    name = library.lower().replace("-", "_")
    return import_words(name, [BASE[library] + words])


@functools.cache
def a_run() -> dict[str, Any]:
    return with_hydra(["--config-name", "grpo_qwen3_8b"])[0].mapping


@pytest.mark.parametrize(
    "ours", [ours for library, _, ours in rows() if library == "TRL"]
)
def test_a_key_for_what_is_a_program_there_is_one_that_a_run_takes(ours: str) -> None:
    if ours.startswith("nothing: "):
        return
    promised = re.fullmatch(r"`([\w.]+): (.+)`", ours)
    assert promised is not None
    mapping = copy.deepcopy(a_run())
    *path, name = promised[1].split(".")
    block = mapping
    for key in path:
        block = block.setdefault(key, {})
    block[name] = yaml.safe_load(promised[2])
    found, problems = try_config(mapping, {})
    assert found is not None
    assert not problems


@pytest.mark.parametrize(
    ("library", "theirs", "ours"), [row for row in rows() if row[0] != "TRL"]
)
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


def test_the_guide_has_rows_for_five_libraries() -> None:
    assert len(list(rows())) > 50
    assert {library for library, _, _ in rows()} == {*BASE, "TRL"}
