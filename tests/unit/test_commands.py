"""How commands name themselves, what they list, what they need."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlplace.__main__ import main as everything
from rlplace.cli.train import main
from rlplace.commands import typed
from rlplace.config import compose
from rlplace.imports.command import import_words
from rlplace.imports.tiny import shrink
from rlplace.runtime.prepare import missing_libraries
from tests.absent import needs

ROOT = Path(__file__).parents[2]


def test_help_names_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("train") == "python -m rlplace.train"
    monkeypatch.setenv("RLPLACE_CALLED", "rlplace train")
    assert main(["--help"]) == 0
    assert "    rlplace train hybrid_ppo  " in capsys.readouterr().out
    monkeypatch.setenv("RLPLACE_CALLED", "../rlplace/scripts/train")
    assert typed("train") == "../rlplace/scripts/train"
    assert typed("plan") == "python -m rlplace.plan"


def test_help_under_the_one_name_has_that_name() -> None:
    installed = "import sys; sys.argv[0] = '/bin/rlplace'; from rlplace.__main__ import main; main()"
    for start, program in (
        (["-c", installed], "rlplace plan"),
        (["-m", "rlplace"], "python -m rlplace plan"),
    ):
        words = [sys.executable, *start, "plan", "--help"]
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
        assert f"    {program} hybrid_ppo  " in done.stdout


def test_names_of_any_length_keep_clear_of_what_they_are() -> None:
    lines = compose.listed({"a": "first", "a" * 40: "second"}).splitlines()
    assert [line.split() for line in lines] == [["a", "first"], ["a" * 40, "second"]]
    assert lines[0].index("first") == lines[1].index("second")


@needs("numpy", "torch", "safetensors", "ray", "zmq")
def test_a_run_without_its_libraries_names_their_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(cluster=SimpleNamespace(launcher="ray"), dry_run=False)
    assert missing_libraries(config) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = missing_libraries(config)
    assert problem.code == "missing-library"
    assert "numpy, torch, safetensors, ray, psutil, zmq;" in (problem.why or "")
    assert (problem.fix or "").startswith("pip install ")
    config.dry_run = True
    (problem,) = missing_libraries(config)
    assert "was not checked" in (problem.why or "")
    config.cluster.launcher = "inline"
    (problem,) = missing_libraries(config)
    assert "no module numpy, torch, safetensors:" in (problem.why or ""), (
        "threads of one process need no Ray"
    )


def test_setup_leaves_the_environment_of_another_clone_alone(tmp_path: Path) -> None:
    clone, other = tmp_path / "clone", tmp_path / "other"
    (clone / "scripts").mkdir(parents=True)
    (clone / "requirements").mkdir()
    (clone / "requirements" / "none.txt").touch()
    (clone / "pyproject.toml").touch()
    shutil.copy(ROOT / "scripts" / "setup", clone / "scripts")
    other.mkdir()
    (clone / ".venv").symlink_to(other)
    done = subprocess.run(
        [clone / "scripts" / "setup"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f".venv is a link to {other}" in done.stderr
    assert list(other.iterdir()) == []


def test_a_tiny_job_writes_here_and_not_where_the_original_does() -> None:
    imported = shrink(
        import_words(
            "openrlhf", ["--save_path /elsewhere --pretrain meta-llama/Llama-3-8b"]
        )
    )
    assert imported.config["runner"]["output_dir"] == "runs"


@pytest.mark.parametrize(
    ("word", "said"),
    [("--version", "rlplace "), ("help", "rlplace train  "), ("tain", "")],
)
def test_words_before_a_command(
    word: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlplace", word])
    if not said:
        with pytest.raises(SystemExit):
            everything()
        assert "fix: rlplace train\n" in capsys.readouterr().err
        return
    everything()
    assert capsys.readouterr().out.strip().startswith(said.strip())
