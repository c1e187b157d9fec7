"""Finds the code in an answer: the content of its fenced code blocks, as CommonMark has them."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

_FENCE = re.compile(r"[ \t>]*(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*")
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
    """Return the program of an answer that continues the function in its prompt, as models without a chat do.

    If the prompt begins the function `entry` and `code` does not define it, the program is the prompt and the code as
    the body of the function. Otherwise it is `code`.
    """
    head = re.compile(rf"^[ ]{{0,4}}(async )?def {re.escape(entry)}\(", re.MULTILINE)
    begun = code_block(prompt)
    if not entry or head.search(code) or not head.search(begun):
        return code
    body = textwrap.indent(textwrap.dedent(code), "    ")
    return f"{begun.rstrip()}\n{body}"


def _does_something(code: str) -> bool:
    """Return whether a text is Python that does more than state values."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError):
        return False
    values = (ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp)
    return not all(
        isinstance(part, ast.Expr) and isinstance(part.value, values) for part in body
    )


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Yield (language, content) of each fenced code block; the language is "" if the fence has no mark."""
    # Only line feeds and carriage returns end a line of a text
    lines = re.split(r"\r\n|\n|\r", answer)
    opened: re.Match[str] | None = None
    content: list[str] = []
    for line in lines:
        fence = _FENCE.fullmatch(line)
        if opened is None:
            opened = fence
            content = []
        elif fence is not None and _closes(fence, opened):
            yield opened[2], _text(content)
            opened = None
        else:
            content.append(line)
    if opened is not None:
        yield opened[2], _text(content)


def _closes(fence: re.Match[str], opened: re.Match[str]) -> bool:
    """Return whether a fence ends the block of another fence: the same sign, as many of it, and no mark."""
    return fence[1].startswith(opened[1]) and not fence[2]


def _text(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines)) + "\n"
