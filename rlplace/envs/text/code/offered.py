"""Decides which names of an answer a text of tests gets, and which names are Python's own.

A test trusts the functions with which it compares. So an answer must not bring `abs`, `isclose` or `assert_equal`
along, unless such a function is what the test is about.
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
# Names of functions that may judge what they are given
_ASSERTIONS = re.compile(r"(assert|expect|check|verify|test)\w*", re.IGNORECASE)
_ALIASES = {"np": "numpy"}
# Modules that tests may use without an import of their own, if the answer imports them
_LIBRARIES = {*sys.stdlib_module_names, "numpy"}
# Modules whose names tests use without an import of their own
_COMMON = ("collections", "math", "itertools", "functools", "re", "string")
# Modules under which tests import the answer's names
AS_MODULES = ("solution", "answer", "main", "candidate", "submission")


class Text:
    """What a text of tests says about names."""

    def __init__(self, text: str) -> None:
        """Read the text. `text`: source text of Python; "" for checks without one."""
        self.text = text
        nodes = list(ast.walk(ast.parse(text)))
        self._calls = [node for node in nodes if isinstance(node, ast.Call)]
        self._unused = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        self.words = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.called = {
            call.func.id for call in self._calls if isinstance(call.func, ast.Name)
        }
        # Names that the text defines or imports, and names that it imports from the answer's module
        self.own: set[str] = set()
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

    def offered(self, known: Collection[str], classes: Collection[str]) -> set[str]:
        """Return the names of the answer that the tests get, of the `known` ones that its code has defined.

        `classes`: those of the names that are classes.
        """
        judging = set(self._judging(set(known) - set(classes)))
        found = set()
        for name in known:
            sole = self.words & set(known) == {name}
            if name in self._from_answer or sole:
                # What the tests are about
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
        """Yield the names that the text uses to judge results of `functions`, such as `same` in `same(f(1), 2)`.

        A function under test is given plain values. A function that judges is given results of others, and its own
        result is not used, or its name says so.
        """
        for node in self._calls:
            # The name at the root of the called expression, and the name that says what it does
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
    """Yield the modules of `from module import name` that nobody has: tests call the answer's module as they like."""
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
    """Return the object of the standard library that tests mean by a name, such as `Counter`; None for other names."""
    for module in _COMMON:
        value = getattr(importlib.import_module(module), name, None)
        if value is not None and not isinstance(value, ModuleType):
            return value
    return None


def library(name: str, imported: str | None) -> ModuleType | None:
    """Return the module that tests mean by a name of an answer; None if the name is of no known library.

    `imported`: name of the module that the answer has imported under this name; None if it is no module.
    """
    module = imported or _ALIASES.get(name, name)
    if module not in _LIBRARIES:
        return None
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
