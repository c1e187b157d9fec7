"""The pages of docs/: those that are read with the hands on the keys run as they are printed, others can be typed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlplace import train
from rlplace.codes import codes
from tests.pages import PAGES, ROOT, blocks, says, words_of

# Pages whose console blocks are typed one after the other in an empty folder; files with a title are written there.
IN_PLANNING_GUIDE = {"planning.md"}  # tests/e2e/test_planning_guide.py: faster, in this process
HANDS_ON = [
    page
    for page in PAGES
    if page.name not in IN_PLANNING_GUIDE and any(block.language == "console" for block in blocks(page))
]
# What may be typed besides this project's own commands; pages say what of it was not tried.
OTHER_COMMANDS = {
    *("bash", "cd", "docker", "export", "git", "kill", "kubectl", "ls", "mkdir", "pip", "python3", "ray", "rm"),
    *("sbatch", "source", "srun", "sudo", "tensorboard", "umask"),
}
TRAIN = (["scripts/train"], ["rlplace", "train"], ["python", "-m", "rlplace.train"])
FOLDERS = ("resume=runs/", "resume=<", "/models/", "profile=runs/", "my_configs/", "<")  # of the reader's own


def shell(folder: Path) -> dict[str, str]:
    """Return the variables of a shell in `folder` in which the environment of this process is activated."""
    programs = folder / ".bin"
    programs.mkdir()
    as_installed = f"#!{sys.executable}\nfrom rlplace.__main__ import main\n\nmain()\n"
    for name, words in {"rlplace": None, "python": "", "tensorboard": "-m tensorboard.main"}.items():
        text = as_installed if words is None else f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n'
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}


@pytest.mark.slow
@pytest.mark.parametrize("page", HANDS_ON, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_runs_as_it_is_read(page: Path, tmp_path: Path) -> None:
    variables = shell(tmp_path)
    for block in blocks(page):
        if block.title:
            file = tmp_path / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        for typed, shown in block.commands() if block.language == "console" else ():
            done = subprocess.run(
                ["bash", "-c", typed],
                cwd=tmp_path,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=200,
                check=False,
            )
            refused = any(re.search(r"\S\s+\[[a-z-]+\]$", line) for line in shown)  # the page shows an error
            assert (done.returncode != 0) == refused, f"{typed}: exit {done.returncode}\n{done.stdout}"
            answer = done.stdout.rstrip("\n").split("\n")
            assert shown == [""] or says(answer, shown), f"{typed} answers\n{done.stdout}"


COMMANDS = {
    typed: None for page in PAGES for block in blocks(page) if block.language == "bash" for typed, _ in block.commands()
}


def trained(words: list[str]) -> list[str] | None:
    """Return what `train` is told by a command that trains and needs nothing of the reader's own."""
    told = next((words[len(start) :] for start in TRAIN if words[: len(start)] == start), None)
    own = any(piece in word for word in words for piece in FOLDERS)
    return None if told is None or own or "--help" in words or "-m" in told or "--multirun" in told else told


@pytest.mark.parametrize("typed", [typed for typed in COMMANDS if trained(words_of(typed))])
def test_what_is_trained_can_be_planned(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in trained(words_of(typed)) or () if word != "resume=auto"]
    assert train.main([*words, *([] if "--cfg" in words else ["dry_run=true"])]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("typed", COMMANDS)
def test_every_command_is_one_that_can_be_typed(typed: str) -> None:
    checked = subprocess.run(["bash", "-n", "-c", typed], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    words = [word for word in words_of(typed) if not re.match(r"[A-Z_]+=", word)]
    first, *rest = words or ["bash"]
    if first.startswith("scripts/"):
        assert (ROOT / first).exists()
    elif first in ("python", ".venv/bin/python") and rest[:1] == ["-m"]:
        assert importlib.util.find_spec(rest[1]), f"no module {rest[1]}"
    elif first in ("python", ".venv/bin/python"):
        assert (ROOT / rest[0]).exists()
    elif first == "rlplace":
        assert importlib.util.find_spec(f"rlplace.{rest[0]}") or rest[0] == "--help"
    else:
        assert first in OTHER_COMMANDS, f"{first}: neither a command of this project nor one that readers have"


@pytest.mark.parametrize("name", ["troubleshooting.md", "out_of_memory.md"])
def test_every_code_in_a_table_is_one(name: str) -> None:
    cells = re.findall(r"^\|[^|]*\|([^|]*)\|", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.MULTILINE)
    named = {code for cell in cells for code in re.findall(r"`([a-z]+-[a-z-]+)`", cell)}
    assert len(named) > 4
    assert named <= set(codes())


def test_scripts_and_values_on_pages_can_be_read() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh":
                assert subprocess.run(["bash", "-n", "-c", block.text], check=False).returncode == 0, page
            elif block.language == "yaml":
                assert yaml.safe_load(block.text), page


def test_every_page_of_docs_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert {page for page in pages if f"- {page}\n" not in listed and not page.startswith("decisions/")} == set()
