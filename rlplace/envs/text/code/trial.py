"""Runs the checks of a test: Python source texts, calls of functions, and programs with standard input and output."""

from __future__ import annotations

import ast
import asyncio
import builtins
import importlib
import inspect
import math
import numbers
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from rlplace.envs.text.code import wire
from rlplace.envs.text.code.judge import TESTS, Judge
from rlplace.envs.text.code.names import TestSource

_LONGEST_OUTPUT = 16 << 20
_CHUNK = 1 << 16
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
# Largest difference of numbers that count as equal
_RELATIVE = 1e-6
_ABSOLUTE = 1e-9
# Functions of NumPy that find an empty array equal to any array
_OF_NUMPY = ("allclose", "isclose")
_OF_NUMPY_TESTING = (
    "assert_allclose",
    "assert_almost_equal",
    "assert_array_almost_equal",
    "assert_array_equal",
    "assert_equal",
)
# Attribute of a module whose comparisons were made strict
_STRICT = "_rlplace_strict"
# Name of `Judge.apply_changes` in the namespace of a test
_APPLY_CHANGES = "__apply_changes__"


class Trial:
    """Runs checks on the code of one answer. The starter starts the answer processes."""

    def __init__(self, code: str, control: socket.socket) -> None:
        """`control`: socket to the starter."""
        self._code = code
        self._control = control
        self._judge: Judge | None = None

    def passes(self, check: dict[str, Any]) -> bool:
        """Return whether the code passes one check."""
        if check["kind"] == "program":
            return self._program(check)
        judge = self._running()
        if judge is None or judge.line.broken:
            return False
        source = TestSource(str(check.get("text", "")))
        names = judge.names(source, check.get("entry", ""))
        _make_importable(names, source)
        if check["kind"] == "call":
            passed = _call_passes(names, check)
        else:
            passed = _text_passes({**names, _APPLY_CHANGES: judge.apply_changes}, check)
        # An answer that has ended its process passes no check, even if the test catches the exception
        return passed and not judge.line.broken

    def _running(self) -> Judge | None:
        """Return the judge of the answer process that has run the code; None if the code failed."""
        if self._judge is None:
            here, there = socket.socketpair()
            socket.send_fds(self._control, [b"f"], [there.fileno()])
            there.close()
            self._judge = Judge(here)
            try:
                if not self._judge.run(self._code):
                    self._judge.line.broken = True
            except wire.Broken:
                self._judge.line.broken = True
        return self._judge

    def end(self) -> None:
        """End the answer process that serves functions. The starter can start the next process only then."""
        if self._judge is not None:
            self._judge.line.close()
            self._judge = None
            self._control.recv(4, socket.MSG_WAITALL)

    def _program(self, check: dict[str, Any]) -> bool:
        """Return whether the code, run as a program, prints the expected text for a standard input."""
        self.end()
        reader, writer = os.pipe()
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as code:
            given.write(check["stdin"].encode("utf-8", "replace"))
            given.seek(0)
            code.write(self._code.encode("utf-8", "replace"))
            code.seek(0)
            fds = [given.fileno(), writer, code.fileno()]
            socket.send_fds(self._control, [b"p"], fds)
        os.close(writer)
        printed = _read(reader)
        os.close(reader)
        reply = self._control.recv(4, socket.MSG_WAITALL)
        ended_well = reply == bytes(4)
        return ended_well and equal_output(printed, check["stdout"])


def _make_importable(names: dict[str, Any], source: TestSource) -> None:
    """Make modules such as `solution`, from which tests import the names of the answer.

    `from solution import *` leaves out the names that the test defines itself or imports from other modules.
    """
    for name in source.answers:
        module = ModuleType(name)
        module.__dict__.update(names)
        module.__dict__["__all__"] = [each for each in names if each not in source.own]
        sys.modules[name] = module


def _read(fd: int) -> str:
    """Return the text that a program writes into a pipe until its end; "" for more than the longest output."""
    text = b""
    while chunk := os.read(fd, _CHUNK):
        text += chunk
        if len(text) > _LONGEST_OUTPUT:
            return ""
    return text.decode("utf-8", "replace")


# ── comparisons ──────────────────────────────────────────────────────────────────────────────────────────────────────


def equal_output(printed: str, expected: str) -> bool:
    """Return whether two outputs have equal lines. Blanks at the ends of lines do not count.

    A number that has a decimal point in the expected text may differ by a millionth.
    """
    lines = printed.rstrip().splitlines()
    wanted = expected.rstrip().splitlines()
    if len(lines) != len(wanted):
        return False
    return all(map(_equal_line, lines, wanted))


def _equal_line(line: str, wanted: str) -> bool:
    if line.strip() == wanted.strip():
        return True
    parts, expected = line.split(), wanted.split()
    return len(parts) == len(expected) and all(map(_equal_part, parts, expected))


def _equal_part(part: str, wanted: str) -> bool:
    """Return whether two words are equal, or numbers that are close to each other."""
    if part == wanted:
        return True
    if "." not in wanted:
        return False
    if not _NUMBER.fullmatch(part) or not _NUMBER.fullmatch(wanted):
        return False
    return _close(float(part), float(wanted))


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _call_passes(names: dict[str, Any], check: dict[str, Any]) -> bool:
    """Return whether a function of the answer returns the expected value. It may be a method of a class Solution."""
    try:
        function = _under_test(names, check["entry"])
        value = _listed(function(*check["given"]))
        return any(_equal(value, _listed(one)) for one in check["expected"])
    except BaseException:  # noqa: BLE001  # whatever the answer raises, the check has failed
        return False


def _under_test(names: dict[str, Any], entry: str) -> Any:
    """Return the function under test. `entry`: its name, or `Solution().twoSum` for a method as LeetCode has it."""
    name = entry.rpartition(".")[2]
    if name in names:
        return names[name]
    return getattr(names["Solution"](), name)


def _equal(value: Any, expected: Any) -> bool:
    """Return whether two values of JSON are equal. Numbers with a decimal point may differ by a millionth."""
    both = (type(value), type(expected))
    if float in both and both[0] in (int, float) and both[1] in (int, float):
        return bool(value == expected) or _close(value, expected)
    if both[0] is not both[1]:
        return False
    if isinstance(value, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict):
        if value.keys() != expected.keys():
            return False
        return all(_equal(value[key], expected[key]) for key in value)
    return bool(value == expected)


def _listed(value: Any) -> Any:
    """Return a value in the form of JSON: tuples become lists, and keys become texts."""
    if isinstance(value, list | tuple):
        return [_listed(part) for part in value]
    if isinstance(value, dict):
        return {str(key): _listed(part) for key, part in value.items()}
    return value


# ── texts of Python ──────────────────────────────────────────────────────────────────────────────────────────────────


class _WithChanges(ast.NodeTransformer):
    """Inserts a call of `Judge.apply_changes` before each statement of a test, except imports and docstrings."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and not isinstance(node, ast.ClassDef):
                setattr(node, field, list(self._with_calls(statements)))
        return node

    def _with_calls(self, statements: list[ast.stmt]) -> Iterator[ast.stmt]:
        for number, statement in enumerate(statements):
            first = number == 0 and _is_text(statement)
            if not first and not isinstance(statement, ast.Import | ast.ImportFrom):
                called = ast.Call(ast.Name(_APPLY_CHANGES, ast.Load()), [], [])
                yield ast.copy_location(ast.Expr(called), statement)
            yield statement


def _is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is a constant, such as a docstring."""
    if not isinstance(statement, ast.Expr):
        return False
    return isinstance(statement.value, ast.Constant)


def _text_passes(names: dict[str, Any], check: dict[str, Any]) -> bool:
    """Run the source text of a test, then the function or method that the check names. Return whether both pass."""
    # `__builtins__` comes last, so that no name of the answer replaces it
    space: dict[str, Any] = {**names, "__name__": TESTS, "__builtins__": builtins}
    output = sys.stdout
    try:
        for text in (check.get("before", ""), check["text"]):
            tree = ast.fix_missing_locations(_WithChanges().visit(ast.parse(text)))
            _make_comparisons_strict(text)
            exec(compile(tree, "<test>", "exec", dont_inherit=True), space)
        if check["kind"] == "check":
            _finish(space["check"](_under_test(names, check["entry"])))
        elif check["kind"] == "function":
            _run_function(space, check["function"], check.get("of", ""))
        elif check["kind"] == "unittest":
            return _run_method(space[check["of"]], check["function"])
    except BaseException:  # noqa: BLE001  # whatever is raised, the check has failed
        return False
    finally:
        sys.stdout = output
    return True


def _finish(result: Any) -> None:
    """Finish a test function, given its result: await it if it is async.

    Raises AssertionError if the function is a generator: then no line of it has run.
    """
    if inspect.iscoroutine(result):
        asyncio.run(result)
    elif inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise AssertionError("a generator is no test")


def _run_function(space: dict[str, Any], name: str, of: str) -> None:
    """Run a test function, or a method of the class `of`, with each set of arguments that pytest's marks give."""
    function = getattr(space[of], name) if of else space[name]
    if of:
        getattr(space[of], "setup_class", lambda: None)()
    for given in _sets(function):
        if not of:
            _finish(function(**given))
            continue
        one = space[of]()
        if hasattr(one, "setup_method"):
            takes = inspect.signature(one.setup_method).parameters
            one.setup_method(*[function][: len(takes)])
        _finish(getattr(one, name)(**given))


def _sets(function: Any) -> Iterator[dict[str, Any]]:
    """Yield the keyword arguments of each case that the parametrize marks of a test function give; {} without marks."""
    sets: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            given = dict(zip(("argnames", "argvalues"), mark.args, strict=False))
            given |= mark.kwargs
            cases = list(_arguments(given["argnames"], given["argvalues"]))
            sets = [{**known, **case} for known in sets for case in cases]
    yield from sets


def _arguments(names: Any, values: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each case of a parametrize mark."""
    keys = names
    if isinstance(names, str):
        keys = [key.strip() for key in names.split(",")]
    for value in values:
        case = value
        # An object that `pytest.param` has made
        if hasattr(value, "marks"):
            case = value.values
        elif len(keys) == 1:
            case = [value]
        yield dict(zip(keys, case, strict=True))


def _run_method(kind: Any, name: str) -> bool:
    """Return whether a method of a unittest.TestCase succeeds. A skipped test has not succeeded."""
    import unittest

    asynchronous = issubclass(kind, unittest.IsolatedAsyncioTestCase)
    method = getattr(kind, name)
    if inspect.isgeneratorfunction(method):
        return False
    if inspect.iscoroutinefunction(method) and not asynchronous:
        return False
    result = unittest.TestResult()
    unittest.TestSuite([kind(name)]).run(result)
    skipped = bool(result.skipped or result.expectedFailures)
    return result.testsRun == 1 and result.wasSuccessful() and not skipped


def _make_comparisons_strict(text: str) -> None:
    """Change comparisons of NumPy and pytest: they fail if only one of the two values is empty.

    Without the change, an empty array equals every value. `text`: source text of the test. A library that the text does
    not name is not imported.
    """
    if "numpy" in text and not hasattr(sys.modules.get("numpy"), _STRICT):
        numpy: Any = importlib.import_module("numpy")
        testing: Any = importlib.import_module("numpy.testing")
        setattr(numpy, _STRICT, True)
        for module, names in ((numpy, _OF_NUMPY), (testing, _OF_NUMPY_TESTING)):
            for name in names:
                setattr(module, name, _strict(getattr(module, name), numpy.size))
    if "pytest" in text and not hasattr(sys.modules.get("pytest"), _STRICT):
        pytest: Any = importlib.import_module("pytest")
        setattr(pytest, _STRICT, True)
        pytest.approx = _strict_approx(pytest.approx)


def _strict(compare: Callable[..., Any], size: Callable[[Any], int]) -> Any:
    """Return `compare` with a check before it: AssertionError if only one of the two values is empty."""

    def compared(one: Any, other: Any, *given: Any, **named: Any) -> Any:
        if (size(one) == 0) != (size(other) == 0):
            raise AssertionError("only one of the values is empty")
        return compare(one, other, *given, **named)

    return compared


def _strict_approx(approx: Callable[..., Any]) -> Callable[..., Any]:
    """Return `pytest.approx`, changed so that an empty array equals no number."""

    def strict(expected: Any, *given: Any, **named: Any) -> Any:
        made = approx(expected, *given, **named)
        kind = type(made)

        equals: Any = kind.__eq__

        def strictly(self: Any, actual: Any) -> bool:
            empty = getattr(actual, "size", None) == 0
            if empty and isinstance(expected, numbers.Number):
                return False
            return bool(equals(self, actual))

        made.__class__ = type(kind.__name__, (kind,), {"__eq__": strictly})
        return made

    return strict
