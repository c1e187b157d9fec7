"""What every rollout engine must do, whatever is behind it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from rlplace.config.blocks.policies import MlpConfig
from rlplace.config.blocks.training import ActorConfig, AlgorithmConfig
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.errors import NotResident
from rlplace.models.mlp import noise_shape
from rlplace.models.policy_networks import build_policy
from rlplace.placement.schedule import Residency
from rlplace.workers.engines.contract import Engine
from rlplace.workers.engines.torch import TorchEngine
from tests.rollout_stage import Ledger

OFF, WEIGHTS, FULL = Residency.OFF, Residency.WEIGHTS, Residency.FULL
WORKSPACE = 4096
SPACES = {
    "discrete": Spaces(observation_shape=(4,), actions=DiscreteActions(n=3)),
    "continuous": Spaces(
        observation_shape=(2, 3),
        actions=ContinuousActions(shape=(2,), low=(-1, -1), high=(1, 1)),
    ),
}


class Bench:
    """An engine with its device and weights that fit it."""

    def __init__(self, spaces: Spaces, limit: int | None = None) -> None:
        self.spaces = spaces
        self.device = Ledger(limit)
        policy = self._policy(seed=99)
        self.engine: Engine = TorchEngine(
            policy,
            device=self.device,
            owner="rollout rank 0",
            workspace_bytes=WORKSPACE,
        )

    def _policy(self, seed: int) -> torch.nn.Module:
        return build_policy(
            self.spaces, ActorConfig(model=MlpConfig()), AlgorithmConfig(), seed
        )

    def weights(self, seed: int = 1) -> Mapping[str, Tensor]:
        return self._policy(seed).state_dict()

    @property
    def weight_bytes(self) -> int:
        return sum(w.nbytes for w in self.weights().values())

    def batch(self, rows: int = 5) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.random.default_rng(0)
        observations = numbers.standard_normal(
            (rows, *self.spaces.observation_shape)
        ).astype(np.float32)
        return observations, numbers.random(
            (rows, *noise_shape(self.spaces.actions))
        ).astype(np.float32)


@pytest.fixture(params=SPACES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(SPACES[request.param])


@pytest.fixture
def ready(bench: Bench) -> Bench:
    bench.engine.move(FULL)
    bench.engine.load(bench.weights(), 7)
    return bench


def test_it_decides_one_action_per_row_and_says_by_which_version(ready: Bench) -> None:
    decision = ready.engine.decide(*ready.batch())
    discrete = isinstance(ready.spaces.actions, DiscreteActions)
    assert decision.actions.shape == ((5,) if discrete else (5, 2))
    assert decision.actions.dtype == (np.int64 if discrete else np.float32)
    for scalars in (decision.logprobs, decision.values):
        assert (scalars.shape, scalars.dtype) == ((5,), np.float32)
        assert np.isfinite(scalars).all()
    assert decision.version == 7


def test_the_same_row_with_the_same_noise_gets_the_same_action(ready: Bench) -> None:
    observations, noise = ready.batch(64)
    whole, part = (
        ready.engine.decide(observations, noise),
        ready.engine.decide(observations[2:5], noise[2:5]),
    )
    assert np.allclose(whole.actions[2:5], part.actions, atol=1e-6)
    assert np.allclose(whole.logprobs[2:5], part.logprobs, atol=1e-5)
    again = ready.engine.decide(observations, noise)
    assert np.array_equal(whole.actions, again.actions)
    assert np.array_equal(whole.values, again.values)
    assert not np.array_equal(
        whole.actions, ready.engine.decide(observations, noise[::-1].copy()).actions
    )


def test_it_decides_by_the_weights_loaded_last(ready: Bench) -> None:
    before, first = ready.engine.decide(*ready.batch()), ready.engine.digest()
    ready.engine.load(ready.weights(seed=2), 8)
    after = ready.engine.decide(*ready.batch())
    assert after.version == 8
    assert not np.array_equal(before.values, after.values)
    assert ready.engine.digest() != first
    ready.engine.load(ready.weights(seed=1), 9)
    assert np.array_equal(ready.engine.decide(*ready.batch()).values, before.values)
    assert ready.engine.digest() == first


def test_each_residency_holds_what_it_says(bench: Bench) -> None:
    expected = {
        OFF: 0,
        WEIGHTS: bench.weight_bytes,
        FULL: bench.weight_bytes + WORKSPACE,
    }
    for to in (FULL, OFF, WEIGHTS, FULL, WEIGHTS, OFF, OFF, WEIGHTS, WEIGHTS):
        assert bench.engine.move(to) == expected[to]
        assert bench.device.held_bytes() == expected[to]
        assert bench.engine.residency == to


def test_weights_outlive_all_but_off(ready: Bench) -> None:
    digest = ready.engine.digest()
    ready.engine.move(WEIGHTS)
    assert ready.engine.digest() == digest
    ready.engine.move(FULL)
    ready.engine.decide(*ready.batch())
    ready.engine.move(OFF)
    ready.engine.move(FULL)
    for ask in (ready.engine.digest, lambda: ready.engine.decide(*ready.batch())):
        with pytest.raises(NotResident) as caught:
            ask()
        assert caught.value.code == "no-weights"
    ready.engine.load(ready.weights(), 8)
    assert ready.engine.digest() == digest


@pytest.mark.parametrize("residency", [OFF, WEIGHTS])
def test_deciding_below_full_is_refused(ready: Bench, residency: Residency) -> None:
    ready.engine.move(residency)
    with pytest.raises(NotResident) as caught:
        ready.engine.decide(*ready.batch())
    assert caught.value.code == "not-resident"
    assert "needs residency full" in str(caught.value)


@pytest.mark.parametrize("spare", [-1, WORKSPACE - 1])
def test_an_onload_that_does_not_fit_can_be_tried_again(spare: int) -> None:
    size = Bench(SPACES["discrete"]).weight_bytes
    bench = Bench(SPACES["discrete"], limit=size + spare)
    with pytest.raises(MemoryError):
        bench.engine.move(FULL)
    assert bench.device.held_bytes() <= size
    bench.device.limit = None
    assert bench.engine.move(FULL) == size + WORKSPACE
    bench.engine.load(bench.weights(), 1)
    assert bench.engine.decide(*bench.batch()).version == 1


def test_closing_frees_everything(ready: Bench) -> None:
    ready.engine.close()
    assert ready.device.held == {}
    ready.engine.close()
