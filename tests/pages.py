"""Pages of the documentation as commands, answers and files: what tests need to try what a page says."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ELSEWHERE = "..."  # a line that stands for any number of lines
_BLOCK = re.compile(
    r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL
)
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
            return [
                (typed, answer.rstrip("\n").split("\n"))
                for typed, answer in _TYPED.findall(self.text)
            ]
        lines = (
            self.text.replace("\\\n", " ").splitlines()
            if self.language == "bash"
            else []
        )
        return [
            (line, []) for line in lines if line.strip() and not line.startswith("#")
        ]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that name a language."""
    for language, title, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        yield Block(language, title, text)


def words_of(typed: str) -> list[str]:
    """Return the words of one command without its comment."""
    return shlex.split(typed, comments=True)


def says(answer: Sequence[str], shown: Sequence[str]) -> bool:
    """Return whether `answer` is `shown`, with something in the place of every ELSEWHERE."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == ELSEWHERE else re.escape(line) + r"\n"
        for line in shown
    )
    return re.fullmatch(pattern, "\n".join([*answer, ""])) is not None


def shell(folder: Path) -> dict[str, str]:
    """Return the variables of a shell in `folder` in which the environment of this process is activated."""
    programs = folder / ".bin"
    programs.mkdir()
    as_installed = f"#!{sys.executable}\nfrom rlplace.__main__ import main\n\nmain()\n"
    for name, words in {
        "rlplace": None,
        "python": "",
        "tensorboard": "-m tensorboard.main",
    }.items():
        text = (
            as_installed
            if words is None
            else f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n'
        )
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}


def typed_in(
    folder: Path, typed: str, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command of a page in `folder`; what it prints, errors too, is its stdout."""
    return subprocess.run(
        ["bash", "-c", typed],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )


def read_page(
    page: Path, folder: Path, variables: Mapping[str, str], *, of: str = ""
) -> None:
    """Write the files of a page in `folder`, type its console blocks there, and compare the answers.

    `of`: how the commands begin that are typed; the others are left out. At least one begins so.
    """
    typed_in_all = 0
    for block in blocks(page):
        if block.title:
            file = folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        for typed, shown in block.commands() if block.language == "console" else ():
            if not typed.startswith(of):
                continue
            typed_in_all += 1
            done = typed_in(folder, typed, variables)
            refused = any(
                re.search(r"\S\s+\[[a-z-]+\]$", line) for line in shown
            )  # the page shows an error
            assert (done.returncode != 0) == refused, (
                f"{typed}: exit {done.returncode}\n{done.stdout}"
            )
            answer = done.stdout.rstrip("\n").split("\n")
            assert shown == [""] or says(answer, shown), (
                f"{typed} answers\n{done.stdout}"
            )
    assert typed_in_all > 0, f"no command of {page.name} begins with {of!r}"


def write_own_engine(folder: Path) -> Path:
    """Write the engine that docs/own_engine.md shows as a module in `folder`."""
    (block,) = (
        block
        for block in blocks(ROOT / "docs" / "own_engine.md")
        if block.title == "plain_engine.py"
    )
    (folder / block.title).write_text(block.text, encoding="utf-8")
    return folder
