"""Pages of the documentation as commands, answers and files: what tests need to try what a page says."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ELSEWHERE = "..."  # a line that stands for any number of lines
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
_TYPED = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A block of code: `console` has commands after `$ ` with their answers, `bash` commands alone."""

    language: str
    title: str  # the file that the reader writes it in; empty: none
    text: str

    def commands(self) -> list[tuple[str, list[str]]]:
        """Return what is typed, and the lines that it answers."""
        if self.language == "console":
            return [(typed, answer.rstrip("\n").split("\n")) for typed, answer in _TYPED.findall(self.text)]
        lines = self.text.replace("\\\n", " ").splitlines() if self.language == "bash" else []
        return [(line, []) for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that name a language."""
    for language, title, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        yield Block(language, title, text)


def words_of(typed: str) -> list[str]:
    """Return the words of one command without its comment."""
    return shlex.split(typed, comments=True)


def says(answer: Sequence[str], shown: Sequence[str]) -> bool:
    """Return whether `answer` is `shown`, with something in the place of every ELSEWHERE."""
    pattern = "".join(r"(?:.*\n)*?" if line.strip() == ELSEWHERE else re.escape(line) + r"\n" for line in shown)
    return re.fullmatch(pattern, "\n".join([*answer, ""])) is not None
