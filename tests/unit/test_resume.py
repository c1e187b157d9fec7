"""Which run `resume=auto` offers, where the newest one is of another task."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rlplace.config.compose import with_hydra
from rlplace.runtime import resume
from rlplace.runtime.prepare import prepare_composed


def test_a_run_is_offered_by_its_newest_checkpoint_and_one_that_cannot_be_read_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = prepare_composed(with_hydra(["hybrid_ppo", "runner.total_iterations=4"])[0])
    alike = yaml.safe_dump(job.mapping)
    other = yaml.safe_dump(
        {**job.mapping, "env": {**job.mapping["env"], "id": "Acrobot-v1"}}
    )

    def saved(run: str, iteration: int, text: str) -> SimpleNamespace:
        return SimpleNamespace(
            run=Path("runs") / run,
            folder=Path("saved"),
            iteration=iteration,
            text=lambda name: text,
        )

    old = saved(
        "of another version", 1, yaml.safe_dump({**job.mapping, "no_such_block": {}})
    )
    found = [
        saved("task", 3, other),
        old,
        saved("over", 4, alike),
        saved("over", 2, alike),
        saved("good", 3, alike),
    ]
    monkeypatch.setattr(resume, "whole_ones", lambda runs: iter(found))
    problem = resume._other_task(job, found[0], "env.id", "Acrobot-v1", "CartPole-v1")
    assert problem.fix == "resume=runs/good"
