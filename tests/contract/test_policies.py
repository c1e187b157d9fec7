"""What every kind of policy must do, from deciding to learning, whatever its network, observations and actions are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.envs.contract import (
    ContinuousActions,
    DiscreteActions,
    MultiDiscreteActions,
    Part,
    Spaces,
)
from rlplace.models.describe_policy import describe
from rlplace.models.flow import DenoisedOutput
from rlplace.models.mlp import (
    DiscreteOutput,
    MultiDiscreteOutput,
    PolicyOutput,
    noise_shape,
)
from rlplace.models.passes import Passes, flatten
from rlplace.models.policy_networks import PolicyNetwork, build_policy, decisions_of
from rlplace.placement.memory import policies
from rlplace.placement.memory.policies import policy_shape
from tests.actor_ranks import Scenario, run_ranks
from tests.memory_peaks import allocations

ARM = ContinuousActions(shape=(2, 3), low=(-1.0,) * 6, high=(1.0,) * 6)
BUTTONS = DiscreteActions(n=3)
ROWS = 5
OWN = {"kind": "module", "name": "tests.own_network:Own"}
IMPALA = {"kind": "cnn", "network": "impala", "channels": [4, 8], "hidden": [16]}
NATURE = {"kind": "cnn", "channels": [4, 8, 8], "hidden": [16]}
GRU = {"kind": "mlp", "hidden": [16], "memory": "gru", "memory_size": 6}
LSTM = {**IMPALA, "memory": "lstm", "memory_size": 5}
REMEMBERS = {"kind": "module", "name": "tests.own_network:Remembers", "remembered": 4}
TRANSFORMER = {"kind": "transformer", "width": 16, "patch": 3}
WORDS = ("go", "left", "right")
VLA = {
    "kind": "vla",
    "words": WORDS,
    "instruction_tokens": 3,
    "width": 16,
    "heads": 2,
    "layers": 1,
    "patch": 2,
}
FLOW = {**VLA, "head": "flow", "denoising_steps": 3, "expert_width": 10}
VECTOR, PIXELS = (
    {"observation_shape": (4,)},
    {"observation_shape": (40, 36, 3), "observation_dtype": "uint8"},
)
STACK = {"observation_shape": (2, 9, 7), "observation_dtype": "uint8"}
ENTRIES = (
    Part(name="arm.place", shape=(2, 2)),
    Part(name="hand", shape=(1,)),
    Part(name="eye", shape=(9, 7), dtype="uint8"),
)
MIXED = {
    "observation_shape": (4 * 5 + 9 * 7,),
    "observation_dtype": "uint8",
    "parts": ENTRIES,
}
INSTRUCTED = {
    "observation_shape": (4 * 2 + 8 * 8 * 3 + 8,),
    "observation_dtype": "uint8",
    "parts": (
        Part(name="state", shape=(2,)),
        Part(name="image", shape=(8, 8, 3), dtype="uint8"),
        Part(name="instruction", shape=(8,), dtype="uint8"),
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    model: Mapping[str, object]
    spaces: Spaces

    @property
    def config(self) -> Config:
        given = {
            "cluster": {"component_placement": {}},
            "env": {"id": "synthetic"},
            "actor": {"model": self.model},
        }
        return read_config(given)

    def policy(self) -> PolicyNetwork:
        """Return it with moments of its numbers, and heads that are not all but zero."""
        made = build_policy(
            self.spaces, self.config.actor, self.config.algorithm, seed=3
        )
        generator = torch.Generator().manual_seed(5)
        if made.normalizer is not None:
            made.normalizer.mean.uniform_(-1.0, 1.0, generator=generator)
            made.normalizer.var.uniform_(0.5, 2.0, generator=generator)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        return made

    def observations(self, rows: int = ROWS) -> Tensor:
        numbers, spaces = np.random.default_rng(1), self.spaces
        if spaces.observation_dtype == "float32":
            return torch.from_numpy(
                numbers.standard_normal((rows, *spaces.observation_shape)).astype(
                    np.float32
                )
            )
        seen = numbers.integers(0, 256, (rows, *spaces.observation_shape), np.uint8)
        if spaces.numbers:
            normal = numbers.standard_normal((rows, spaces.numbers)).astype(np.float32)
            seen[:, : 4 * spaces.numbers] = normal.view(np.uint8)
        if spaces.texts:
            for row, text in enumerate(seen):
                said = f"go {WORDS[1 + row % 2]}" if row % 3 else WORDS[0]
                text[-8:] = np.frombuffer(said.encode().ljust(8, b"\0"), np.uint8)
        return torch.from_numpy(seen)

    def noise(self, rows: int = ROWS) -> Tensor:
        return torch.rand(
            (rows, *noise_shape(self.spaces.actions)),
            generator=torch.Generator().manual_seed(2),
        )


SWITCHES = MultiDiscreteActions(n=(2, 3, 2, 4), shape=(2, 2))
CASES = {
    "mlp of several choices": Case({"kind": "mlp"}, Spaces(actions=SWITCHES, **VECTOR)),
    "impala of several choices": Case(IMPALA, Spaces(actions=SWITCHES, **STACK)),
    "mlp": Case({"kind": "mlp"}, Spaces(actions=ARM, **VECTOR)),
    "nature": Case(NATURE, Spaces(actions=BUTTONS, **PIXELS)),
    "impala of a stack": Case(IMPALA, Spaces(actions=ARM, **STACK)),
    "impala and numbers": Case(IMPALA, Spaces(actions=BUTTONS, **MIXED)),
    "own of numbers": Case(OWN, Spaces(actions=ARM, **VECTOR)),
    "transformer of a chunk": Case(
        TRANSFORMER, Spaces(actions=ARM, **VECTOR).chunked(2)
    ),
    "transformer and images": Case(
        TRANSFORMER, Spaces(actions=BUTTONS, **MIXED).chunked(3)
    ),
    "transformer of one": Case(TRANSFORMER, Spaces(actions=SWITCHES, **STACK)),
    "vla": Case(VLA, Spaces(actions=SWITCHES, **INSTRUCTED)),
    "vla by flow matching": Case(FLOW, Spaces(actions=ARM, **INSTRUCTED).denoised(3)),
    "vla by flow matching of a chunk": Case(
        {**FLOW, "layers": 2, "denoising_steps": 2},
        Spaces(actions=ARM, **INSTRUCTED).chunked(2).denoised(2),
    ),
    "vla of a chunk": Case(VLA, Spaces(actions=BUTTONS, **INSTRUCTED).chunked(2)),
    "gru of numbers": Case(GRU, Spaces(actions=ARM, **VECTOR).remembering(6)),
    "lstm of a dict": Case(LSTM, Spaces(actions=BUTTONS, **MIXED).remembering(10)),
    "own with memory": Case(REMEMBERS, Spaces(actions=BUTTONS, **MIXED).remembering(4)),
    "own of a dict": Case(
        {**OWN, "kwargs": {"width": 8}}, Spaces(actions=BUTTONS, **MIXED)
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def by_torch(output: PolicyOutput, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of actions [N, elements]."""
    if isinstance(output, DiscreteOutput):
        chosen = Categorical(logits=output.logits)
        return chosen.log_prob(actions[:, 0]), chosen.entropy()
    if isinstance(output, MultiDiscreteOutput):
        each = [
            Categorical(logits=part)
            for part in output.logits.split(output.actions.n, dim=-1)
        ]
        logprobs = [one.log_prob(actions[:, at]) for at, one in enumerate(each)]
        return torch.stack(logprobs).sum(0), torch.stack(
            [one.entropy() for one in each]
        ).sum(0)
    if isinstance(output, DenoisedOutput):
        return of_chains(output, actions)
    normal = Normal(output.means.flatten(1), output.log_std.exp().flatten())
    return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)


def of_chains(output: DenoisedOutput, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Step by step, by torch's own normal distribution: [N] each."""
    schedule = output.schedule
    chain = actions.reshape(len(actions), schedule.steps + 1, -1)
    logprobs = torch.zeros(len(actions))
    entropies = torch.zeros(len(actions))
    for step in range(schedule.steps):
        velocity = output.velocity(chain[:, step], step)
        mean = schedule.kept[step] * chain[:, step] + schedule.moved[step] * velocity
        normal = Normal(mean, schedule.deviations[step])
        logprobs = logprobs + normal.log_prob(chain[:, step + 1]).sum(-1)
        entropies = entropies + normal.entropy().sum(-1)
    return logprobs, entropies


def passes_of(policy: PolicyNetwork) -> tuple[Passes, Tensor]:
    flat = flatten(policy)
    gradient = torch.full_like(flat, torch.nan)  # whatever was there is overwritten
    return Passes(policy, flat, gradient), gradient


def test_what_is_decided_has_the_probabilities_and_values_of_what_is_trained(
    case: Case,
) -> None:
    policy, observations = case.policy(), case.observations()
    with torch.inference_mode():
        actions, logprobs, values, *_ = decisions_of(policy)(observations, case.noise())
    expected, _ = by_torch(policy(observations), actions.clone().reshape(ROWS, -1))
    torch.testing.assert_close(logprobs, expected.detach())
    passes, _ = passes_of(policy)
    with torch.inference_mode(policy.manual_backward):
        done = actions.clone().reshape(ROWS, -1)
        outputs, trained = passes.forward(
            policy.prepared(observations).reshape(ROWS, -1), done
        )
        chosen = passes.actions(outputs, done)
    torch.testing.assert_close(chosen.logprobs, logprobs)
    torch.testing.assert_close(trained, values)


@pytest.mark.parametrize("rows", [ROWS, 0])
def test_the_gradient_is_that_of_autograd(case: Case, rows: int) -> None:
    policy, observations = case.policy(), case.observations()[:rows]
    with torch.inference_mode():
        actions = decisions_of(policy)(case.observations(), case.noise())[0].reshape(
            ROWS, -1
        )[:rows]
    generator, of_entropy = torch.Generator().manual_seed(2), -0.2
    of_logprobs, of_values = (torch.randn(rows, generator=generator) for _ in range(2))
    expected = torch.zeros(sum(parameter.numel() for parameter in policy.parameters()))
    if rows:
        output = policy(observations)
        logprobs, entropies = by_torch(output, actions.clone())
        loss = (
            (of_logprobs * logprobs).sum()
            + of_entropy * entropies.sum()
            + (of_values * output.values).sum()
        )
        found = torch.autograd.grad(
            loss, list(policy.parameters()), allow_unused=True, materialize_grads=True
        )
        expected = torch.cat([each.flatten() for each in found])
    passes, gradient = passes_of(policy)
    with torch.inference_mode(policy.manual_backward):
        for _ in range(2):  # the second writes over the first
            outputs, _ = passes.forward(
                policy.prepared(observations).flatten(1), actions.clone()
            )
            chosen = passes.actions(outputs, actions.clone())
            passes.backward(chosen, of_logprobs, of_entropy, of_values)
    torch.testing.assert_close(gradient, expected)


def test_the_same_seed_makes_the_same_policy_and_another_seed_another(
    case: Case,
) -> None:
    config = case.config
    made = [
        build_policy(case.spaces, config.actor, config.algorithm, seed).state_dict()
        for seed in (1, 1, 2)
    ]
    first, again, other = made
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_every_weight_is_counted_and_a_pass_holds_about_what_is_predicted(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Described here, where torch is, instead of in a process that imports it: whole runs show that one."""
    monkeypatch.setattr(
        policies,
        "ask",
        lambda module, keys: json.loads(json.dumps(describe(json.loads(keys)))),
    )
    policies._found.cache_clear()
    policy, rows = case.policy(), 256
    counted = policy_shape(
        case.config.actor.policy, case.spaces, normalize_observations=True
    )
    assert {w.name: w.shape for w in counted.weights} == {
        n: tuple(p.shape) for n, p in policy.named_parameters()
    }
    assert counted.buffer_bytes == sum(buffer.nbytes for buffer in policy.buffers())
    observations = case.observations(rows)
    noise = case.noise(rows)
    with torch.inference_mode():
        actions = decisions_of(policy)(observations, noise)[0].reshape(rows, -1)
    passes, _ = passes_of(policy)
    given = policy.prepared(observations).reshape(rows, -1)
    with allocations() as found, torch.inference_mode(policy.manual_backward):
        outputs, values = passes.forward(given, actions.clone())
        chosen = passes.actions(outputs, actions.clone())
        passes.backward(chosen, torch.ones(rows), 0.0, values)
    assert (
        0.6 * found.peak_bytes
        < counted.pass_bytes(rows, 4)
        < 2.0 * found.peak_bytes + 100_000
    )


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("model", "shape", "algorithm"),
    [
        (IMPALA, (6, 5, 2), {}),
        ({**OWN, "kwargs": {}}, (5,), {}),
        (GRU, (5,), {"unroll_steps": 4, "burn_in": 2}),
        ({**REMEMBERS, "kwargs": {}}, (5,), {}),
    ],
    ids=["images", "own network", "gru", "own memory"],
)
def test_one_and_two_ranks_make_the_same_update(
    compute: str,
    model: dict[str, Any],
    shape: tuple[int, ...],
    algorithm: dict[str, Any],
) -> None:
    scenario = Scenario(
        split=(4,),
        actions=BUTTONS,
        actor={"model": model, "compute": compute},
        shape=shape,
        algorithm=algorithm,
    )
    (alone,) = run_ranks(scenario)
    pair = run_ranks(dataclasses.replace(scenario, split=(3, 1)))
    assert pair[0].weights_digest == pair[1].weights_digest
    start = build_policy(
        scenario.spaces, scenario.config.actor, scenario.config.algorithm, seed=7
    ).state_dict()
    near = (
        {"rtol": 1e-4, "atol": 1e-5}
        if compute == "fp32"
        else {"rtol": 5e-2, "atol": 5e-3}
    )
    for name, weights in alone.weights.items():
        np.testing.assert_allclose(pair[0].weights[name], weights, **near)
    assert (
        sum(
            np.abs(weights - start[name].numpy()).sum()
            for name, weights in alone.weights.items()
        )
        > 0.1
    )
