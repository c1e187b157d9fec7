"""recipes/: each is planned and run as its user runs it, and learns."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rlplace

ROOT = Path(__file__).parents[2]
LIMIT_S = 280.0


RECIPES = ("pipeline", "ppo", "evolution")


def _run(recipe: str, *overrides: str) -> str:
    """Run a recipe as a process; return what it prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), *overrides],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _learned(recipe: str, metric: str, folder: Path, iterations: int) -> list[float]:
    """Run a recipe; return a metric of its iterations."""
    _run(recipe, f"runner.total_iterations={iterations}", f"runner.output_dir={folder}")
    (file,) = folder.glob("*/*/metrics.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line)[metric] for line in lines]
    assert len(found) == iterations
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_plan_is_printed(recipe: str) -> None:
    assert "the plan holds, nothing was started" in _run(recipe, "--dry-run")


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_uses_public_names_alone(recipe: str) -> None:
    text = (ROOT / "recipes" / f"{recipe}.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("rlplace"):
            assert node.module == "rlplace"
            assert {name.name for name in node.names} <= set(rlplace.__all__)


@pytest.mark.ray
def test_the_pipeline_fits_what_it_sees(tmp_path: Path) -> None:
    errors = _learned("pipeline", "env/error", tmp_path, 5)
    assert errors[-1] < 0.5 * errors[0]


@pytest.mark.ray
def test_ppo_raises_the_return(tmp_path: Path) -> None:
    returns = _learned("ppo", "rollout/return", tmp_path, 8)
    assert returns[-1] > 2 * returns[0]


@pytest.mark.slow
@pytest.mark.ray
def test_ppo_learns_to_balance(tmp_path: Path) -> None:
    returns = _learned("ppo", "rollout/return", tmp_path, 40)
    assert returns[-1] > 200


@pytest.mark.ray
def test_evolution_raises_the_return(tmp_path: Path) -> None:
    returns = _learned("evolution", "rollout/return", tmp_path, 6)
    assert returns[-1] > 2 * returns[0]
