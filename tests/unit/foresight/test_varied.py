"""Spaces of a job under other micro-batches and bounds of staleness."""

from __future__ import annotations

import pytest

from rlplace.errors import ConfigError
from rlplace.foresight.space import Space
from rlplace.foresight.varied import varied
from tests.foreseen import job_of

TOLD: list[str] = []
SMALL = "actor.token_budget=300", "algorithm.max_prompt_length=40"


def spaces(
    *keys: str, config: str = "hybrid_grpo_llm", words: tuple[str, ...] = ()
) -> list[Space]:
    job = job_of(config, *words)
    TOLD.clear()
    return varied(
        job.config, job.plan, keys, fixed=(), accelerators=(), tell=TOLD.append
    )


def test_a_budget_is_a_quarter_to_four_times_as_large_and_holds_the_longest_sample() -> (
    None
):
    first, *others = spaces(
        "actor.token_budget", words=(*SMALL, "algorithm.max_new_tokens=16")
    )
    assert first.varied == {}
    assert [space.varied for space in others] == [
        {"actor.token_budget": n} for n in (75, 150, 600, 1200)
    ]
    for space in others:
        changes = space.changes(space.current())
        assert changes == {"actor.token_budget": space.config.actor.token_budget}
    long = spaces("actor.token_budget", words=(*SMALL, "algorithm.max_new_tokens=100"))
    assert [space.varied["actor.token_budget"] for space in long[1:]] == [
        150,
        600,
        1200,
    ]


def test_ahead_of_learning_generation_is_apart() -> None:
    first, *others = spaces("algorithm.max_staleness")
    assert [space.plan.needs.ahead for space in (first, *others)] == [0, 1, 2]
    for space in others:
        assert not space.plan.placement.shared("actor", "rollout")
        changes = space.changes(space.current())
        assert changes["algorithm.max_staleness"] == space.plan.needs.ahead
        assert any(key.startswith("cluster.component_placement") for key in changes)
    assert (
        len(
            spaces(
                "algorithm.max_staleness", words=("cluster.accelerators_per_node=1",)
            )
        )
        == 1
    )
    assert [line.split(":")[0] for line in TOLD] == ["left out", "left out"]


@pytest.mark.parametrize(
    ("config", "key", "told"),
    [
        ("hybrid_grpo_llm", "actor.token_budgets", "vary=actor.token_budget"),
        (
            "hybrid_grpo_llm",
            "algorithm.prompts",
            "these can be varied: actor.token_budget",
        ),
        (
            "hybrid_ppo",
            "algorithm.max_staleness",
            "leave out vary=algorithm.max_staleness",
        ),
    ],
)
def test_what_cannot_be_varied_is_told(config: str, key: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        spaces(key, config=config)
    assert told in str(error.value)
