"""A policy with random weights learns with an agent that has a tool, led by the client of OpenAI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.absent import needs
from tests.e2e.training import ROOT, train

pytestmark = pytest.mark.slow
RECIPE = ("--config-dir", str(ROOT / "recipes" / "agents"))


@needs("openai")
def test_the_full_drawer_is_found(model: Path, tmp_path: Path) -> None:
    more = (f"actor.model.path={model}", "runner.total_iterations=15")
    run = train("drawers", tmp_path, *RECIPE, *more)
    assert run.code == 0, run.err
    rewards = [line["env/reward"] for line in run.metrics() if "env/reward" in line]
    assert rewards[0] < 0.25
    assert sum(rewards[-3:]) / 3 > 0.85
