"""recipes/self_play.py: it gets stronger than players outside of its league, resumes, and outlasts kills."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rlplace

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
LIMIT_S = 280.0
SMALL = {"rollout": {"games": 24}, "league": {"every": 4, "rated": 8, "measured": 100}}
KILLED = Path(__file__).with_name("killed_self_play.py")
# Of an iteration; what is left out are seconds and bytes.
LEARNED = (
    *("actor/entropy", "actor/value_loss", "rollout/against_league"),
    *("league/elo", "league/against_random", "league/against_faultless"),
    "league/defeats",
)


def config(folder: Path, launcher: str, iterations: int) -> dict:
    """Return the recipe's config with fewer games. `folder`: of its runs."""
    found = yaml.safe_load((RECIPES / "self_play.yaml").read_text(encoding="utf-8"))
    for block, values in SMALL.items():
        found[block] |= values
    found["cluster"]["launcher"] = launcher
    found["checkpoint"] = {"every": 1}
    found["runner"] = {"total_iterations": iterations, "output_dir": str(folder)}
    return found


def learned(folder: Path) -> list[list[float]]:
    """Return the LEARNED metrics of each iteration of the newest run below `folder`."""
    (newest,) = folder.glob("*/*/metrics.jsonl")
    lines = newest.read_text(encoding="utf-8").splitlines()
    return [[json.loads(line)[name] for name in LEARNED] for line in lines]


def test_it_learns_and_resumes_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    job = importlib.import_module("self_play").job

    def train(name: str, iterations: int, *words: str) -> None:
        read = config(tmp_path / name, "inline", iterations)
        assert rlplace.run(job, read, list(words)) == 0

    train("whole", 9)
    train("broken", 5)
    train("broken", 9, "resume=auto")
    whole = learned(tmp_path / "whole")
    assert learned(tmp_path / "broken") == whole
    against_random = [row[LEARNED.index("league/against_random")] for row in whole]
    assert against_random[-1] > 0.3 > 0.2 > against_random[0]
    assert whole[-1][LEARNED.index("league/elo")] > 50


@pytest.mark.ray
@pytest.mark.slow
def test_killed_ranks_change_no_number(tmp_path: Path) -> None:
    """A rollout rank is killed with its games half way to the learner, the league after it has kept a version."""
    read = config(tmp_path / "killed", "ray", 7)
    (tmp_path / "killed.yaml").write_text(yaml.safe_dump(read), encoding="utf-8")
    path = os.pathsep.join([str(RECIPES), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, str(KILLED), str(tmp_path / "killed.yaml"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "rollout_died").exists()
    assert (tmp_path / "league_died").exists()
    (summary,) = (tmp_path / "killed").glob("*/*/summary.json")
    events = json.loads(summary.read_text(encoding="utf-8"))["faults"]["events"]
    replaced = [name for event in events for name in event["replaced"]]
    assert replaced == ["rollout rank 1", "league rank 0"]

    script = str(RECIPES / "self_play.py")
    words = [f"runner.output_dir={tmp_path / 'whole'}", "runner.total_iterations=7"]
    for block, values in SMALL.items():
        words += [f"{block}.{key}={value}" for key, value in values.items()]
    subprocess.run([sys.executable, script, *words], timeout=LIMIT_S, check=True)
    assert learned(tmp_path / "killed") == learned(tmp_path / "whole")
