"""Build the policy of a simulator job, of any kind of model, and the function that decides with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from rlplace.config.blocks.policies import (
    CnnConfig,
    MlpConfig,
    ModuleConfig,
    PolicyConfig,
    TransformerConfig,
    VlaConfig,
)
from rlplace.config.blocks.training import ActorConfig, AlgorithmConfig
from rlplace.envs.contract import Spaces
from rlplace.models import BUILDING
from rlplace.models.mlp import ActorCritic, initialise, sample
from rlplace.models.mlp_decision import MlpDecisions
from rlplace.models.networks import (
    FlowPolicy,
    ImageEncoder,
    ImageNetwork,
    NetworkPolicy,
    custom_network,
)
from rlplace.models.recurrent import NumberEncoder, RecurrentNetwork, StepByStep
from rlplace.models.transformer import ChunkTransformer
from rlplace.models.vla_folder import is_openvla

if TYPE_CHECKING:
    from rlplace.models.flow_vla import FlowVla
    from rlplace.models.openvla import OpenVla
    from rlplace.models.vla import Vla

PolicyNetwork = ActorCritic | NetworkPolicy
# Observations and noise -> actions, log-probabilities, values and, with a memory, the
# memory after
Decide = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def build_policy(
    spaces: Spaces,
    actor: ActorConfig,
    algorithm: AlgorithmConfig,
    seed: int,
) -> PolicyNetwork:
    """Return a simulator job's policy, on the host in float32. Equal arguments give equal weights in every process.

    `seed`: seed of the initial weights. Initialisation is orthogonal, with gain 0.01 at the policy head and 1 at the
    value head. A custom network initialises itself, with random numbers of this seed. Raises ConfigError if the network
    cannot be made.
    """
    generator = torch.Generator().manual_seed(seed)
    model = actor.policy
    normalize = algorithm.normalize_observations
    # An MLP without memory has manual backward passes; all others are networks of autograd
    if isinstance(model, MlpConfig) and not model.remembered:
        policy = ActorCritic(spaces, model, normalize)
        for trunk, head_gain in ((policy.policy, 0.01), (policy.value, 1.0)):
            initialise(
                [layer for layer in trunk if isinstance(layer, nn.Linear)],
                head_gain,
                generator,
            )
        return policy
    # Custom networks draw from torch's own generator: seed it, and restore it
    # afterwards
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _network(spaces.shown, model)
    if isinstance(network, ImageNetwork | RecurrentNetwork | ChunkTransformer):
        network.initialise(generator)
    elif isinstance(model, VlaConfig):
        cast("Vla | OpenVla | FlowVla", network).initialise(generator)
    if isinstance(model, VlaConfig) and model.head == "flow":
        return FlowPolicy(
            spaces, network, normalize=normalize, noise_level=model.noise_level
        )
    return NetworkPolicy(
        spaces,
        network,
        normalize=normalize,
        initial_log_std=model.initial_log_std,
    )


def _network(spaces: Spaces, model: PolicyConfig) -> nn.Module:
    """Return the network inside the policy; the heads of shipped networks are not initialised yet."""
    if isinstance(model, ModuleConfig):
        own = custom_network(spaces, model)
        if model.remembered:
            return StepByStep(own)
        return own
    if isinstance(model, TransformerConfig):
        return ChunkTransformer(spaces, model)
    if isinstance(model, VlaConfig):
        # Imported here: no other policy needs transformers
        if is_openvla(model.path):
            from rlplace.models.openvla import OpenVla

            return OpenVla(spaces, model)
        if model.head == "flow":
            from rlplace.models.flow_vla import FlowVla

            return FlowVla(spaces, model)
        from rlplace.models.vla import Vla

        return Vla(spaces, model)
    if not model.remembered:
        assert isinstance(model, CnnConfig), model
        return ImageNetwork(spaces, model)
    # With a memory: recurrent layers behind an encoder
    encoder = (
        ImageEncoder(spaces, model)
        if isinstance(model, CnnConfig)
        else NumberEncoder(spaces, model)
    )
    return RecurrentNetwork(
        encoder,
        spaces.actions,
        lstm=model.memory == "lstm",
        size=model.memory_size,
    )


def decisions_of(policy: PolicyNetwork) -> Decide:
    """Return a function that decides on actions with the present weights of the policy.

    The function takes observations and noise, one row for each environment. It returns actions, log-probabilities,
    values and, for a policy with memory, the memory after these observations. It has to be called in inference mode.
    """
    if isinstance(policy, ActorCritic):
        return MlpDecisions(policy)

    def decide(observations: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        output, memory = policy.decide(observations)
        remembered = [memory] if policy.remembered else []
        return *sample(output, noise), output.values, *remembered

    return decide
