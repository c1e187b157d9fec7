"""The same samples give the same update of actor and critic for any number of ranks, on all of them alike."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.lm_ranks import ADAM, LmScenario, Outcome, run_lm_ranks

QUICK = ADAM | {"lr": 1e-2}
SLOW = {
    ("one step", 4),
    ("near itself without factors", 2),
    ("near itself without factors", 4),
    ("several steps", 2),
    ("critic with factors", 2),
    ("experts, factors elsewhere", 2),
}
# With fewer samples in a step than ranks; an odd number of ranks, of which only the first has a row of a critic's head.
SCENARIOS: dict[str, tuple[str, tuple[int, ...], LmScenario]] = {
    "one step": ("qwen", (2, 4), LmScenario(model=Path())),
    "several steps": (
        "llama",
        (2, 4),
        LmScenario(
            model=Path(),
            algorithm={
                "tis_cap": 1.5,
                "epochs": 2,
                "train_batch": 3,
                "entropy_coef": 0.01,
            },
            trained={"zero_stage": 2},
        ),
    ),
    "near itself without factors": (
        "qwen",
        (2, 4),
        LmScenario(
            model=Path(),
            algorithm={"kl_coef": 0.1, "train_batch": 5},
            trained={"lora_rank": 3, "optimizer": QUICK},
            reference={"share_actor": True},
        ),
    ),
    "factors apart": (
        "llama",
        (2,),
        LmScenario(
            model=Path(),
            trained={"lora_rank": 3, "optimizer": QUICK, "sync": {"mode": "lora"}},
        ),
    ),
    "experts": ("experts", (2,), LmScenario(model=Path(), algorithm={"epochs": 2})),
    "experts, factors elsewhere": (
        "experts",
        (2,),
        LmScenario(model=Path(), trained={"lora_rank": 3}),
    ),
    "critic": ("qwen", (2,), LmScenario(model=Path(), component="critic")),
    "critic in several steps": (
        "llama",
        (3,),
        LmScenario(
            model=Path(),
            component="critic",
            algorithm={"epochs": 2, "train_batch": 2, "value_clip": 0.05},
            trained={"zero_stage": 2},
        ),
    ),
    "critic with factors": (
        "qwen",
        (2,),
        LmScenario(
            model=Path(),
            component="critic",
            trained={"lora_rank": 3, "optimizer": QUICK},
        ),
    ),
}
AGREED = (
    "loss entropy approx_kl clipped_low reward value_loss clip_share "
    "explained_variance grad_norm optimizer_steps lr"
)


@functools.cache
def outcomes(folder: Path, name: str, ranks: int) -> list[Outcome]:
    return run_lm_ranks(
        dataclasses.replace(SCENARIOS[name][2], model=folder, ranks=ranks, iterations=2)
    )


def check_update_of_one(
    together: Sequence[Outcome], one: Sequence[Outcome], component: str
) -> None:
    """Whether ranks have made the update that one rank makes, and all of them have the same of it."""
    (alone,) = one
    assert len({outcome.digest for outcome in together}) == 1
    for outcome in together:
        assert outcome.weights.keys() == alone.weights.keys()
        assert all(
            np.array_equal(outcome.weights[key], tensor)
            for key, tensor in together[0].weights.items()
        )
    for weight, expected in alone.weights.items():
        np.testing.assert_allclose(
            together[0].weights[weight], expected, rtol=1e-4, atol=2e-5, err_msg=weight
        )
    atol, rtol, metrics_atol = (
        (1e-4, 0.0, 1e-6) if component == "actor" else (1e-3, 1e-3, 1e-4)
    )
    for values, expected in zip(together[0].values, alone.values, strict=True):
        np.testing.assert_allclose(values, expected, atol=atol, rtol=rtol)
    for key in [f"{component}/{agreed}" for agreed in AGREED.split()]:
        found, expected = (
            [m[key].value for m in of.metrics if key in m]
            for of in (together[0], alone)
        )
        assert found == pytest.approx(expected, rel=1e-3, abs=metrics_atol), key


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, n, marks=pytest.mark.slow if (name, n) in SLOW else ())
        for name, (_, ranks, _) in SCENARIOS.items()
        for n in ranks
    ],
)
def test_ranks_make_the_update_of_one(
    request: pytest.FixtureRequest, name: str, ranks: int
) -> None:
    folder: Path = request.getfixturevalue(SCENARIOS[name][0])
    check_update_of_one(
        outcomes(folder, name, ranks),
        outcomes(folder, name, 1),
        SCENARIOS[name][2].component,
    )


def test_gradients_that_ranks_make_early_make_the_same_step(qwen: Path) -> None:
    early = LmScenario(
        model=qwen, ranks=2, iterations=2, algorithm={"accumulate_early": True}
    )
    found, (expected,) = run_lm_ranks(early), outcomes(qwen, "one step", 1)
    assert found[0].digest == found[1].digest
    assert all(
        metrics["actor/accumulate_s"].value > 1e-3
        for outcome in found
        for metrics in outcome.metrics
    )
    for weight, tensor in expected.weights.items():
        np.testing.assert_allclose(
            found[0].weights[weight], tensor, rtol=1e-4, atol=2e-5, err_msg=weight
        )


def test_the_optimizer_may_lie_on_the_host_of_each_rank(qwen: Path) -> None:
    on_host = LmScenario(
        model=qwen,
        ranks=2,
        iterations=2,
        trained={"optimizer": ADAM | {"on_host": True}},
    )
    assert run_lm_ranks(on_host)[0].digest == outcomes(qwen, "one step", 2)[0].digest
