"""A placement text is read in one direction: what is wrong is a value, and its words are made when all is read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.codes import codes
from rlplace.placement.language import complaints
from rlplace.placement.language.complaints.problems import (
    MOST_MISTAKES,
    WRITERS,
    problems_of,
)
from rlplace.placement.language.faults import Fault
from rlplace.placement.language.grammar import read_segments
from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.lines import read_line
from rlplace.placement.language.text import write
from rlplace.placement.machines.pools import accelerator_pool
from tests.unit.placement.placing import EIGHT

LANGUAGE = Path(complaints.__file__).parent.parent
WORDS = "rlplace.placement.language.complaints"
# Modules that read a text, in the order of its way.
READERS = ("text", "faults", "grammar", "fit", "lines", "presets", "resolve")


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_knows_neither_words_nor_problems(reader: str) -> None:
    tree = ast.parse((LANGUAGE / f"{reader}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not str(node.module).startswith((WORDS, "rlplace.codes"))
            assert "Problem" not in {alias.name for alias in node.names}


def errors() -> Iterator[tuple[str, str]]:
    """Code and name of the error of every `Fault(...)` that gives both as literals."""
    for file in LANGUAGE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                not isinstance(node, ast.Call)
                or getattr(node.func, "id", "") != "Fault"
            ):
                continue
            code, _, *rest = node.args
            error = rest[0] if rest else ast.Constant("")
            if isinstance(code, ast.Constant) and isinstance(error, ast.Constant):
                yield str(code.value), str(error.value)


def test_every_fault_and_every_writer_has_a_template() -> None:
    found = set(errors())
    assert ("not-a-hyphen", "") in found
    for code, error in sorted(found | set(WRITERS)):
        assert error in codes()[code].texts, (code, error)


def test_a_fault_is_a_value_until_the_text_is_read() -> None:
    faults: list[Fault] = []
    text = write("0-3,9-x", "a.actor", "actor", {})
    pool = accelerator_pool(EIGHT.nodes)
    assert read_segments(text, pool, faults) is None
    (fault,) = faults
    assert (fault.code, fault.error, fault.text) == (
        "bad-placement",
        "unreadable",
        text,
    )
    assert fault.span == (4, 7)
    (problem,) = problems_of(faults)
    assert problem.what == "cannot read '9-x'"
    assert (problem.key, problem.got, problem.span) == ("a.actor", "0-3,9-x", (4, 7))


def test_of_one_text_only_the_first_faults_are_told() -> None:
    faults: list[Fault] = []
    text = write(",".join("x" * 20), "a.actor", "actor", {})
    other = write("y", "a.env", "env", {})
    pool = accelerator_pool(EIGHT.nodes)
    for one in (text, other):
        read_segments(one, pool, faults)
    assert len(faults) == 21
    told = [problem.key for problem in problems_of(faults)]
    assert told == ["a.actor"] * MOST_MISTAKES + ["a.env"]


def test_a_line_is_plain_data() -> None:
    written = {"accelerators": "0-7", "accelerators_per_rank": 4, "process": "shared"}
    groups = NodeGroups(EIGHT)
    faults: list[Fault] = []
    whole = write(written, "a.actor", "actor", {})
    line = read_line(whole, ("actor",), groups, faults)
    assert not faults
    assert line is not None
    assert isinstance(line.asked, tuple)
    assert [(s.accelerators, s.ranks) for s in line.asked] == [(range(8), range(2))]
    assert line.where.key == "a.actor.accelerators"
    assert line.shares_process


def test_pieces_that_yaml_cut_off_stay_keys_of_a_line_and_are_joined_in_a_block() -> (
    None
):
    line = write({"placement": "0-3", "5-7": None}, "a.actor", "actor", {})
    assert line.pieces == ("5-7",)
    assert line.entries["placement"].text == "0-3"
    block = write({"actor": "0-3", "5-7": None}, "a", "a", {}, ("actor",))
    assert block.pieces == ("5-7",)
    assert block.entries["actor"].text == "0-3,5-7"
    assert list(block.entries) == ["actor"]
