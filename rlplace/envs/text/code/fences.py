"""Finds the code in an answer: the content of its fenced code blocks, as CommonMark has them."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from rlplace.python_code import parse

_FENCE = re.compile(r"[ \t>]*(`{3,}|~{3,})(.*)")
# Names of Python behind a fence, in lower case
_PYTHON = re.compile(r"\{?\.?(python|py|python3|py3|python-?3\.\d+|pycon)\}?")


def code_block(answer: str) -> str:
    """Return the content of the last code block of an answer that is Python; without any block, the whole answer.

    A block is Python if it is marked so. A block without a mark is Python too, unless it follows a marked block and has
    values alone, as the output of a program. A block that is not closed ends with the answer. Indented blocks lose
    their indentation.
    """
    found = answer
    marked = False
    for language, content in _blocks(answer):
        if _PYTHON.fullmatch(language.lower()):
            found = content
            marked = True
        elif not language and (not marked or _does_something(content)):
            found = content
    return found


def completed(code: str, prompt: str, entry: str) -> str:
    """Return the program of an answer that may continue the function in its prompt, as models without a chat do.

    If the prompt begins the function `entry` and `code` does not define this function, the program is the prompt with
    `code` as the body of the function. Otherwise the program is `code`.
    """
    head = re.compile(rf"^[ ]{{0,4}}(async )?def {re.escape(entry)}\(", re.MULTILINE)
    begun = code_block(prompt)
    if not entry or head.search(code) or not head.search(begun):
        return code
    body = textwrap.indent(textwrap.dedent(code), "    ")
    return f"{begun.rstrip()}\n{body}"


def given_functions(prompt: str, entry: str) -> str:
    """Return the source text of functions and classes that a prompt defines beside the function `entry`, with imports.

    Return "" if there are none. HumanEval's tests of `find_zero` use such a function, `poly`. LeetCode's prompts define
    classes of nodes. An answer need not repeat such definitions, and cannot replace them.
    """
    try:
        body = parse(code_block(prompt)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    # `Solution().twoSum` is a method of the class Solution
    tested = re.split(r"\W", entry)
    given = [
        part
        for part in body
        if isinstance(part, ast.FunctionDef | ast.ClassDef)
        and part.name not in tested
        and _has_body(part)
    ]
    if not entry or not given:
        return ""
    imports = [part for part in body if isinstance(part, ast.Import | ast.ImportFrom)]
    return ast.unparse(ast.Module([*imports, *given], []))


def with_functions(code: str, given: str) -> str:
    """Return `code` with the functions of its prompt inserted after its imports of `__future__`.

    `code`: a program. `given`: source text of the functions, as `given_functions` returns it.
    """
    try:
        body = parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    first = [0]
    for part in body:
        if isinstance(part, ast.ImportFrom) and part.module == "__future__":
            first.append(part.end_lineno or 0)
    lines = code.splitlines()
    return "\n".join([*lines[: first[-1]], given, *lines[first[-1] :], ""])


def _has_body(part: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether a function or a class has more than a docstring, `pass` or `...`."""
    return not all(
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        for one in part.body
    )


def _does_something(code: str) -> bool:
    """Return whether a text is Python that does more than state values."""
    try:
        body = parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    values = (ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp)
    return not all(
        isinstance(part, ast.Expr) and isinstance(part.value, values) for part in body
    )


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Yield (language, content) of each fenced code block; the language is "" if the fence has no mark."""
    # Only line feeds and carriage returns end a line of a text
    lines = re.split(r"\r\n|\n|\r", answer)
    # Fence and language of the open block
    opened: tuple[str, str] | None = None
    content: list[str] = []
    for line in lines:
        fence = _fence(line)
        if opened is None:
            opened = fence
            content = []
        elif fence is not None and fence[0].startswith(opened[0]) and not fence[1]:
            yield opened[1], _text(content)
            opened = None
        else:
            content.append(line)
    if opened is not None:
        yield opened[1], _text(content)


def _fence(line: str) -> tuple[str, str] | None:
    """Return (fence, language) of a line that opens or closes a block, such as ("```", "python"); else None."""
    found = _FENCE.fullmatch(line)
    if found is None or (found[1][0] == "`" and "`" in found[2]):
        return None
    words = found[2].split()
    return found[1], words[0] if words else ""


def _text(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines)) + "\n"
