"""A built wheel works outside a clone: configs travel in it, and `rlplace plan` is `python -m rlplace.plan`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def said(words: list[str], folder: Path, **variables: str) -> str:
    """Return what a command prints; its errors are the test's."""
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_plans_a_shipped_config_and_one_that_extends_it(tmp_path: Path) -> None:
    source, wheels, target, empty = (
        tmp_path / name for name in ("source", "wheels", "target", "empty")
    )
    for folder in (source, empty):
        folder.mkdir()
    for name in ("rlplace", "configs"):
        shutil.copytree(
            ROOT / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    said(
        [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), "."],
        source,
    )
    (wheel,) = wheels.iterdir()
    said(
        [
            *PIP,
            "install",
            "--no-deps",
            "--no-index",
            "--target",
            str(target),
            str(wheel),
        ],
        empty,
    )
    shutil.rmtree(source)

    (empty / "mine.yaml").write_text(
        "defaults: [{/cluster: laptop}, hybrid_ppo, _self_]\n", encoding="utf-8"
    )
    for config in ("hybrid_ppo", "mine.yaml"):
        words = ["plan", config, "cluster.accelerator.kind=emulated"]
        by_name = said(
            [sys.executable, str(target / "bin" / "rlplace"), *words],
            empty,
            PYTHONPATH=str(target),
        )
        by_module = said(
            [sys.executable, "-m", "rlplace.plan", *words[1:]],
            empty,
            PYTHONPATH=str(target),
        )
        assert by_name == by_module
        assert by_name.startswith("plan: hybrid, 8 accelerators")
    where = "import rlplace.config.compose as c; print(c.CONFIG_DIR)"
    folder = Path(
        said([sys.executable, "-c", where], empty, PYTHONPATH=str(target)).strip()
    )
    assert folder.is_relative_to(target)
    assert {f.relative_to(folder) for f in folder.rglob("*.yaml")} == {
        f.relative_to(ROOT / "configs") for f in (ROOT / "configs").rglob("*.yaml")
    }


def test_the_command_lists_its_commands_and_refuses_others() -> None:
    words = [sys.executable, "-m", "rlplace"]
    assert "rlplace plan" in said(words, ROOT)
    wrong = subprocess.run(
        [*words, "trian"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "did you mean 'train'?" in wrong.stdout + wrong.stderr
