"""Flow matching: the noise of its steps, and the network that makes actions from noise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from rlplace.config.read import read_config
from rlplace.contract.planning import make_plan
from rlplace.envs.contract import (
    ContinuousActions,
    DenoisedActions,
    DiscreteActions,
    Spaces,
)
from rlplace.errors import PlacementError, Problem
from rlplace.models.flow import DenoisedOutput, NoiseSchedule, noise_schedule
from rlplace.models.flow_vla import FlowVla
from rlplace.placement import Topology
from tests.tiny_openvla import tiny_openvla
from tests.tiny_vlm import tiny_smolvlm
from tests.unit.models.test_vla import BINS, SPACES, seen, small
from tests.unit.models.test_vla import refused as refused_vla

ARM = ContinuousActions(shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))


def gaussian(schedule: NoiseSchedule, rows: int) -> DenoisedOutput:
    """The exact velocities of a flow to N(3, 0.5^2)."""
    steps = schedule.steps

    def velocity(points: Tensor, step: int) -> Tensor:
        time = 1 - step / steps
        variance = time**2 + ((1 - time) * 0.5) ** 2
        # The mean of noise - action, given x
        slope = (time - (1 - time) * 0.25) / variance
        return -3.0 + slope * (points - (1 - time) * 3.0)

    return DenoisedOutput(velocity, schedule, torch.zeros(rows), (1 + steps, 1))


def test_noise_does_not_change_what_a_flow_leads_to() -> None:
    """With many steps, the actions have the mean and the deviation of the flow without noise."""
    steps = 100
    rows = 20_000
    output = gaussian(noise_schedule(steps, 0.7), rows)
    noise = torch.randn(rows, 1 + steps, 1, generator=torch.Generator().manual_seed(0))
    chains, _ = output.sample(noise)
    actions = chains[:, -1]
    assert float(actions.mean()) == pytest.approx(3.0, abs=0.03)
    assert float(actions.std()) == pytest.approx(0.5, abs=0.03)
    # From the most probable noise, the flow leads to the most probable action
    assert float(output.greedy()[0]) == pytest.approx(3.0, abs=0.03)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_chain_has_the_density_of_its_steps(steps: int) -> None:
    output = gaussian(noise_schedule(steps, 0.5), 4)
    noise = torch.randn(4, 1 + steps, 1, generator=torch.Generator().manual_seed(0))
    chains, logprobs = output.sample(noise)
    assert torch.equal(chains[:, 0], noise[:, 0])
    expected = torch.zeros(4)
    for step in range(steps):
        x = chains[:, step]
        velocity = output.velocity(x, step)
        # Flow-SDE as in its paper
        time = 1 - step / steps
        level = 0.5 * math.sqrt(time / (1 - time if step else 1 / steps))
        if steps == 1:
            level = 0.5
        drift = velocity + level**2 / (2 * time) * (x + (1 - time) * velocity)
        normal = Normal(x - drift / steps, level * math.sqrt(1 / steps))
        expected += normal.log_prob(chains[:, step + 1])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.logprob(chains), logprobs, rtol=1e-5, atol=1e-5)


def flowing(chunk: int = 2, **given: Any) -> tuple[FlowVla, Spaces]:
    spaces = Spaces(
        observation_shape=SPACES.observation_shape,
        observation_dtype="uint8",
        parts=SPACES.parts,
        actions=ARM,
    )
    spaces = spaces.chunked(chunk).denoised(3)
    sizes = {"head": "flow", "layers": 2, "expert_width": 12, **given}
    torch.manual_seed(0)
    network = FlowVla(spaces, small(**sizes))
    network.initialise(torch.Generator().manual_seed(1))
    with torch.no_grad():
        network.action_out.weight.normal_()
    return network, spaces


def test_all_steps_at_once_give_the_velocities_of_each_step() -> None:
    """Instructions of other lengths in the same batch: each row has as many tokens as its own has."""
    network, _ = flowing()
    shown = seen("a", "b a a", "b")
    chains = torch.randn(3, 4 * 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, values = network(shown, chains)
        velocity, decided = network.decide(shown)
        points = chains.view(3, 4, 4)
        each = [velocity(points[:, step], step) for step in range(3)]
        alone = network({name: row[:1] for name, row in shown.items()}, chains[:1])
    torch.testing.assert_close(found, torch.cat(each, dim=1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, decided, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone[0], found[:1], rtol=1e-5, atol=1e-5)


def test_an_action_depends_on_earlier_ones_of_its_chunk_alone() -> None:
    network, _ = flowing()
    shown = seen("a")
    points = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    later = points.clone()
    later[0, 2:] += 1
    earlier = points.clone()
    earlier[0, :2] += 1
    with torch.no_grad():
        velocity, _ = network.decide(shown)
        first = velocity(points, 1)
        of_later = velocity(later, 1)
        of_earlier = velocity(earlier, 1)
    torch.testing.assert_close(of_later[0, :2], first[0, :2])
    assert not torch.allclose(of_later[0, 2:], first[0, 2:], atol=1e-3)
    assert not torch.allclose(of_earlier[0, 2:], first[0, 2:], atol=1e-4)


@pytest.mark.parametrize("changed", ["image", "instruction", "state"])
def test_all_entries_reach_velocities_and_value(changed: str) -> None:
    network, _ = flowing()
    shown = seen("a")
    others = seen("b")
    others["image"] = 255 - others["image"]
    others["state"] = 1 - others["state"]
    other = {**shown, changed: others[changed]}
    chain = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        velocities, value = network(shown, chain)
        changed_velocities, changed_value = network(other, chain)
    assert not torch.allclose(velocities, changed_velocities, atol=1e-5)
    assert not torch.allclose(value, changed_value, atol=1e-5)


def test_spaces_of_chains() -> None:
    spaces = Spaces(observation_shape=(3,), actions=ARM).chunked(2).denoised(3)
    assert isinstance(spaces.actions, DenoisedActions)
    assert spaces.actions.shape == (4, 2, 2)
    taken = ContinuousActions(shape=(2, 2), low=(-1.0,) * 4, high=(1.0,) * 4)
    assert spaces.taken_actions == taken
    chains = torch.arange(5 * 6 * 4 * 2 * 2).view(5, 6, 4, 2, 2).numpy()
    assert (spaces.taken_of(chains) == chains[:, :, -1]).all()
    assert (spaces.taken_of(chains[0]) == chains[0, :, -1]).all()
    # Choices cannot be made from noise
    choices = Spaces(observation_shape=(3,), actions=DiscreteActions(n=2))
    assert choices.denoised(3) == choices


def refused(
    model: dict[str, Any], wrappers: tuple[dict[str, Any], ...] = ()
) -> Problem:
    return refused_vla({"head": "flow", **model}, wrappers=wrappers)


def test_choices_cannot_be_made_from_noise() -> None:
    found = refused({}, wrappers=(BINS,))
    assert (found.code, found.key) == ("model-misfit", "actor.model.head")
    assert found.fix == "head: bins"


def test_an_odd_width_of_the_expert() -> None:
    found = refused({"expert_width": 7})
    assert (found.key, found.fix) == ("actor.model.expert_width", "expert_width: 8")


def test_a_checkpoint_of_openvla_has_no_expert(tmp_path: Path) -> None:
    folder = tiny_openvla(tmp_path)
    found = refused({"path": str(folder), "decoding": "parallel"})
    assert (found.key, found.fix) == ("actor.model.head", "head: bins")
    assert "OpenVLA" in found.what


def test_another_decoder_than_that_of_smolvla(tmp_path: Path) -> None:
    folder = tiny_smolvlm(tmp_path / "model")
    written = json.loads((folder / "config.json").read_text())
    written["text_config"]["model_type"] = "mistral"
    (folder / "config.json").write_text(json.dumps(written))
    found = refused({"path": str(folder)})
    assert (found.key, found.what) == ("actor.model.head", "the decoder is a mistral")


def test_an_entropy_that_cannot_be_learned_is_not_rewarded() -> None:
    def planned(**algorithm: float) -> Any:
        config = read_config(
            {
                "cluster": {
                    "component_placement": {"actor": "0", "env": "0", "rollout": "0"}
                },
                "env": {"id": "x", "total_num_envs": 8, "enable_offload": True},
                "actor": {
                    "model": {"kind": "vla", "head": "flow"},
                    "enable_offload": True,
                },
                "rollout": {"enable_offload": True},
                "algorithm": algorithm,
            }
        )
        return make_plan(config, Topology.uniform(1, 1))

    with pytest.raises(PlacementError) as caught:
        planned(entropy_coef=0.01)
    (found,) = caught.value.problems
    assert (found.code, found.key) == ("model-misfit", "algorithm.entropy_coef")
    assert found.fix == "entropy_coef: 0.0"
    assert planned(entropy_coef=0.0)
