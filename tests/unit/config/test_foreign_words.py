"""Options and keys of other libraries are told in keys of the config, and these keys are read.

`foreign_words.yaml` has what is typed beside a config, and the fix for each word.
"""

from __future__ import annotations

import copy
import functools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlplace.config.compose import FLAGS, with_hydra, word_of_group
from rlplace.config.option_keys import read_options
from rlplace.config.options import apart
from rlplace.contract.reading import try_job
from rlplace.errors import COMMAND_LINE, Source

ROWS = yaml.load(
    (Path(__file__).parent / "foreign_words.yaml").read_text(encoding="utf-8"),
    Loader=yaml.CSafeLoader,  # of libyaml: each process of the tests reads the rows
)


@functools.cache
def composed(config: str) -> Any:
    (job,) = with_hydra([config])
    return job


def with_keys(config: str, words: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the config with the overrides, file and line of its values)."""
    job = composed(config)
    mapping = copy.deepcopy(dict(job.mapping))
    sources = dict(job.sources)
    for word in words:
        key, _, text = word.partition("=")
        value = yaml.safe_load(text)
        if isinstance(value, str) and re.fullmatch(r"[0-9.]+e-?[0-9]+", value):
            value = float(value)
        block = mapping
        *above, name = key.split(".")
        for step in above:
            if not isinstance(block.get(step), dict):
                block[step] = {}
            block = block[step]
        block[name] = value
        sources = {k: v for k, v in sources.items() if not k.startswith(f"{key}.")}
        for depth in range(1, len(above) + 2):
            path = ".".join(key.split(".")[:depth])
            sources.setdefault(path, Source(file=COMMAND_LINE + word))
        sources[key] = Source(file=COMMAND_LINE + word)
    return mapping, sources


def fixes_of(config: str, words: list[str]) -> list[str]:
    if words[0].startswith("--"):
        _, options = apart(words, FLAGS, lambda word: False)
        meant = read_options(options, composed(config).mapping, word_of_group)
        return [meaning.fix for meaning in meant.values()]
    mapping, sources = with_keys(config, words)
    _, problems = try_job(mapping, sources)
    # As the command line shows a line of the config
    return [problem.pasted or "" for problem in problems]


def is_override(fix: str) -> bool:
    return not re.match("leave out |-m |one of", fix) and "<" not in fix


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['config']} {row['words']}")
def test_a_foreign_word_is_told_in_keys_that_are_read(row: Mapping[str, Any]) -> None:
    config = row["config"]
    assert fixes_of(config, shlex.split(row["words"])) == row["fixes"]
    overrides = [fix for fix in row["fixes"] if is_override(fix)]
    mapping, sources = with_keys(
        config, shlex.split(" ".join([*overrides, row.get("also", "")]))
    )
    _, problems = try_job(mapping, sources)
    assert [problem.key for problem in problems] == []


def test_a_line_without_indent_belongs_to_its_block_in_a_named_job() -> None:
    mapping = {**composed("sac").mapping, "replay.capacity": 50_000}
    config, problems = try_job(mapping, {})
    assert problems == []
    assert config is not None
    assert config.blocks.replay.capacity == 50_000
