"""What learns: a learner owns its networks and optimizers, and makes one update after the other.

Letters: N samples, A elements of an action.
"""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from rlplace.algo.off_policy import (
    Drawn,
    critic_loss,
    dqn_targets,
    expectile_loss,
    sac_policy_loss,
    sac_targets,
    smoothed,
    soft_update,
    squashed_gaussian,
    td3_bc_policy_loss,
    td3_targets,
    temperature_loss,
    weighted_likelihood_loss,
)
from rlplace.config.blocks.off_policy import OffPolicyBlocks
from rlplace.envs.contract import Spaces
from rlplace.models.off_policy import (
    GaussianAround,
    new_critics,
    new_policy,
    new_state_value,
)

# Averages the gradients of parameters over the actor ranks, in place
Average = Callable[[Iterable[nn.Parameter]], None]


class Learner(abc.ABC):
    """A policy that learns from samples of a replay memory.

    `policy`: the network that acts. `updates`: updates so far. `average`: averages gradients over the actor ranks.
    """

    def __init__(
        self,
        spaces: Spaces,
        blocks: OffPolicyBlocks,
        seed: int,
        device: str,
        average: Average,
    ) -> None:
        self._algorithm = blocks.algorithm
        self._config = blocks.actor
        self._device = device
        self._average = average
        self.policy = new_policy(spaces, blocks.algorithm.name, blocks.actor, seed).to(
            device
        )
        self.updates = 0
        # Modules, optimizers and single tensors by the names of a checkpoint
        self.modules: dict[str, nn.Module] = {"policy": self.policy}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        # Target networks, and what each follows
        self._followers: list[tuple[nn.Module, nn.Module]] = []
        # Sums of metrics since `take_metrics`, on the device
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    @abc.abstractmethod
    def update(self, batch: Mapping[str, Tensor], random: torch.Generator) -> Tensor:
        """Make one update with N samples; return the absolute error of each, [N].

        `batch`: name -> tensor [N, ...], as `ReplayMemory.sample` has them. `random`: of all noise.
        """

    def state(self) -> dict[str, Any]:
        return {
            "updates": self.updates,
            "modules": {n: m.state_dict() for n, m in self.modules.items()},
            "optimizers": {n: o.state_dict() for n, o in self.optimizers.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.updates = state["updates"]
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        # Of an iteration that was broken off
        self.take_metrics()

    def take_metrics(self) -> dict[str, float]:
        """Return the mean of each metric since the last call."""
        found = {n: float(s) / self._counts[n] for n, s in self._sums.items()}
        self._sums = {}
        self._counts = {}
        return found

    def _note(self, name: str, value: Tensor) -> None:
        before = self._sums.get(name)
        value = value.detach()
        self._sums[name] = value if before is None else before + value
        self._counts[name] = self._counts.get(name, 0) + 1

    def _adam(self, name: str, parameters: Iterable[nn.Parameter], lr: float) -> None:
        betas = (self._config.beta1, 0.999)
        self.optimizers[name] = torch.optim.Adam(
            parameters, lr=lr, betas=betas, fused=True
        )

    def _copy(self, name: str, module: nn.Module) -> nn.Module:
        """Return a target network: a copy that follows `module`."""
        target = copy.deepcopy(module).requires_grad_(False)
        self.modules[name] = target
        self._followers.append((target, module))
        return target

    def _step(self, name: str, loss: Tensor, module: nn.Module) -> None:
        """Make the step of an optimizer with the gradient of `loss`, averaged over the ranks."""
        optimizer = self.optimizers[name]
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self._average(module.parameters())
        most = self._config.max_grad_norm
        if most is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), most)
        optimizer.step()

    def _normal(self, like: Tensor, random: torch.Generator) -> Tensor:
        """Return standard normal numbers in the shape of `like`, from the same generator on each device."""
        drawn = torch.empty(like.shape).normal_(generator=random)
        return drawn.to(like.device)

    def _follow(self) -> None:
        """Move each target network towards the network that it follows."""
        for target, source in self._followers:
            soft_update(target.parameters(), source.parameters(), self._algorithm.tau)


class ActorCritic(Learner):
    """A policy of continuous actions, and critics of them.

    `_delay`: updates of the critics for each one of the policy.
    """

    _delay = 1

    def __init__(
        self, spaces: Spaces, blocks: OffPolicyBlocks, seed: int, *rest: Any
    ) -> None:
        super().__init__(spaces, blocks, seed, *rest)
        config = self._config
        name = blocks.algorithm.name
        self._critics = new_critics(spaces, name, config, seed).to(self._device)
        self.modules["critics"] = self._critics
        self._adam("policy", self.policy.parameters(), config.lr)
        self._adam("critics", self._critics.parameters(), config.critic_lr or config.lr)

    def update(self, batch: Mapping[str, Tensor], random: torch.Generator) -> Tensor:
        values, targets = self._values_and_targets(batch, random)
        loss, errors = critic_loss(values, targets, batch.get("weights"))
        self._step("critics", loss, self._critics)
        self._note("critic_loss", loss)
        self._note("value", values.mean())
        self.updates += 1
        if self.updates % self._delay == 0:
            self._improve(batch, random)
        return errors

    @abc.abstractmethod
    def _values_and_targets(
        self, batch: Mapping[str, Tensor], random: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the critics' values of the samples [E, N] with gradient, and their targets [N] without."""

    @abc.abstractmethod
    def _improve(self, batch: Mapping[str, Tensor], random: torch.Generator) -> None:
        """Make the update of the policy, and of all that follows it."""

    def _judged(self, seen: Tensor, actions: Tensor) -> Tensor:
        """Return the values of actions, [E, N]. The critics pass gradients on to the actions and get none."""
        self._critics.requires_grad_(False)
        values: Tensor = self._critics(seen, actions)
        self._critics.requires_grad_(True)
        return values


class _Temperature(nn.Module):
    """The log of SAC's temperature, a parameter."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor([math.log(temperature)]))


class SacLearner(ActorCritic):
    """SAC with automatic temperature (Haarnoja et al., arXiv:1812.05905)."""

    def __init__(self, spaces: Spaces, blocks: OffPolicyBlocks, *rest: Any) -> None:
        super().__init__(spaces, blocks, *rest)
        self._add_targets()
        temperature = self._algorithm.temperature
        self._learned: _Temperature | None = None
        self._fixed = 0.0
        if temperature == "auto":
            self._learned = _Temperature(1.0).to(self._device)
            self.modules["temperature"] = self._learned
            self._adam("temperature", self._learned.parameters(), self._config.lr)
        else:
            self._fixed = temperature
        self._target_entropy = self._algorithm.target_entropy
        if self._target_entropy is None:
            self._target_entropy = -float(math.prod(spaces.actions.shape))  # type: ignore[union-attr]

    def _add_targets(self) -> None:
        self._targets = self._copy("targets", self._critics)

    @property
    def _temperature(self) -> Tensor | float:
        if self._learned is None:
            return self._fixed
        return self._learned.log.detach().exp()

    def _drawn(self, observations: Tensor, random: torch.Generator) -> Drawn:
        means, log_std = self.policy(observations)
        return squashed_gaussian(means, log_std, self._normal(means, random))

    def _values_and_targets(
        self, batch: Mapping[str, Tensor], random: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            drawn = self._drawn(batch["next_observations"], random)
            after = self._targets(batch["next_observations"], drawn.actions)
            targets = self._soft_targets(batch, after, drawn)
        values = self._critics(batch["observations"], batch["actions"].flatten(1))
        return values, targets

    def _soft_targets(
        self, batch: Mapping[str, Tensor], after: Tensor, drawn: Drawn
    ) -> Tensor:
        """Return the targets of the critics, [N]. `after`: [E, N], values of the drawn actions in the next states."""
        return sac_targets(
            batch["rewards"],
            batch["discounts"],
            after,
            drawn.logprobs,
            self._temperature,
        )

    def _improve(self, batch: Mapping[str, Tensor], random: torch.Generator) -> None:
        seen = batch["observations"]
        drawn = self._drawn(seen, random)
        values = self._judged(seen, drawn.actions)
        loss = sac_policy_loss(values, drawn.logprobs, self._temperature)
        self._step("policy", loss, self.policy)
        self._note("policy_loss", loss)
        self._note("entropy", -drawn.logprobs.mean())
        if self._learned is not None:
            entropy = self._target_entropy
            assert entropy is not None
            change = temperature_loss(self._learned.log, drawn.logprobs, entropy)
            self._step("temperature", change, self._learned)
            self._note("temperature", self._learned.log.detach().exp().sum())
        if self.updates % self._algorithm.target_every == 0:
            self._follow()


class CrossqLearner(SacLearner):
    """CrossQ: SAC without target networks, with networks that normalise batches (Bhatt et al., arXiv:1902.05605).

    The critics see samples and next states in one batch, so that both are normalised by the statistics of both.
    """

    def __init__(self, spaces: Spaces, blocks: OffPolicyBlocks, *rest: Any) -> None:
        super().__init__(spaces, blocks, *rest)
        self._delay = self._algorithm.policy_delay

    def _add_targets(self) -> None:
        """There are none."""

    def _values_and_targets(
        self, batch: Mapping[str, Tensor], random: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            drawn = self._drawn(batch["next_observations"], random)
        seen = torch.cat([batch["observations"], batch["next_observations"]])
        actions = torch.cat([batch["actions"].flatten(1), drawn.actions])
        self._critics.train()
        values, after = self._critics(seen, actions).chunk(2, dim=1)
        self._critics.eval()
        return values, self._soft_targets(batch, after.detach(), drawn)

    def _improve(self, batch: Mapping[str, Tensor], random: torch.Generator) -> None:
        self.policy.train()
        super()._improve(batch, random)
        self.policy.eval()


class Td3Learner(ActorCritic):
    """TD3: the least of two critics, a delayed policy, smoothed targets (Fujimoto et al., arXiv:1802.09477)."""

    def __init__(self, spaces: Spaces, blocks: OffPolicyBlocks, *rest: Any) -> None:
        super().__init__(spaces, blocks, *rest)
        self._delay = self._algorithm.policy_delay
        self._targets = self._copy("targets", self._critics)
        self._target_policy = self._copy("target_policy", self.policy)

    def _values_and_targets(
        self, batch: Mapping[str, Tensor], random: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        algorithm = self._algorithm
        with torch.no_grad():
            actions = self._target_policy(batch["next_observations"])
            actions = smoothed(
                actions,
                self._normal(actions, random),
                std=algorithm.target_noise,
                clip=algorithm.target_noise_clip,
            )
            after = self._targets(batch["next_observations"], actions)
            targets = td3_targets(batch["rewards"], batch["discounts"], after)
        values = self._critics(batch["observations"], batch["actions"].flatten(1))
        return values, targets

    def _improve(self, batch: Mapping[str, Tensor], random: torch.Generator) -> None:
        seen = batch["observations"]
        loss = self._policy_loss(batch, self.policy(seen))
        self._step("policy", loss, self.policy)
        self._note("policy_loss", loss)
        self._follow()

    def _policy_loss(self, batch: Mapping[str, Tensor], chosen: Tensor) -> Tensor:
        """Return the loss of the policy. `chosen`: [N, A], its actions for the samples, with gradient."""
        return -self._judged(batch["observations"], chosen)[0].mean()


class Td3BcLearner(Td3Learner):
    """TD3+BC: TD3 on recorded steps, whose policy stays near their actions (Fujimoto and Gu, arXiv:2106.06860)."""

    def _policy_loss(self, batch: Mapping[str, Tensor], chosen: Tensor) -> Tensor:
        values = self._judged(batch["observations"], chosen)[0]
        taken = batch["actions"].flatten(1)
        weight = self._algorithm.behaviour_weight
        return td3_bc_policy_loss(values, chosen, taken, weight)


class IqlLearner(ActorCritic):
    """IQL: values of recorded actions alone, and a policy that takes the better of these (arXiv:2110.06169)."""

    def __init__(self, spaces: Spaces, blocks: OffPolicyBlocks, *rest: Any) -> None:
        super().__init__(spaces, blocks, *rest)
        self._targets = self._copy("targets", self._critics)
        config = self._config
        self._state = new_state_value(spaces, config, rest[0]).to(self._device)
        self.modules["state_value"] = self._state
        self._adam(
            "state_value", self._state.parameters(), config.critic_lr or config.lr
        )

    def _values_and_targets(
        self, batch: Mapping[str, Tensor], random: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Learn the values of states first, as the code of the authors does; then as in `ActorCritic`."""
        seen, taken = batch["observations"], batch["actions"].flatten(1)
        with torch.no_grad():
            least = self._targets(seen, taken).min(0).values
        loss = expectile_loss(least - self._state(seen), self._algorithm.expectile)
        self._step("state_value", loss, self._state)
        self._note("state_value_loss", loss)
        with torch.no_grad():
            # For the policy
            self._advantages = least - self._state(seen)
            after = self._state(batch["next_observations"])
            targets = batch["rewards"] + batch["discounts"] * after
        return self._critics(seen, taken), targets

    def _improve(self, batch: Mapping[str, Tensor], random: torch.Generator) -> None:
        assert isinstance(self.policy, GaussianAround), "new_policy makes it"
        means = self.policy(batch["observations"])
        deviations = self.policy.log_std.clamp(-5.0, 2.0).exp()
        density = Normal(means, deviations).log_prob(batch["actions"].flatten(1))
        loss = weighted_likelihood_loss(
            density.sum(-1), self._advantages, self._algorithm.advantage_weight
        )
        self._step("policy", loss, self.policy)
        self._note("policy_loss", loss)
        self._note("advantage", self._advantages.mean())
        self._follow()


class DqnLearner(Learner):
    """DQN (Mnih et al. 2015, doi:10.1038/nature14236), double by default (van Hasselt et al., arXiv:1509.06461)."""

    def __init__(self, spaces: Spaces, blocks: OffPolicyBlocks, *rest: Any) -> None:
        super().__init__(spaces, blocks, *rest)
        self._target = self._copy("target", self.policy)
        self._adam("policy", self.policy.parameters(), self._config.lr)

    def update(self, batch: Mapping[str, Tensor], random: torch.Generator) -> Tensor:
        after = batch["next_observations"]
        with torch.no_grad():
            online = self.policy(after) if self._algorithm.double else None
            targets = dqn_targets(
                batch["rewards"], batch["discounts"], self._target(after), online
            )
        every = self.policy(batch["observations"])
        values = every.gather(-1, batch["actions"][:, None]).T
        loss, errors = critic_loss(values, targets, batch.get("weights"), huber=True)
        self._step("policy", loss, self.policy)
        self.updates += 1
        if self.updates % self._algorithm.target_every == 0:
            self._follow()
        self._note("critic_loss", loss)
        self._note("value", values.mean())
        return errors


LEARNERS: Mapping[str, type[Learner]] = {
    "sac": SacLearner,
    "crossq": CrossqLearner,
    "td3": Td3Learner,
    "td3_bc": Td3BcLearner,
    "iql": IqlLearner,
    "dqn": DqnLearner,
}
