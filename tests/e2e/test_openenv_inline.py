"""A run whose episodes are those of environments on a server of OpenEnv."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.e2e.training import ROOT, train
from tests.openenv_server import answer, serving

FOLDER = ROOT / "recipes" / "agents"
SAMPLES = 16


class Letters:
    """Takes any text twice, rewards its letters, and keeps the rewards that it has given."""

    action: ClassVar[Mapping[str, Any]] = {
        "properties": {"message": {"type": "string"}},
        "required": ["message"],
    }
    given: ClassVar[list[float]] = []

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        self.steps = 0
        return answer({"text": "Say something."})

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        self.steps += 1
        reward = (1 + len(action["message"])) / 16
        self.given.append(reward)
        return answer({"text": "More."}, reward=reward, done=self.steps == 2)


def test_rewards_of_a_run_are_those_of_the_server(model: Path, tmp_path: Path) -> None:
    with serving(Letters, sessions=SAMPLES) as url:
        run = train(
            "openenv_drawers",
            tmp_path,
            "--config-dir",
            str(FOLDER),
            f"env.kwargs.url={url}",
            f"actor.model.path={model}",
            "algorithm.prompts=2",
            f"algorithm.samples_per_prompt={SAMPLES // 2}",
            "runner.total_iterations=2",
        )
    assert run.code == 0, run.err
    lines = [line for line in run.metrics() if "env/reward" in line]
    learned = sum(line["env/reward"] for line in lines) * SAMPLES
    # An answer that was cut is the last one of its episode
    assert 2 * SAMPLES <= len(Letters.given) <= 4 * SAMPLES
    assert learned == pytest.approx(sum(Letters.given))
    assert lines[0]["env/part/refused_actions"] == 0.0
