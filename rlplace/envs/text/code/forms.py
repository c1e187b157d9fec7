"""Reads tests of code in the forms of public data sets, as checks that a judge process can run.

::

    "assert f(1) == 2", or a list of such texts                       MBPP
    "def check(candidate): ..." with the fact entry_point             HumanEval
    "def test_f(): ...", or a class of unittest.TestCase              pytest, unittest
    {"inputs": [...], "outputs": [...]}, perhaps with "fn_name"       APPS, TACO, CodeContests
    [{"input": ..., "output": ..., "testtype": ...}, ...]             LiveCodeBench
    any of these as a JSON text

Inputs and outputs are those of a program, or the arguments and the result of a function if `fn_name` names one.
Tests in any other form, and tests that assert nothing, are refused with a ValueError.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlplace.json_text import parsed
from rlplace.python_code import parse
from rlplace.units import clipped

Check = dict[str, Any]
# Facts that name the function under test
_ENTRIES = ("entry_point", "fn_name", "func_name")
# Facts whose text runs before each test
_BEFORE = ("test_setup_code", "test_imports")
_INPUTS = ("inputs", "input", "stdin", "std_in")
_OUTPUTS = ("outputs", "output", "stdout", "std_out", "expected_output")
_CASES = ("test_cases", "testcases", "tests", "cases")
# Calls of such names assert something
_ASSERTS = re.compile(r"(assert|expect|fail|raises|warns)\w*", re.IGNORECASE)
# Functions that run tests; calls of them are removed from tests
_RUNNERS = ("unittest.main", "pytest.main", "main")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Characters of tests that an error shows
_SHOWN = 60
_FORMS = (
    "accepted forms: assert statements, test functions of pytest, classes of unittest, check(candidate) with the fact "
    "entry_point, inputs and outputs"
)


def read(
    tests: object, facts: Mapping[str, object] | None = None, *, prompted: str = ""
) -> list[Check]:
    """Return the checks of a test. Raises ValueError with the reason if the tests have a form that is unknown here.

    `tests`: the fact `tests` of an episode. `facts`: all facts of the episode; some name the function under test.
    `prompted`: source text of functions that the prompt defines, and that the tests may use.
    """
    facts = facts or {}
    entry = next((str(facts[name]) for name in _ENTRIES if facts.get(name)), "")
    set_up = [_texts(facts[name]) for name in _BEFORE if facts.get(name)]
    before = "\n".join([prompted, *set_up])
    checks = list(_read(tests, entry, before))
    if not checks:
        raise ValueError(f"there are no tests in {_shown(tests)}; {_FORMS}")
    return checks


def _read(tests: object, entry: str, before: str) -> Iterator[Check]:
    """Yield the checks of tests in any form."""
    if isinstance(tests, str):
        # A JSON text is tests in another form
        structure = _json(tests)
        if isinstance(structure, dict | list):
            yield from _read(structure, entry, before)
        else:
            yield from _of_text(tests, entry, before)
    elif isinstance(tests, Mapping):
        yield from _of_mapping(tests, entry, before)
    elif isinstance(tests, Sequence) and not isinstance(tests, bytes | bytearray):
        for part in tests:
            yield from _read(part, entry, before)
    else:
        raise ValueError(f"tests are a {type(tests).__name__}; {_FORMS}")


def _json(text: str) -> object:
    """Return the structure of a JSON text; None for any other text."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return parsed(text)
    except ValueError:
        return None


def _texts(value: object) -> str:
    """Return a text, or the texts of a list, as one text of Python."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return "\n".join(str(part) for part in value)
    raise ValueError(f"a text of Python is expected, got a {type(value).__name__}")


def _shown(value: object) -> str:
    return clipped(repr(value), _SHOWN)


# ── inputs and outputs ───────────────────────────────────────────────────────────────────────────────────────────────


def _of_mapping(tests: Mapping[str, Any], entry: str, before: str) -> Iterator[Check]:
    """Yield the checks of a mapping that has inputs and outputs, or other tests under a usual key."""
    entry = next((str(tests[name]) for name in _ENTRIES if tests.get(name)), entry)
    given = next((name for name in _INPUTS if name in tests), None)
    expected = next((name for name in _OUTPUTS if name in tests), None)
    if given is None or expected is None:
        inner = next((name for name in _CASES if name in tests), None)
        if inner is None:
            keys = ", ".join(map(str, tests)) or "none"
            raise ValueError(f"tests have the keys {keys}; {_FORMS}")
        yield from _read(tests[inner], entry, before)
        return
    inputs, outputs = tests[given], tests[expected]
    kind = str(tests.get("testtype") or tests.get("type") or "")
    functional = bool(entry) and "std" not in kind
    # One pair, or as many inputs as outputs
    if (
        given in ("inputs", "input")
        and isinstance(inputs, list)
        and isinstance(outputs, list)
    ):
        if len(inputs) != len(outputs):
            raise ValueError(
                f"there are {len(inputs)} inputs and {len(outputs)} outputs"
            )
        for one, wanted in zip(inputs, outputs, strict=True):
            yield _called(entry, one, wanted) if functional else _program(one, wanted)
    elif functional or kind.startswith("func"):
        if not entry:
            raise ValueError(
                "tests call a function, but no fact entry_point or fn_name names it"
            )
        yield _called(entry, inputs, outputs)
    else:
        yield _program(inputs, outputs)


def _program(given: object, expected: object) -> Check:
    """Return the check that a program prints `expected` for the standard input `given`."""
    return {"kind": "program", "stdin": _lines(given), "stdout": _lines(expected)}


def _lines(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(_lines(part) for part in value)
    return str(value)


def _called(entry: str, given: object, expected: object) -> Check:
    """Return the check that the function `entry` returns `expected` for the arguments `given`.

    If several results are right, the check has all of them. A text is read as in LiveCodeBench: each line is the JSON
    value of one argument.
    """
    if isinstance(given, str):
        try:
            arguments: list[Any] = [
                parsed(line) for line in given.split("\n") if line.strip()
            ]
        except ValueError:
            arguments = [given]
        if isinstance(expected, str):
            with contextlib.suppress(ValueError):
                expected = parsed(expected)
    else:
        arguments = given if isinstance(given, list) else [given]
    results = [expected]
    # APPS writes the result as a list of length one
    if not isinstance(given, str) and isinstance(expected, list) and len(expected) == 1:
        results.append(expected[0])
    return {"kind": "call", "entry": entry, "given": arguments, "expected": results}


# ── texts of Python ──────────────────────────────────────────────────────────────────────────────────────────────────


def _of_text(text: str, entry: str, before: str) -> Iterator[Check]:
    """Yield the checks of a text of Python."""
    if not text.strip():
        raise ValueError("the text of the tests is empty")
    try:
        tree = parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"tests are no Python: {error}: {_shown(text)}") from error
    body = [part for part in tree.body if not _is_main(part)]
    if len(body) < len(tree.body):
        text = ast.unparse(ast.Module(body, []))
    _check_imports(body)
    common = {"text": text, "before": before, "entry": entry}

    # Test functions and classes
    functions = list(_test_functions(body))
    if functions and any(_asserts(part) for part in body):
        for kind, of, name in functions:
            yield {**common, "kind": kind, "function": name, "of": of}
        return
    # Statements that run and assert
    defined = {
        part.name for part in body if isinstance(part, _Function) and _asserts(part)
    }
    running = [part for part in body if not isinstance(part, _Function | ast.ClassDef)]
    if any(_asserts(part) or _calls(part, defined) for part in running):
        yield {**common, "kind": "text"}
        return
    if "check" in defined:
        if not entry:
            raise ValueError(
                "tests define check(candidate), but no fact entry_point names the candidate"
            )
        yield {**common, "kind": "check"}
        return
    raise ValueError(f"tests assert nothing: {_shown(text)}; {_FORMS}")


def _is_main(part: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ == "__main__": ...`, or calls a function that runs tests."""
    if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
        return ast.unparse(part.value.func) in _RUNNERS
    return isinstance(part, ast.If) and "__name__" in ast.dump(part.test)


def _asserts(part: ast.AST) -> bool:
    """Return whether a statement contains an assertion, or raises an exception."""
    for node in ast.walk(part):
        if isinstance(node, ast.Assert | ast.Raise):
            return True
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if _ASSERTS.match(name):
                return True
    return False


def _calls(part: ast.AST, names: set[str]) -> bool:
    """Return whether a statement calls a function of one of the names."""
    calls = [node.func for node in ast.walk(part) if isinstance(node, ast.Call)]
    return any(isinstance(call, ast.Name) and call.id in names for call in calls)


def _test_functions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str, str]]:
    """Yield (kind of check, name of the class or "", name) of each test function and test method.

    Raises ValueError for a test function that needs fixtures.
    """
    for part in body:
        if isinstance(part, _Function) and part.name.startswith("test"):
            _check_arguments(part, 0)
            yield "function", "", part.name
        if isinstance(part, ast.ClassDef):
            bases = [ast.unparse(base) for base in part.bases]
            kind = (
                "unittest"
                if any(base.endswith("TestCase") for base in bases)
                else "function"
            )
            if kind == "function" and not part.name.startswith("Test"):
                continue
            for method in part.body:
                if isinstance(method, _Function) and method.name.startswith("test"):
                    _check_arguments(method, 1)
                    yield kind, part.name, method.name


def _check_arguments(function: _Function, own: int) -> None:
    """Raise ValueError if a test function has arguments that no mark gives it.

    `own`: number of leading arguments that Python itself gives.
    """
    arguments = [one.arg for one in function.args.args[own:]]
    needed = arguments[: len(arguments) - len(function.args.defaults)]
    marks = " ".join(ast.unparse(mark) for mark in function.decorator_list)
    missing = [name for name in needed if not re.search(rf"\b{name}\b", marks)]
    if missing:
        names = ", ".join(missing)
        raise ValueError(
            f"{function.name} needs the fixtures {names}, which the judge does not have"
        )


def _check_imports(body: Sequence[ast.stmt]) -> None:
    """Raise ValueError if tests import pytest or numpy, and it is not installed."""
    for part in body:
        names = []
        if isinstance(part, ast.Import):
            names = [alias.name for alias in part.names]
        if isinstance(part, ast.ImportFrom) and part.module and not part.level:
            names = [part.module]
        for name in names:
            top = name.partition(".")[0]
            if (
                top in ("pytest", "numpy", "pandas", "scipy")
                and importlib.util.find_spec(top) is None
            ):
                raise ValueError(f"tests import {top}, which is not installed")
