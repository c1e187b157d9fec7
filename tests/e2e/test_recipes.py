"""recipes/: each is planned and run as its user runs it, and learns."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import rlplace
from tests.tiny_lm import tiny_model

ROOT = Path(__file__).parents[2]
LIMIT_S = 280.0


RECIPES = tuple(sorted(file.stem for file in (ROOT / "recipes").glob("*.py")))


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


def _learned(
    recipe: str, metric: str, folder: Path, iterations: int, *overrides: str
) -> list[float]:
    """Run a recipe; return a metric of its iterations."""
    runs = folder / "runs"
    length = f"runner.total_iterations={iterations}"
    _run(recipe, length, f"runner.output_dir={runs}", *overrides)
    (file,) = runs.glob("*/*/metrics.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line)[metric] for line in lines]
    assert len(found) == iterations
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_plan_is_printed(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(ROOT / "recipes" / f"{recipe}.py")
    # As for every script, Python finds modules in its folder.
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setattr(sys, "argv", [script, "--dry-run"])
    runpy.run_path(script, run_name="__main__")
    assert "the plan holds, nothing was started" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_uses_public_names_alone(recipe: str) -> None:
    text = (ROOT / "recipes" / f"{recipe}.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("rlplace"):
            assert node.module == "rlplace"
            assert {name.name for name in node.names} <= set(rlplace.__all__)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_short_and_says_what_it_prints(recipe: str) -> None:
    text = (ROOT / "recipes" / f"{recipe}.py").read_text(encoding="utf-8")
    assert 50 <= len(text.splitlines()) <= 150
    said = str(ast.get_docstring(ast.parse(text)))
    assert f"python recipes/{recipe}.py --dry-run" in said
    assert "Printed is `" in said
    # Printed is the score of the job, by its name in the console.
    (score,) = re.findall(r'score="\w+/(\w+)"', text)
    assert f"Printed is `{score}`" in said


def test_the_page_lists_all_recipes() -> None:
    page = (ROOT / "docs" / "own_job.md").read_text(encoding="utf-8")
    for recipe in RECIPES:
        assert f"`recipes/{recipe}.py`" in page


# Plans of all recipes, and the run of one of them, are among the tests that are not slow.
@pytest.mark.ray
@pytest.mark.slow
def test_the_pipeline_fits_what_it_sees(tmp_path: Path) -> None:
    errors = _learned("pipeline", "env/error", tmp_path, 5)
    assert errors[-1] < 0.5 * errors[0]


@pytest.mark.slow
@pytest.mark.ray
def test_ppo_raises_the_return(tmp_path: Path) -> None:
    returns = _learned("ppo", "rollout/return", tmp_path, 8)
    assert returns[-1] > 2 * returns[0]


@pytest.mark.slow
@pytest.mark.ray
def test_ppo_learns_to_balance(tmp_path: Path) -> None:
    returns = _learned("ppo", "rollout/return", tmp_path, 40)
    assert returns[-1] > 200


@pytest.mark.slow
@pytest.mark.ray
def test_evolution_raises_the_return(tmp_path: Path) -> None:
    returns = _learned("evolution", "rollout/return", tmp_path, 6)
    assert returns[-1] > 2 * returns[0]


def _distilled(folder: Path, iterations: int, *overrides: str) -> list[float]:
    """Return the KL of a tiny student to a larger teacher, by iteration."""
    tiny_model(folder / "small", seed=0)
    tiny_model(folder / "large", seed=1, hidden=128, layers=3)
    models = (
        f"actor.model={folder / 'small'}",
        f"teacher.model={folder / 'large'}",
    )
    return _learned("distillation", "actor/kl", folder, iterations, *models, *overrides)


@pytest.mark.slow
@pytest.mark.ray
def test_a_student_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    kl = _distilled(tmp_path, 8)
    assert kl[0] > 0.8
    assert max(kl[-2:]) < 0.75 * kl[0]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_student_learns_through_vllm(tmp_path: Path) -> None:
    kl = _distilled(
        tmp_path,
        6,
        "rollout.generation.engine=vllm",
        "+rollout.generation.enforce_eager=true",
    )
    assert kl[0] > 0.8
    assert max(kl[-2:]) < 0.85 * kl[0]


@pytest.mark.slow
def test_robots_come_to_their_goals(tmp_path: Path) -> None:
    missed = _learned("robot", "robot/miss", tmp_path, 4)
    assert missed[-1] < 0.3 * missed[0]
    # The nodes of the arms have no accelerators.
    (plan,) = (tmp_path / "runs").glob("*/*/plan.txt")
    text = plan.read_text(encoding="utf-8")
    assert "2 accelerators, 0-1 (3 nodes: 2 + 0 + 0)" in text
    assert "{node_group: arms, placement: 0-1}" in text
    # Each controller has found the block of its arm.
    (folder,) = (tmp_path / "runs").glob("*/*/logs")
    for rank in (0, 1):
        log = (folder / f"robot-{rank}.txt").read_text(encoding="utf-8")
        assert f"on node {rank + 1}" in log


@pytest.mark.slow
@pytest.mark.ray
def test_robots_have_nodes_of_their_own(tmp_path: Path) -> None:
    """Three Ray nodes on this machine; the numbers are those of threads."""
    from ray.cluster_utils import Cluster as Nodes

    from rlplace.workers.ray_launch.session import ray_environment

    threads = _learned("robot", "robot/miss", tmp_path / "threads", 3)
    with ray_environment("auto"):
        head = {"num_cpus": 1, "include_dashboard": False}
        nodes = Nodes(initialize_head=True, head_node_args=head)
        try:
            nodes.add_node(num_cpus=1)
            nodes.add_node(num_cpus=1)
            there = ("cluster.launcher=ray", f"cluster.ray.address={nodes.address}")
            apart = _learned("robot", "robot/miss", tmp_path / "apart", 3, *there)
        finally:
            nodes.shutdown()
    assert apart == pytest.approx(threads, rel=1e-3)
