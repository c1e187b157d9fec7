"""Wherever its state lies, a step is AdamW's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from rlplace.config.blocks.training import OptimizerConfig
from rlplace.workers.training.optimizer import Adam, MovingAverage, learning_rate

CONFIG = OptimizerConfig(lr=1.0, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1)
MASTERS = dataclasses.replace(CONFIG, kind="adamw_master")
ON_HOST = dataclasses.replace(CONFIG, on_host=True)
BYTES = dataclasses.replace(CONFIG, kind="adamw_8bit")
BYTES_ON_HOST = dataclasses.replace(BYTES, on_host=True)
RATES = (1e-2, 3e-2, 0.0, 1e-2)


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((4, 3), (5,), (0, 3))
    ]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [
        torch.randn(tensor.shape, generator=generator).to(dtype) for tensor in weights()
    ]


def of_torch() -> list[Tensor]:
    parameters = [nn.Parameter(tensor) for tensor in weights()]
    optimizer = torch.optim.AdamW(
        parameters, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1
    )
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize(
    "config", [CONFIG, MASTERS, ON_HOST], ids=["in place", "masters", "on the host"]
)
def test_a_step_is_that_of_torch(config: OptimizerConfig) -> None:
    shards = weights()
    optimizer = Adam(shards, config)
    assert all(map(torch.equal, shards, weights()))
    for step, rate in enumerate(RATES):
        optimizer.step(gradients(step), rate)
    torch.testing.assert_close(shards, of_torch())


@pytest.mark.parametrize("config", [MASTERS, ON_HOST], ids=["masters", "on the host"])
def test_masters_keep_what_rounding_would_lose(config: OptimizerConfig) -> None:
    shards = [torch.ones(8, dtype=torch.bfloat16)]
    optimizer = Adam(shards, config)
    for _ in range(100):
        optimizer.step(
            [torch.ones(8, dtype=torch.bfloat16)], 1e-4
        )  # each too small to move a bfloat16 of 1.0
    assert shards[0].dtype == torch.bfloat16
    assert torch.allclose(shards[0].float(), torch.tensor(0.99), atol=4e-3)


@pytest.mark.parametrize(
    ("config", "numbers", "on_host"), [(CONFIG, 2, 0), (MASTERS, 3, 0), (ON_HOST, 0, 3)]
)
def test_what_it_holds_is_known_before_the_first_step(
    config: OptimizerConfig, numbers: int, on_host: int
) -> None:
    optimizer = Adam(weights(), config)
    elements, steps = 17, 4 * 3  # a step count per shard
    assert sum(tensor.nbytes for tensor in optimizer.tensors()) == (
        numbers * 4 * elements + steps if numbers else 0
    )
    assert optimizer.host_bytes == (on_host * 4 * elements + steps if on_host else 0)


# ── moments of 8 bits ────────────────────────────────────────────────────────────────────────────────────────────────


def large(seed: int = 1) -> list[Tensor]:
    """More than a block, not a whole number of them; numbers over many decades."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator) ** 3
        for shape in ((40, 30), (257,), (3,), (0, 4))
    ]


@pytest.mark.parametrize(
    "config", [BYTES, BYTES_ON_HOST], ids=["in place", "on the host"]
)
def test_steps_by_8_bits_stay_near_those_of_torch(
    config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of a number is as long as the rate; the first is exact, for nothing was rounded before it."""
    monkeypatch.setattr(
        "rlplace.workers.training.moments._AT_ONCE", 2
    )  # several pieces of a tensor
    shards, exact = large(), large()
    rounded, whole = (
        Adam(shards, config),
        Adam(exact, dataclasses.replace(config, kind="adamw")),
    )
    for step in range(20):
        slopes = large(100 + step % 3)
        rounded.step([slope.clone() for slope in slopes], 1e-3)
        whole.step(slopes, 1e-3)
        if step == 0:
            torch.testing.assert_close(shards, exact, rtol=0.0, atol=0.0)
    apart = torch.cat(
        [(a - b).abs().flatten() for a, b in zip(shards, exact, strict=True)]
    )
    assert apart.mean() < 0.02 * 20e-3
    assert apart.max() < 0.3 * 20e-3


def test_a_number_whose_gradients_are_small_beside_those_of_its_block_is_not_thrown_far() -> (
    None
):
    """Its second moment would round to zero, and what is left of its first be divided by eps."""
    shards = [torch.zeros(256)]
    optimizer = Adam(shards, BYTES)
    slopes = torch.full((256,), 1e-6)
    slopes[0] = 1.0
    for step in range(30):
        optimizer.step([slopes * (step < 10)], 1e-3)
    assert shards[0].abs().max() < 30 * 1e-3 * 3


def test_a_second_moment_far_below_those_of_its_block_does_not_round_to_zero() -> None:
    """It lasts longer than the first one, by which alone the first would soon be large enough to be kept beside it."""
    shards = [torch.zeros(256)]
    optimizer = Adam(shards, dataclasses.replace(BYTES, eps=1e-10))
    for step in range(30):
        slopes = torch.full((256,), 1e-7 * (step < 6))
        slopes[0] = float(step == 0)
        optimizer.step([slopes], 1e-3)
    assert shards[0].abs().max() < 30 * 1e-3 * 3


def test_packing_again_changes_no_bit() -> None:
    optimizer = Adam(large(), BYTES)
    for step in range(3):
        optimizer.step(large(step), 1e-3)
    before = [tensor.clone() for tensor in optimizer.moments.tensors()]
    moments = optimizer.moments.read(lambda tensor: tensor)
    optimizer.moments.take_over(moments, 3, lambda tensor: tensor)
    assert all(map(torch.equal, before, optimizer.moments.tensors()))


@pytest.mark.parametrize(
    "kinds", [(BYTES, BYTES), (CONFIG, BYTES), (BYTES, CONFIG)], ids=lambda k: str(k)
)
def test_another_optimizer_goes_on_from_what_is_read(
    kinds: tuple[OptimizerConfig, OptimizerConfig],
) -> None:
    first, second = kinds
    shards, whole = large(), large()
    optimizer, undisturbed = Adam(shards, first), Adam(whole, CONFIG)
    for step in range(3):
        optimizer.step(large(step), 1e-3)
        undisturbed.step(large(step), 1e-3)
    other = Adam(shards, second)
    read, there = (
        each.moments.read(lambda tensor: tensor) for each in (optimizer, other)
    )
    for name, moments in there.items():
        for moment, value in zip(moments, read[name], strict=True):
            moment.copy_(value)
    other.moments.take_over(there, 3, lambda tensor: tensor)
    if first == second:
        assert all(
            map(torch.equal, optimizer.moments.tensors(), other.moments.tensors())
        )
    other.step(large(3), 1e-3)
    undisturbed.step(large(3), 1e-3)
    torch.testing.assert_close(shards, whole, rtol=0.0, atol=2e-3)


@pytest.mark.parametrize(
    ("config", "masters", "on_host"), [(BYTES, 0, False), (BYTES_ON_HOST, 4, True)]
)
def test_8_bits_are_what_is_held(
    config: OptimizerConfig, masters: int, on_host: bool
) -> None:
    optimizer, elements, blocks = Adam(large(), config), 1200 + 257 + 3, 5 + 2 + 1
    held = 2 * blocks * (256 + 4) + masters * elements
    assert sum(tensor.nbytes for tensor in optimizer.tensors()) == (
        0 if on_host else held
    )
    assert optimizer.host_bytes == (held if on_host else 0)


def test_the_rate_warms_up_and_falls() -> None:
    def rates(schedule: str, warmup: int = 0, least: float = 0.0) -> list[float]:
        config = OptimizerConfig(
            lr=1.0, schedule=schedule, warmup_steps=warmup, min_lr_ratio=least
        )
        return [
            learning_rate(config, steps_made, steps_made / 4) for steps_made in range(5)
        ]

    assert rates("constant") == [1.0] * 5
    assert rates("constant", warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates("linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates("cosine") == pytest.approx([1.0, 0.85355, 0.5, 0.14645, 0.0], abs=1e-5)
    assert rates("linear", warmup=2) == [0.5, 0.75, 0.5, 0.25, 0.0]
    assert rates("constant", least=0.1) == [1.0] * 5
    assert rates("linear", least=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_a_cosine_that_ends_above_0_is_that_of_transformers() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    reference = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, 0, 10, min_lr_rate=0.1
    )
    config = OptimizerConfig(lr=0.5, schedule="cosine", min_lr_ratio=0.1)
    for step in range(11):
        assert learning_rate(config, step, step / 10) == pytest.approx(
            reference.get_last_lr()[0]
        )
        optimizer.step()
        reference.step()


def test_it_follows_the_weights_and_gives_them_back() -> None:
    weights = torch.zeros(3, dtype=torch.bfloat16)
    average = MovingAverage([weights], decay=0.75)
    weights.fill_(1.0)
    average.update()
    average.update()
    with average.in_place():
        assert weights.tolist() == [0.4375] * 3  # 1 - 0.75 ** 2
    assert weights.tolist() == [1.0] * 3
    assert average.host_bytes == 12
