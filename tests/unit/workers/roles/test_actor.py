"""An iteration in parts: how many groups each has, and the metrics of all of them together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlplace.config.read import read_config
from rlplace.metrics import Metric, reduce_metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.workers.arguments import TextArguments, parts_of
from rlplace.workers.roles.learn_metrics import as_text, sample_metrics, update_metrics
from rlplace.workers.training.optimizer import Update
from tests.lm_ranks import made_up_samples
from tests.tiny_tokenizer import tiny_tokenizer
from tests.unit.algo.samples import sample


def job(
    placed: tuple[str, ...] = ("actor", "env", "rollout"), **algorithm: Any
) -> TextArguments:
    asked = {
        "name": "grpo",
        "prompts": 7,
        "samples_per_prompt": 4,
        "max_staleness": 1,
        "train_batch": 8,
    }
    blocks = {"env": {"task": "arithmetic"}, "actor": {"model": {"path": "somewhere"}}}
    placement = dict.fromkeys(placed, "0")
    config = read_config(
        {
            "cluster": {"component_placement": placement},
            "algorithm": asked | algorithm,
            **blocks,
        }
    )
    return TextArguments(config=config, ranks=dict.fromkeys(placed, 1))


@pytest.mark.parametrize(
    ("algorithm", "parts"),
    [
        ({}, (2, 2, 2, 1)),
        (
            {"train_batch": 15},
            (3, 3, 1),
        ),  # steps of so many samples at most, groups stay whole
        ({"train_batch": 3}, (1,) * 7),
        ({"train_batch": 28}, (7,)),
        ({"train_batch": None}, (7,)),
        ({"max_staleness": 0}, (7,)),
        ({"epochs": 2}, (7,)),  # every epoch needs all samples
    ],
)
def test_a_part_is_a_step_of_whole_groups(
    algorithm: dict[str, Any], parts: tuple[int, ...]
) -> None:
    assert parts_of(job(**algorithm)) == parts
    assert parts_of(job(("actor", "env", "rollout", "reference"), **algorithm)) == (
        7,
    )  # scored first


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
    updates = [
        update(0.25),
        update(0.75),
        update(0.0, steps=0),
    ]  # no group of the last part had a signal
    numbers = {
        n: metric.value
        for n, metric in (
            sample_metrics(groups, 3) | update_metrics("actor", updates, learn_s=4.0)
        ).items()
    }
    assert numbers["actor/optimizer_steps"] == 2
    assert numbers["actor/tokens_per_s"] == 45.0
    assert (numbers["actor/loss"], numbers["actor/grad_norm"]) == (0.5, 2.0)
    assert (numbers["actor/lr"], numbers["actor/rank_imbalance"]) == (0.75, 0.75)
    assert (numbers["actor/groups"], numbers["actor/samples"]) == (3, 12)
    assert numbers["actor/age_max"] == 2
    assert (
        numbers["actor/mismatch"] == 0.25
    )  # of the first part, whose weights are those of the iteration


# ── samples ───────────────────────────────────────────────────────────────────────────────────────────────────────────


GROUPS = [
    [
        sample(response=2, reward=1.0, rewards={"right": 1.0}, versions=[4, 5]),
        sample(
            response=1,
            reward=0.0,
            rewards={"right": 0.0, "min": 2.0},
            versions=[5],
            truncated=True,
        ),
    ],
    [
        sample(
            prompt=4,
            response=1,
            reward=0.5,
            rewards={"right": 1.0},
            versions=[3],
            turns=3,
        )
    ],
    [sample(response=0, reward=0.5, turns=0)],  # to which no reward applies
]


def test_numbers_by_hand() -> None:
    assert reduce_metrics([sample_metrics(GROUPS, version=5)]) == {
        "actor/reward": 0.5,
        "actor/reward_min": 0.0,
        "actor/reward_max": 1.0,
        "actor/reward/right": pytest.approx(2 / 3),
        "actor/reward/min": 2.0,
        "actor/groups": 3.0,
        "actor/groups_with_signal": pytest.approx(1 / 3),
        "actor/samples": 4.0,
        "actor/tokens": 5 + 4 + 5 + 3,
        "actor/tokens_learned": 4.0,
        "actor/length": 17 / 4,
        "actor/length_max": 5.0,
        "actor/length_learned": 1.0,
        "actor/length_learned_max": 2.0,
        "actor/turns": 5 / 4,
        "actor/truncated_share": 0.25,
        "actor/age": (1 + 0 + 0 + 2) / 4,
        "actor/age_max": 2.0,
        "actor/age_mixed": 0.25,
        "actor/unrewarded": 1,
    }


def test_ranks_reduce_to_the_same() -> None:
    whole = reduce_metrics([sample_metrics(GROUPS, version=5)])
    by_rank = [
        sample_metrics(GROUPS[:1], version=5),
        sample_metrics(GROUPS[1:], version=5),
        sample_metrics([], 5),
    ]
    assert reduce_metrics(by_rank) == pytest.approx(whole)


def test_samples_to_read_are_of_all_rewards_and_long_ones_are_clipped(
    tmp_path: Path,
) -> None:
    letters = Tokenizer.load(tiny_tokenizer(tmp_path))
    rewards = [0.5, 0.0, 1.0, 0.25, 0.75]
    groups = [
        [
            sample(group=g, number=n, reward=reward + g)
            for n, reward in enumerate(rewards)
        ]
        for g in range(2)
    ]
    shown = [json.loads(text) for text in as_text(groups, 4, letters)]
    assert [each["reward"] for each in shown] == [0.0, 0.75, 1.25, 2.0]
    assert [(each["group"], each["sample"]) for each in (shown[0], shown[-1])] == [
        (0, 1),
        (1, 2),
    ]
    least = groups[0][1]
    assert shown[0]["prompt"] == letters.decode(least.tokens[:3], special=True)
    assert shown[0]["answer"] == letters.decode(least.tokens[3:], special=True)
    assert len(list(as_text(groups, 100, letters))) == 10
    assert list(as_text(groups, 0, letters)) == list(as_text([], 4, letters)) == []
    (silent,) = (
        json.loads(text)
        for text in as_text([[sample(prompt=3, response=0)]], 1, letters)
    )
    assert (silent["prompt"] != "", silent["answer"], silent["tokens"]) == (True, "", 0)
    (long,) = (
        json.loads(text) for text in as_text([[sample(prompt=9000)]], 1, letters)
    )
    assert "characters left out]" in long["prompt"]
    assert len(long["prompt"]) < 5000
