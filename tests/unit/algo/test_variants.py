"""Formulas of the user's own: the same ones give the same gradients, wrong ones are told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlplace.algo.losses import PPO_MEANS, Clip, StepSamples, ppo_slopes
from rlplace.algo.variants import Steps, TokenSamples, Variant, ppo_slopes_by_variant
from rlplace.config.blocks.training import AlgorithmConfig
from rlplace.config.read import read_config
from rlplace.errors import ConfigError
from rlplace.jobs.variants import check_variant
from rlplace.workers.training.variant import variant_of
from tests.own_variant import Same, Wrong

CLIP = Clip(low=0.2, high=0.3)


def algorithm(**keys: object) -> AlgorithmConfig:
    placement = {"component_placement": {"actor": "0", "env": "0", "rollout": "0"}}
    return read_config(
        {"cluster": placement, "env": {"id": "CartPole-v1"}, "algorithm": keys}
    ).algorithm


RULES = algorithm(clip_ratio_high=0.3)


def minibatch(n: int) -> tuple[Tensor, Tensor, Tensor, StepSamples]:
    generator = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    old = StepSamples(
        normal(n, 3), normal(n, 1), normal(n) * 0.3, normal(n), normal(n), normal(n)
    )
    return (
        old.logprobs + 0.3 * normal(n),
        old.values + 0.3 * normal(n),
        normal(n).abs(),
        old,
    )


@pytest.mark.parametrize("n", [64, 0])
@pytest.mark.parametrize("value_clip", [None, 0.2])
@pytest.mark.parametrize(
    "own", [Same, object], ids=["the same formulas", "none of its own"]
)
def test_the_same_formulas_have_the_slopes_that_are_written_by_hand(
    n: int, value_clip: float | None, own: type
) -> None:
    made = (
        own(algorithm(clip_ratio_high=0.3, value_clip=value_clip))
        if own is Same
        else own()
    )
    rules = {"value_clip": value_clip, "value_coef": 0.7, "count": 100}
    given = (*minibatch(n), CLIP)
    expected = ppo_slopes(*given, **rules)
    with torch.inference_mode():
        found = ppo_slopes_by_variant(Variant("own", made), *given, **rules)
    torch.testing.assert_close(found.logprobs, expected.logprobs)
    torch.testing.assert_close(found.values, expected.values)
    torch.testing.assert_close(found.shares[: len(PPO_MEANS)], expected.shares)
    if own is Same:
        ratio = (given[0] - given[3].logprobs).exp().sum() / 100
        torch.testing.assert_close(found.shares[len(PPO_MEANS) :], ratio[None])


def test_what_is_of_another_shape_or_without_a_gradient_is_told_with_what_was_to_be_returned() -> (
    None
):
    logprobs, values, _, old = minibatch(4)
    samples = TokenSamples(old.logprobs, old.advantages, torch.tensor([4]))
    variant = Variant("my:Wrong", Wrong(RULES))
    steps = Steps(*(torch.zeros(2, 3) for _ in Steps._fields))
    wrong = {
        "a tensor of shape [4]": lambda: variant.policy_loss(
            logprobs.requires_grad_(), samples
        ),
        "without detach or no_grad": lambda: variant.value_loss(
            values.requires_grad_(), old.values, old.returns
        ),
        "a dict of tensors by name": lambda: variant.metrics(logprobs, samples),
        "advantages and returns, [2, 3] each": lambda: variant.advantages_and_returns(
            steps
        ),
        "a tensor of shape [2, 3]": lambda: variant.advantages(steps),
    }
    for fix, call in wrong.items():
        with pytest.raises(ConfigError, match="of my:Wrong does not return") as caught:
            call()
        (problem,) = caught.value.problems
        assert problem.code == "bad-variant"
        assert fix in str(problem.fix)


@pytest.mark.parametrize(
    ("variant", "fix"),
    [
        ({"name": "tests.own_variant:Sam"}, "name: tests.own_variant:Same"),
        ({"name": "tests.own_variant:Misspelt"}, "def policy_loss(self, ...)"),
        ({"name": "tests.own_variant:AlgorithmConfig"}, "def advantages(self, ...)"),
        (
            {"name": "tests.own_variant:Same", "kwargs": {"double": True}},
            "doubled: true",
        ),
        (
            {"name": "tests.own_variants:Same"},
            "put the folder of your package on PYTHONPATH",
        ),
        ({"name": "tests.own_variant:__doc__"}, "name: <package.module:Class>"),
    ],
    ids=lambda value: value.get("name") if isinstance(value, dict) else "",
)
def test_what_cannot_be_used_is_reported_before_a_run(
    variant: dict[str, object], fix: str
) -> None:
    placement = {"component_placement": {"actor": "0", "env": "0", "rollout": "0"}}
    found = {
        "cluster": placement,
        "env": {"id": "CartPole-v1"},
        "algorithm": {"variant": variant},
    }
    (problem,) = check_variant(read_config(found))
    assert problem.code == "unknown-variant"
    assert problem.key.startswith("algorithm.variant.")
    assert fix in str(problem.fix)


def test_without_a_name_there_is_none() -> None:
    assert variant_of(algorithm()) is None


class Uneven:
    """Has other metrics where there is little to measure."""

    def metrics(self, logprobs: Tensor, samples: object) -> dict[str, Tensor]:
        by_name = {"moved": logprobs, "above": logprobs + 1.0}
        return (
            by_name
            if len(logprobs) > 1
            else {"above": logprobs + 1.0, "other": logprobs}
        )


class Turned:
    """Names its metrics in another order where there is little to measure."""

    def metrics(self, logprobs: Tensor, samples: object) -> dict[str, Tensor]:
        names = ["b", "a"] if len(logprobs) > 1 else ["a", "b"]
        return {name: torch.full_like(logprobs, float(ord(name))) for name in names}


def test_metrics_have_the_same_names_and_order_in_all_minibatches() -> None:
    samples = minibatch(1)[3]
    turned = Variant("own", Turned())
    assert [*turned.metrics(torch.zeros(2), samples)] == [
        *turned.metrics(torch.zeros(1), samples)
    ]
    uneven = Variant("own", Uneven())
    uneven.metrics(torch.zeros(2), samples)
    with pytest.raises(ConfigError, match="bad-variant") as raised:
        uneven.metrics(torch.zeros(1), samples)
    assert "above, other" in str(raised.value)
    assert "above, moved" in str(raised.value)
