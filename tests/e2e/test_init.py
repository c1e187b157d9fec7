"""`rlplace init`: the project that it writes trains, evaluates and passes its own tests; nothing is overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlplace.cli.init import FILES, main
from tests.e2e.training import LIMIT_S, ROOT

FEW = ("runner.total_iterations=2", "env.total_num_envs=4")


def typed(folder: Path, *words: str) -> str:
    """Run Python in `folder` as a user does, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_new_project_trains_evaluates_and_passes_its_tests(tmp_path: Path) -> None:
    said = typed(tmp_path, "-m", "rlplace", "init", "demo")
    assert "cd demo" in said
    demo = tmp_path / "demo"
    assert {file.name for file in demo.iterdir()} == set(FILES)
    config = ("--config-dir", ".", "--config-name", "train")
    said = typed(demo, "-m", "rlplace.train", *config, *FEW)
    assert "policy     runs/train/" in said
    assert "return of 20 episodes: -" in typed(demo, "run.py", *FEW)
    assert len([*(demo / "runs" / "train").iterdir()]) == 2
    assert "3 passed" in typed(demo, "-m", "pytest", "-p", "no:cacheprovider")


def test_files_of_the_user_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("of another kind: no reason to refuse\n")
    (tmp_path / "run.py").write_text("print('mine')\n")
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "nothing is overwritten: run.py" in said
    assert f"fix: rlplace init {tmp_path}/my_project" in said
    assert (tmp_path / "run.py").read_text() == "print('mine')\n"
    assert not (tmp_path / "train.yaml").exists()
    (tmp_path / "run.py").unlink()
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "notes.txt").exists()


def test_a_folder_that_cannot_be_made_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main([str(file)]) == 1
    assert "[cannot-write]" in capsys.readouterr().err
