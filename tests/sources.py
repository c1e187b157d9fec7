"""Source texts as trees, parsed and walked once in a process of the tests."""

from __future__ import annotations

import ast
import functools


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of the tree of a source, as `ast.walk` yields them."""
    return tuple(ast.walk(parsed(source)))
