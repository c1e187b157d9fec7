"""Finds the code in an answer: the content of its fenced code blocks, as CommonMark has them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

_FENCE = re.compile(r"[ \t>]*(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*")
# Names of Python behind a fence, in lower case
_PYTHON = re.compile(r"\{?\.?(python|py|python3|py3|python-?3\.\d+|pycon)\}?")


def code_block(answer: str) -> str:
    """Return the content of the last code block of an answer that is marked as Python.

    Without such a block, return the content of the last block without a mark; without that, the whole answer. A block
    that is not closed ends with the answer. Indented blocks lose their indentation.
    """
    found: dict[bool, str] = {}
    for language, content in _blocks(answer):
        if _PYTHON.fullmatch(language.lower()):
            found[True] = content
        elif not language:
            found[False] = content
    return found.get(True, found.get(False, answer))


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
