"""A run whose episodes are those of environments on a server of OpenEnv."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.e2e.training import ROOT, train
from tests.openenv_server import Guess, serving

FOLDER = ROOT / "recipes" / "agents"
SAMPLES = 128


class Counted(Guess):
    """It keeps the rewards that it has given."""

    given: ClassVar[list[float]] = []

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        told = super().step(action)
        self.given.append(told["reward"])
        return told


def test_rewards_of_a_run_are_those_of_the_server(model: Path, tmp_path: Path) -> None:
    with serving(Counted, sessions=SAMPLES) as url:
        run = train(
            "openenv_drawers",
            tmp_path,
            "--config-dir",
            str(FOLDER),
            f"env.kwargs.url={url}",
            f"actor.model.path={model}",
            "runner.total_iterations=2",
        )
    assert run.code == 0, run.err
    lines = [line for line in run.metrics() if "env/reward" in line]
    learned = sum(line["env/reward"] for line in lines) * SAMPLES
    assert Counted.given, "some answers of a policy with random weights have a number"
    assert learned == pytest.approx(sum(Counted.given))
    assert 0.0 < lines[0]["env/part/refused_actions"] < 1.0
