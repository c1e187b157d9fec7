"""Advantages of tokens: rewards of several components, shaped; KL as reward; values and returns."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from rlplace.config.blocks.training import AlgorithmConfig
from rlplace.config.read import read_config
from rlplace.errors import RewardError
from rlplace.tokens import Sample
from rlplace.workers.arguments import TextArguments
from rlplace.workers.training.experience import AdvantageEstimator, Experience
from tests.lm_ranks import made_up_samples

GROUPS = [group[:2] for group in made_up_samples()[:2]]
SAMPLES = [sample for group in GROUPS for sample in group]


def estimator(
    name: str = "grpo",
    components: tuple[str, ...] = (),
    reward: Any = None,
    on_poison: str = "stop",
    **algorithm: Any,
) -> AdvantageEstimator:
    placed = ("actor", "rollout", "env", *components)
    config = read_config(
        {
            "cluster": {"component_placement": dict.fromkeys(placed, "0")},
            "actor": {"model": {"path": "anywhere"}},
            "algorithm": {
                "name": name,
                "prompts": 2,
                "samples_per_prompt": 2,
                **algorithm,
            },
            "env": {"task": "arithmetic"},
            **({} if reward is None else {"reward": reward}),
            "faults": {"on_poison": on_poison},
        }
    )
    return AdvantageEstimator(
        TextArguments(config=config, ranks=dict.fromkeys(placed, 1))
    )


def with_rewards(*rewards: float) -> list[list[Sample]]:
    given = iter(rewards)
    return [
        [dataclasses.replace(s, reward=next(given), rewards={}) for s in group]
        for group in GROUPS
    ]


def each(value: float) -> list[np.ndarray]:
    return [np.full(s.response_tokens, value, np.float32) for s in SAMPLES]


def rewards(found: Experience) -> list[float]:
    return [sample.reward for group in found.groups for sample in group]


def test_rewards_of_all_components_are_weighed_and_named() -> None:
    blocks = {"math": {"weight": 2.0}, "safety": {"weight": -1.0}}
    scores = {"reward.math": [np.array([v], np.float32) for v in (1, 2, 3, 4)]}
    scores["reward.safety"] = [np.array([v], np.float32) for v in (0.5, 0, 0, 0)]
    found = estimator(components=("reward.math", "reward.safety"), reward=blocks)(
        with_rewards(10, 20, 30, 40), scores, {}
    )
    assert rewards(found) == [11.5, 24.0, 36.0, 48.0]
    assert found.groups[0][0].rewards == {"reward.math": 1.0, "reward.safety": 0.5}


def test_a_component_that_does_not_apply_adds_nothing_and_has_no_number() -> None:
    none = np.array([], np.float32)
    scores = {"reward.math": [np.array([0.5], np.float32), none, none, none]}
    found = estimator(components=("reward.math",), reward={"math": {"weight": 2.0}})(
        with_rewards(10, 20, 30, 40), scores, {}
    )
    assert rewards(found) == [11.0, 20.0, 30.0, 40.0]
    named = [dict(sample.rewards) for group in found.groups for sample in group]
    assert named == [{"reward.math": 0.5}, {}, {}, {}]


def test_a_variant_estimates_in_place_of_the_algorithm() -> None:
    own = {"name": "tests.own_variant:Rewards"}
    found = estimator("grpo", variant=own, normalize_advantages=False)(
        with_rewards(1, 0, 5, 5), {}, {}
    )
    by_sample = zip(SAMPLES, found.targets["advantages"], (1, 0, 5, 5), strict=True)
    assert all(
        np.array_equal(got, np.full(s.response_tokens, value, np.float32))
        for s, got, value in by_sample
    )


def test_a_variant_estimates_tokens_of_ppo_too() -> None:
    values = {"values": each(0.5)}
    shipped = estimator("ppo", components=("critic",))(
        with_rewards(1, 0, 5, 5), {}, values
    )
    own = {"name": "tests.own_variant:SameEstimates"}
    found = estimator("ppo", components=("critic",), variant=own)(
        with_rewards(1, 0, 5, 5), {}, values
    )
    for target in ("advantages", "returns"):
        for got, expected in zip(
            found.targets[target], shipped.targets[target], strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_without_scorers_each_token_has_the_advantage_of_its_sample() -> None:
    found = estimator("dr_grpo")(with_rewards(1, 0, 5, 5), {}, {})
    by_sample = zip(
        SAMPLES, found.targets["advantages"], (0.5, -0.5, 0, 0), strict=True
    )
    for sample, advantages, advantage in by_sample:
        assert advantages.tolist() == [advantage] * sample.response_tokens
    assert found.targets.keys() == {"advantages"}
    assert found.metrics == {}
    kept = found.learned(AlgorithmConfig(dynamic_sampling=True))
    assert (len(kept.groups), len(kept.targets["advantages"])) == (1, 2)


def test_groups_may_be_compared_by_one_reward() -> None:
    """The answers of the first group are both right; their rewards differ by a penalty. The others differ in both."""
    given = iter([{"right": 1.0}, {"right": 1.0}, {"right": 1.0}, {}])
    groups = [
        [dataclasses.replace(sample, rewards=next(given)) for sample in group]
        for group in with_rewards(1, 0.5, 1, 0)
    ]
    found = estimator("dr_grpo")(groups, {}, {})
    by_sum = AlgorithmConfig(dynamic_sampling=True)
    by_one = dataclasses.replace(by_sum, dynamic_sampling_by="right")
    assert len(found.learned(by_sum).groups) == 2
    (kept,) = found.learned(by_one).groups
    assert [sample.reward for sample in kept] == [1, 0]


def test_answers_that_were_cut_are_compared_and_not_learned() -> None:
    groups = with_rewards(1, 0, 4, 5)
    groups[0][1] = dataclasses.replace(groups[0][1], truncated=True)
    found = estimator("dr_grpo")(groups, {}, {})
    kept = found.learned(AlgorithmConfig(truncated="mask"))
    assert rewards(kept) == [1, 4, 5]
    assert [values[0] for values in kept.targets["advantages"] if len(values)] == [
        0.5,
        -0.5,
        0.5,
    ]
    assert found.learned(AlgorithmConfig()) is found


def test_kl_is_part_of_a_samples_reward_beside_its_group() -> None:
    own = {"old": each(-1.0)}
    scores = {"reference": [*each(-1.0)[:1], *each(-3.0)[1:]]}
    found = estimator("dr_grpo", ("reference",), kl_coef=0.1)(
        with_rewards(0, 0, 0, 0), scores, own
    )
    lost = 0.1 * 2.0 * SAMPLES[1].response_tokens
    assert found.targets["advantages"][0][0] == pytest.approx(lost / 2)
    assert found.targets["advantages"][1][0] == pytest.approx(-lost / 2)
    assert rewards(found) == [0.0] * 4, "reported as they were given"
    tokens = sum(s.response_tokens for s in SAMPLES[1:])
    assert found.metrics["actor/kl_reference"].value == pytest.approx(2.0 * tokens / 4)
    assert found.metrics["actor/kl_coef"].value == pytest.approx(0.1)


def test_shaped_rewards_are_clipped_after_they_are_normalised() -> None:
    found = estimator("dr_grpo", normalize_rewards=True, reward_clip=1.0)(
        with_rewards(0, 0, 0, 100), {}, {}
    )
    # mean 25, deviation 43.3: -0.577 three times, and 1.73, which is clipped
    assert found.targets["advantages"][3][0] == pytest.approx(
        (1.0 + 25 / 43.3012702) / 2, rel=1e-5
    )


def test_rewards_are_normalised_by_all_that_were_ever_seen() -> None:
    made = estimator("dr_grpo", normalize_rewards=True)
    made(with_rewards(0, 0, 0, 100), {}, {})
    found = made(with_rewards(0, 10, 0, 0), {}, {})
    # of 100, 10 and six times 0: mean 13.75, deviation 32.76
    assert found.targets["advantages"][1][0] == pytest.approx(
        10 / 32.7633561 / 2, rel=1e-5
    )


def test_the_weight_of_kl_adapts_from_one_iteration_to_the_next() -> None:
    made = estimator(
        "grpo", ("reference",), kl_coef=0.2, kl_target=1000.0, kl_horizon=8
    )
    scores = {"reference": each(-3.0)}
    used = [
        made(with_rewards(0, 1, 0, 1), scores, {"old": each(-1.0)}).kl_coef
        for _ in range(2)
    ]
    assert used == pytest.approx([0.2, 0.2 * (1 - 0.2 * 4 / 8)])  # far below the target


def test_samples_without_response_tokens_have_no_advantages() -> None:
    empty = [
        [dataclasses.replace(s, mask=np.zeros_like(s.mask)) for s in group]
        for group in GROUPS
    ]
    nothing = [np.zeros(0, np.float32) for _ in SAMPLES]
    found = estimator("ppo", ("critic",))(empty, {"critic": nothing}, {"old": nothing})
    assert all(len(advantages) == 0 for advantages in found.targets["advantages"])


def test_a_poisoned_sample_is_left_out_of_its_group() -> None:
    """One reward of the environment, one of a component; both of a group: it is gone."""
    nan, skipping = math.nan, estimator("dr_grpo", on_poison="skip")
    found = skipping(with_rewards(1, nan, 5, 3), {}, {})
    assert rewards(found) == [1, 5, 3]
    ((sample, why),) = found.non_finite
    assert (sample.group, sample.sample, why) == (
        SAMPLES[1].group,
        SAMPLES[1].sample,
        "reward nan",
    )
    assert [values[0] for values in found.targets["advantages"] if len(values)] == [
        0.0,
        1.0,
        -1.0,
    ]
    assert len(found.learned(AlgorithmConfig(dynamic_sampling=True)).groups) == 1
    scored = estimator("dr_grpo", ("reward",), on_poison="skip")
    scores = [np.array([value], np.float32) for value in (nan, nan, 5, 3)]
    found = scored(with_rewards(1, 1, 0, 0), {"reward": scores}, {})
    assert (rewards(found), len(found.groups), len(found.non_finite)) == ([5, 3], 1, 2)
    assert {why for _, why in found.non_finite} == {"reward reward nan"}
    with pytest.raises(RewardError) as caught:
        skipping(with_rewards(nan, nan, nan, nan), {}, {})
    assert caught.value.code == "all-poisoned"


@pytest.mark.parametrize("poison", ["critic", "reference", "reward"])
def test_a_critic_gets_returns_of_all_samples_nan_of_the_poisoned(poison: str) -> None:
    known = {"critic": each(0.5), "reference": each(-1.0)}
    given = with_rewards(1, 0, math.nan if poison == "reward" else 5, 5)
    if poison != "reward":
        known[poison][2][-1] = math.nan
    found = estimator("ppo", ("critic", "reference"), on_poison="skip", kl_coef=0.1)(
        given, known, {"old": each(-1.0)}
    )
    returns = {
        (scores.group, scores.sample): scores.values
        for group in found.returns()
        for scores in group
    }
    assert len(found.returns()) == len(GROUPS), "as many as the channel has room for"
    assert set(returns) == {(sample.group, sample.sample) for sample in SAMPLES}
    for number, sample in enumerate(SAMPLES):
        values = returns[sample.group, sample.sample]
        assert len(values) == sample.response_tokens
        assert np.isnan(values).all() if number == 2 else np.isfinite(values).all()
