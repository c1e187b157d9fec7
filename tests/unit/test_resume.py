"""Which run `resume=auto` offers, where the newest one is of another task."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rlplace.config.compose import with_hydra
from rlplace.jobs.notes import learning_rate_notes
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


@pytest.mark.parametrize(
    ("schedule", "changed", "told"),
    [
        (
            "cosine",
            {"runner.total_iterations": (4, 8)},
            "0.5 -> 0.854, since it falls over 8 iterations instead of 4",
        ),
        (
            "linear",
            {"runner.total_iterations": (2, 8)},
            "0 -> 0.75, since it falls over 8 iterations instead of 2",
        ),
        ("constant", {"runner.total_iterations": (4, 8)}, None),
        ("constant", {"actor.optimizer.lr": (0.5, 1.0)}, "0.5 -> 1"),
        ("linear", {"actor.optimizer.schedule": ("constant", "linear")}, "1 -> 0.75"),
        ("linear", {"env.kwargs": ({}, {"a": 1})}, None),
    ],
)
def test_the_learning_rate_before_and_after_is_told(
    schedule: str, changed: dict[str, tuple[object, object]], told: str | None
) -> None:
    words = ["runner.total_iterations=8", f"actor.optimizer.schedule={schedule}"]
    words += ["actor.optimizer.lr=1.0"]
    job = prepare_composed(with_hydra(["hybrid_ppo", *words])[0])
    notes = learning_rate_notes(job.config, changed, 2)
    assert notes == ([] if told is None else [f"    actor: learning rate {told}"])
