"""The pages of docs/: those that are read with the hands on the keys run as they are printed, others can be typed."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rlplace.cli import train
from rlplace.codes import codes
from tests.pages import PAGES, ROOT, blocks, read_page, shell, words_of

# Pages whose console blocks are typed one after the other in an empty folder; files with a title are written there.
# These have tests of their own: test_planning_guide.py is faster, in this process; test_warm_start.py brings a model.
WITH_OWN_TEST = {"planning.md", "warm_start.md"}
HANDS_ON = [
    page
    for page in PAGES
    if page.name not in WITH_OWN_TEST
    and any(block.language == "console" for block in blocks(page))
]
# What may be typed besides this project's own commands; pages say what of it was not tried.
OTHER_COMMANDS = {
    *(
        "bash",
        "cd",
        "docker",
        "export",
        "git",
        "kill",
        "kubectl",
        "ls",
        "mkdir",
        "pip",
        "python3",
        "ray",
        "rm",
    ),
    *("sbatch", "source", "srun", "sudo", "tensorboard", "umask", "uv"),
}
TRAIN = (["scripts/train"], ["rlplace", "train"], ["python", "-m", "rlplace.train"])
FOLDERS = (
    "resume=runs/",
    "init_from=runs/",
    "resume=<",
    "/models/",
    "profile=runs/",
    "my_configs/",
    "my_job.yaml",
    "replay.demonstrations=",
    "<",
)  # of the reader's own


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", HANDS_ON, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_a_page_runs_as_it_is_read(page: Path, tmp_path: Path) -> None:
    read_page(page, tmp_path, shell(tmp_path))


COMMANDS = {
    typed: None
    for page in PAGES
    for block in blocks(page)
    if block.language == "bash"
    for typed, _ in block.commands()
}


def trained(words: list[str]) -> list[str] | None:
    """Return what `train` is told by a command that trains and needs nothing of the reader's own."""
    told = next(
        (words[len(start) :] for start in TRAIN if words[: len(start)] == start), None
    )
    own = any(piece in word for word in words for piece in FOLDERS)
    return (
        None
        if told is None
        or own
        or "--help" in words
        or "-m" in told
        or "--multirun" in told
        else told
    )


@pytest.mark.parametrize(
    "typed", [typed for typed in COMMANDS if trained(words_of(typed))]
)
def test_what_is_trained_can_be_planned(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in trained(words_of(typed)) or () if word != "resume=auto"]
    assert train.main([*words, *([] if "--cfg" in words else ["dry_run=true"])]) == 0, (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("typed", COMMANDS)
def test_every_command_is_one_that_can_be_typed(typed: str) -> None:
    checked = subprocess.run(
        ["bash", "-n", "-c", typed], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    words = [word for word in words_of(typed) if not re.match(r"[A-Z_]+=", word)]
    first, *rest = words or ["bash"]
    if first.startswith("scripts/"):
        assert (ROOT / first).exists()
    elif first in ("python", ".venv/bin/python") and rest[:1] == ["-m"]:
        assert importlib.util.find_spec(rest[1]), f"no module {rest[1]}"
    elif first == "python" and rest[:1] == ["-c"]:
        ast.parse(rest[1])
    elif first in ("python", ".venv/bin/python"):
        assert (ROOT / rest[0]).exists()
    elif first == "rlplace":
        assert importlib.util.find_spec(f"rlplace.{rest[0]}") or rest[0] == "--help"
    else:
        assert first in OTHER_COMMANDS, (
            f"{first}: neither a command of this project nor one that readers have"
        )


@pytest.mark.parametrize("name", ["troubleshooting.md", "out_of_memory.md"])
def test_every_code_in_a_table_is_one(name: str) -> None:
    cells = re.findall(
        r"^\|[^|]*\|([^|]*)\|",
        (ROOT / "docs" / name).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    named = {code for cell in cells for code in re.findall(r"`([a-z]+-[a-z-]+)`", cell)}
    assert len(named) > 4
    assert named <= set(codes())


def test_scripts_and_values_on_pages_can_be_read() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh":
                assert (
                    subprocess.run(
                        ["bash", "-n", "-c", block.text], check=False
                    ).returncode
                    == 0
                ), page
            elif block.language == "yaml":
                assert yaml.safe_load(block.text), page


def test_every_page_of_docs_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    pages = {
        page.relative_to(ROOT / "docs").as_posix()
        for page in PAGES
        if page.is_relative_to(ROOT / "docs")
    }
    assert {
        page
        for page in pages
        if f"- {page}\n" not in listed and not page.startswith("decisions/")
    } == set()
