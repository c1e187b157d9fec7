"""An iteration in parts: how many groups each has, and what is said of all of them together."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.config import Config, read_config
from rlplace.metrics import Metric
from rlplace.workers.training.parts import Part, metrics_of, parts_of
from rlplace.workers.training.trainer import Update
from tests.lm_ranks import made_up_samples


def config(placed: tuple[str, ...] = ("actor", "env", "rollout"), **algorithm: Any) -> Config:
    asked = {"name": "grpo", "prompts": 7, "samples_per_prompt": 4, "max_staleness": 1, "train_batch": 8}
    blocks = {"env": {"task": "arithmetic"}, "actor": {"model": {"path": "somewhere"}}}
    placement = dict.fromkeys(placed, "0")
    return read_config({"cluster": {"component_placement": placement}, "algorithm": asked | algorithm, **blocks})


@pytest.mark.parametrize(
    ("algorithm", "parts"),
    [
        ({}, (2, 2, 2, 1)),
        ({"train_batch": 15}, (3, 3, 1)),  # steps of so many samples at most, groups stay whole
        ({"train_batch": 3}, (1,) * 7),
        ({"train_batch": 28}, (7,)),
        ({"train_batch": None}, (7,)),
        ({"max_staleness": 0}, (7,)),
        ({"epochs": 2}, (7,)),  # every epoch needs all samples
    ],
)
def test_a_part_is_a_step_of_whole_groups(algorithm: dict[str, Any], parts: tuple[int, ...]) -> None:
    assert parts_of(config(**algorithm)) == parts


def test_what_is_judged_is_learned_whole() -> None:
    assert parts_of(config(("actor", "env", "rollout", "reference"))) == (7,)


def update(loss: float, steps: int = 1) -> Update:
    return Update(
        mean={"loss": loss, "grad_norm": 2.0} if steps else None,
        steps=steps,
        lr=loss,
        tokens=60,
        imbalance=loss,
        metrics={"actor/mismatch": Metric(loss)},
    )


def test_an_iteration_is_the_sum_of_its_parts() -> None:
    groups = made_up_samples(groups=3, version=1)
    parts = [
        Part(groups=groups[:2], update=update(0.25), wait_s=1.0, learn_s=2.0),
        Part(groups=groups[2:], update=update(0.75), wait_s=0.5, learn_s=1.0),
        Part(groups=(), update=update(0.0, steps=0), wait_s=0.0, learn_s=1.0),  # none of its groups had a signal
    ]
    numbers = {name: metric.value for name, metric in metrics_of(parts, version=3).items()}
    assert (numbers["actor/learn_s"], numbers["actor/wait_s"]) == (4.0, 1.5)
    assert numbers["actor/optimizer_steps"] == 2
    assert numbers["actor/tokens_per_s"] == 45.0
    assert (numbers["actor/loss"], numbers["actor/grad_norm"]) == (0.5, 2.0)
    assert (numbers["actor/lr"], numbers["actor/rank_imbalance"]) == (0.75, 0.75)
    assert (numbers["actor/groups"], numbers["actor/samples"]) == (3, 12)
    assert numbers["actor/age_max"] == 2
    assert numbers["actor/mismatch"] == 0.25  # of the first part, whose weights are those of the iteration


def test_of_a_single_part_every_number_is_its_own() -> None:
    numbers = metrics_of([Part(groups=(), update=update(1 / 3, steps=3), wait_s=0.0, learn_s=0.7)], version=0)
    assert (numbers["actor/loss"].value, numbers["actor/lr"].value) == (1 / 3, 1 / 3)
    assert numbers["actor/tokens_per_s"].value == 60 / 0.7
