"""A policy with random weights learns in an environment of the library verifiers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.absent import needs
from tests.e2e.training import ROOT, train

pytestmark = pytest.mark.slow
FOLDER = ROOT / "recipes" / "agents"


@needs("verifiers")
def test_the_full_drawer_is_guessed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    run = train(
        "verifiers_drawers",
        tmp_path,
        "--config-dir",
        str(FOLDER),
        f"actor.model.path={model}",
        "runner.total_iterations=5",
    )
    assert run.code == 0, run.err
    rewards = [line["env/reward"] for line in run.metrics() if "env/reward" in line]
    assert rewards[0] < 0.25
    assert rewards[-1] > rewards[0] + 0.2
    assert "env/part/found" in run.metrics()[-1]
