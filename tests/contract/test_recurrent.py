"""A policy with memory learns as a plain program over whole episodes does, from the memory with which it acted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.models.policy_networks import build_policy
from rlplace.placement.schedule import Residency
from rlplace.trajectory import Trajectory
from tests.actor_ranks import (
    THREE_CHOICES,
    Scenario,
    first_iteration,
    learn,
    make_actor,
)
from tests.worker_ranks import listen, rendezvous_at

ROWS, STEPS, SIZE, SHOWN, LENGTH = 3, 8, 6, 5, 4
GAMMA, LAMBDA, CLIP, VALUE_COEF, ENTROPY_COEF, LR, MAX_NORM, EPOCHS = (
    0.97,
    0.9,
    0.2,
    0.5,
    0.01,
    1e-2,
    0.5,
    3,
)


def scenario(memory: str, **algorithm: object) -> Scenario:
    model = {"hidden": [7], "memory": memory, "memory_size": SIZE}
    given = {
        "gamma": GAMMA,
        "gae_lambda": LAMBDA,
        "epochs": EPOCHS,
        "num_minibatches": 1,
        "unroll_steps": LENGTH,
        "entropy_coef": ENTROPY_COEF,
        "normalize_observations": False,
        "rollout_steps": STEPS,
        **algorithm,
    }
    optimizer = {"lr": LR, "schedule": "constant", "max_grad_norm": MAX_NORM}
    actor = {"model": model, "optimizer": optimizer}
    return Scenario(split=(ROWS,), actions=THREE_CHOICES, actor=actor, algorithm=given)


class Plain(nn.Module):
    """The same policy written down once more, for one environment at a time."""

    def __init__(self, memory: str) -> None:
        super().__init__()
        self.layer, self.cell = (
            nn.Linear(SHOWN, 7),
            (nn.GRUCell if memory == "gru" else nn.LSTMCell)(7, SIZE),
        )
        self.policy, self.value = nn.Linear(SIZE, 3), nn.Linear(SIZE, 1)

    def follow(
        self, shown: Tensor, held: Tensor, ends: NDArray[np.bool_]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, values and what is held after the steps [T, O]; `ends` [T]."""
        logits, values = [], []
        for step, end in zip(shown, ends, strict=True):
            features = torch.tanh(self.layer(step))
            if isinstance(self.cell, nn.LSTMCell):
                pair = self.cell(features, (held[:SIZE], held[SIZE:]))
                out, held = pair[0], torch.cat(pair)
            else:
                out = held = self.cell(features, held)
            logits.append(self.policy(out))
            values.append(self.value(out)[0])
            held = torch.zeros_like(held) if end else held
        return torch.stack(logits), torch.stack(values), held


def plain_of(memory: str, state: dict[str, Tensor]) -> Plain:
    plain = Plain(memory)
    names = {
        "encoder.layers.0": "layer",
        "cell": "cell",
        "policy": "policy",
        "value": "value",
    }
    loaded = {}
    for name, tensor in state.items():
        short = name.removeprefix("network.")
        (old,) = (each for each in names if short.startswith(f"{each}."))
        loaded[short.replace(old, names[old], 1)] = tensor.clone()
    plain.load_state_dict(loaded)
    return plain


def advantages_of(plain: Plain, seen: Trajectory, width: int) -> tuple[Tensor, Tensor]:
    """By the definition of GAE, one environment after the other."""
    places = np.argwhere(seen.truncated).tolist()
    cuts = {
        tuple(cut): final
        for cut, final in zip(places, seen.final_observations, strict=True)
    }
    advantages = torch.zeros(STEPS, ROWS)

    def value(row: NDArray[Any]) -> float:
        given = torch.tensor(row)
        with torch.no_grad():
            return float(
                plain.follow(given[None, width:], given[:width], np.array([False]))[1]
            )

    for row in range(ROWS):
        following = 0.0
        for step in reversed(range(STEPS)):
            end = seen.terminated[step, row] or seen.truncated[step, row]
            after = (
                value(seen.last_observations[row])
                if step + 1 == STEPS
                else float(seen.values[step + 1, row])
            )
            if seen.truncated[step, row]:
                after = value(cuts[step, row])
            delta = (
                seen.rewards[step, row]
                + GAMMA * after * (not seen.terminated[step, row])
                - seen.values[step, row]
            )
            following = float(delta) + GAMMA * LAMBDA * following * (not end)
            advantages[step, row] = following
    return advantages, advantages + torch.tensor(seen.values)


def plain_update(plain: Plain, seen: Trajectory, burn_in: int) -> None:
    """All epochs of one iteration, as PPO's paper has them."""
    width = next(iter(seen.observations.shape[2:])) - SHOWN
    ends = seen.terminated | seen.truncated
    advantages, returns = advantages_of(plain, seen, width)
    advantages = (advantages - advantages.mean()) / (
        advantages.std(correction=0) + 1e-8
    )
    optimizer = torch.optim.Adam(plain.parameters(), lr=LR, eps=1e-5)
    rows = torch.tensor(seen.observations)
    for _ in range(EPOCHS):
        losses = []
        for row in range(ROWS):
            for start in range(0, STEPS, LENGTH):
                before, stop = max(0, start - burn_in), start + LENGTH
                held = rows[before, row, :width]
                with torch.no_grad():
                    if start:
                        held = (
                            plain.follow(
                                rows[before:start, row, width:],
                                held,
                                ends[before:start, row],
                            )[2]
                            if before < start
                            else held
                        )
                logits, values, _ = plain.follow(
                    rows[start:stop, row, width:], held, ends[start:stop, row]
                )
                chosen = torch.distributions.Categorical(logits=logits)
                part = slice(start, stop), row
                ratio = (
                    chosen.log_prob(torch.tensor(seen.actions[part]))
                    - torch.tensor(seen.logprobs[part])
                ).exp()
                gain = torch.minimum(
                    ratio * advantages[part],
                    ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[part],
                )
                errors = 0.5 * (values - returns[part]).square()
                losses.append(
                    -gain + VALUE_COEF * errors - ENTROPY_COEF * chosen.entropy()
                )
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        optimizer.step()


@pytest.fixture
def learned() -> Iterator[Any]:
    """Learns one iteration on one rank; returns the weights then, and the metrics."""
    opened = []

    def run(
        of: Scenario, seen: Trajectory
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        actor = make_actor(of, 0, rendezvous_at(listen()))
        opened.append(actor)
        actor.move(Residency.FULL)
        metrics = learn(actor, seen)
        return dict(actor._model.whole_weights()), {
            name: metric.value for name, metric in metrics.items()
        }

    yield run
    for actor in opened:
        actor.close()


@pytest.mark.parametrize("memory", ["gru", "lstm"])
@pytest.mark.parametrize("burn_in", [0, 3])
def test_an_update_is_that_of_a_plain_program(
    learned: Any, memory: str, burn_in: int
) -> None:
    of = scenario(memory, burn_in=burn_in)
    seen = first_iteration(of)
    assert seen.terminated.any()
    assert seen.truncated.any()
    policy = build_policy(
        of.spaces, of.config.actor, of.config.algorithm, of.config.runner.seed
    )
    plain = plain_of(memory, policy.state_dict())
    plain_update(plain, seen, burn_in)
    weights, _ = learned(of, seen)
    expected = plain_of(memory, weights).state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=2e-4, atol=2e-5)


def test_what_acted_is_what_learns_first_and_a_memory_that_outlives_an_episode_would_be_seen(
    learned: Any,
) -> None:
    """Without a step in between, the sequences have the probabilities under which the actions were drawn."""
    of = scenario("lstm", epochs=1, burn_in=2, normalize_observations=True)
    seen = first_iteration(of)
    _, metrics = learned(of, seen)
    assert abs(metrics["actor/approx_kl"]) < 1e-9
    nowhere = np.zeros_like(seen.terminated)
    _, wrong = learned(
        of,
        dataclasses.replace(
            seen,
            terminated=nowhere,
            truncated=nowhere,
            final_observations=seen.final_observations[:0],
        ),
    )
    assert wrong["actor/approx_kl"] > 1e-8


def test_nothing_is_learned_from_a_poisoned_step_of_a_sequence(learned: Any) -> None:
    """An end with the reward that was expected, and the rest is learned as if it were alone."""
    of = scenario("gru", epochs=1, burn_in=2)
    seen = first_iteration(of)
    at = tuple(np.argwhere(seen.terminated)[0])
    poisoned = dataclasses.replace(seen, rewards=seen.rewards.copy())
    poisoned.rewards[at] = np.nan
    changed = dataclasses.replace(
        poisoned, actions=seen.actions.copy(), logprobs=seen.logprobs.copy()
    )
    changed.actions[at], changed.logprobs[at] = (seen.actions[at] + 1) % 3, -9.0
    weights, metrics = learned(of, poisoned)
    other, _ = learned(of, changed)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert all(torch.equal(other[name], tensor) for name, tensor in weights.items())
    assert abs(metrics["actor/approx_kl"]) < 1e-6
