"""Decides for each name in a test whether it means an object of the answer or one of Python's libraries.

A test trusts the functions with which it compares results. So an answer must not replace `abs`, `isclose` or
`assert_equal`, unless the test is a test of this very function.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import re
import sys
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

# Names of comparisons and tolerances
_COMPARISONS = re.compile(
    r"isclose|allclose|array_equal|approx|raises|eps|epsilon|tol|tolerance|delta",
    re.IGNORECASE,
)
# Names of functions that may check their arguments
_ASSERTIONS = re.compile(r"(assert|expect|check|verify|test)\w*", re.IGNORECASE)
_ALIASES = {"np": "numpy"}
# Modules that tests may use without an import statement, if the answer imports them
_LIBRARIES = {*sys.stdlib_module_names, "numpy"}
# Modules whose names tests may use without an import statement
_COMMON = ("collections", "math", "itertools", "functools", "re", "string")
# Names of modules from which tests import the answer's names
AS_MODULES = ("solution", "answer", "main", "candidate", "submission")


class TestSource:
    """The source text of a test: the names that it uses, calls, defines and imports."""

    def __init__(self, text: str) -> None:
        """Parse the test. `text`: Python source text; "" for checks without one."""
        self.text = text
        nodes = list(ast.walk(ast.parse(text)))
        self._calls = [node for node in nodes if isinstance(node, ast.Call)]
        self._unused = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        self.words = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.called = {
            call.func.id for call in self._calls if isinstance(call.func, ast.Name)
        }
        # Names that the text defines, or imports from other modules than the answer's
        self.own: set[str] = set()
        # Names of modules that mean the answer
        self.answers = set(AS_MODULES) | set(_unknown_modules(nodes))
        self._from_answer: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.asname or alias.name for alias in node.names}
                module = getattr(node, "module", None)
                if module in self.answers:
                    self._from_answer |= names
                else:
                    self.own |= {name.partition(".")[0] for name in names}
            elif isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ):
                self.own.add(node.name)

    def names_of_answer(
        self, known: Collection[str], classes: Collection[str]
    ) -> set[str]:
        """Return the names that mean objects of the answer.

        `known`: names that the answer's code has defined. `classes`: the names among them that are classes.
        """
        judging = set(self._judging(set(known) - set(classes)))
        found = set()
        for name in known:
            sole = self.words & set(known) == {name}
            if name in self._from_answer or sole:
                # This is the function or class under test
                found.add(name)
            elif not (
                hasattr(builtins, name)
                or _COMPARISONS.fullmatch(name)
                or name in judging
                or python_object(name) is not None
            ):
                found.add(name)
        return found

    def _judging(self, functions: Collection[str]) -> Iterator[str]:
        """Yield the names of functions that check results of `functions`, such as `same` in `same(f(1), 2)`.

        A function under test gets plain values. A function that checks gets results of other functions, and its own
        result is not used, or its name begins like that of an assertion.
        """
        for node in self._calls:
            # In `check.that.equal(...)`, root is `check`, and named is `equal`
            root = _root(node.func)
            if root is None:
                continue
            named = getattr(node.func, "attr", getattr(node.func, "id", ""))
            results = any(
                isinstance(part, ast.Call) and _root(part.func) in functions
                for part in node.args
            )
            unused = id(node) in self._unused
            asserts = _ASSERTIONS.fullmatch(named) is not None
            if (asserts and (unused or results)) or (
                unused and results and len(node.args) > 1
            ):
                yield root


def _unknown_modules(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the modules in `from module import name` that are not installed.

    Such a module means the answer, since each test has its own name for the answer's module.
    """
    for node in nodes:
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        if "." not in node.module and importlib.util.find_spec(node.module) is None:
            yield node.module


def _root(node: ast.expr) -> str | None:
    """Return the name at the root of a called expression, such as `a` of `a.b(1).c`; None if there is no name."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else None


def python_object(name: str) -> Any:
    """Return the object of the standard library with this name, such as `Counter`; None if there is none."""
    for module in _COMMON:
        value = getattr(importlib.import_module(module), name, None)
        if value is not None and not isinstance(value, ModuleType):
            return value
    return None


def library(name: str, imported: str | None) -> ModuleType | None:
    """Return the library that a name in a test means, such as NumPy for `np`; None if it means no known library.

    `imported`: the module that the answer has imported under this name; None if the name is not a module there.
    """
    module = imported or _ALIASES.get(name, name)
    if module not in _LIBRARIES:
        return None
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
