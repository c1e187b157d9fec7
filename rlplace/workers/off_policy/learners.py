"""What learns: SAC, TD3 and DQN. A learner owns its networks and optimizers, and makes one update after the other.

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

from rlplace.algo.off_policy import (
    critic_loss,
    dqn_targets,
    sac_policy_loss,
    sac_targets,
    smoothed,
    soft_update,
    squashed_gaussian,
    td3_targets,
    temperature_loss,
)
from rlplace.config.blocks.off_policy import OffPolicyBlocks
from rlplace.envs.contract import Spaces
from rlplace.models.off_policy import new_critics, new_policy

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
        self.optimizers[name] = torch.optim.Adam(parameters, lr=lr, fused=True)

    def _copy(self, name: str, module: nn.Module) -> nn.Module:
        """Return a target network: a copy that follows `module`."""
        target = copy.deepcopy(module).requires_grad_(False)
        self.modules[name] = target
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

    def _follow(self, target: nn.Module, source: nn.Module) -> None:
        soft_update(target.parameters(), source.parameters(), self._algorithm.tau)

    def _normal(self, like: Tensor, random: torch.Generator) -> Tensor:
        """Return standard normal numbers in the shape of `like`, from the same generator on each device."""
        drawn = torch.empty(like.shape).normal_(generator=random)
        return drawn.to(like.device)

    @property
    def _follows_now(self) -> bool:
        return self.updates % self._algorithm.target_every == 0


class _Temperature(nn.Module):
    """The log of SAC's temperature, a parameter."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor([math.log(temperature)]))


class SacLearner(Learner):
    """SAC with automatic temperature (Haarnoja et al., arXiv:1812.05905)."""

    def __init__(self, spaces: Spaces, blocks: OffPolicyBlocks, *rest: Any) -> None:
        super().__init__(spaces, blocks, *rest)
        seed = rest[0]
        config = self._config
        self._critics = new_critics(spaces, config, seed).to(self._device)
        self.modules["critics"] = self._critics
        self._targets = self._copy("targets", self._critics)
        self._adam("policy", self.policy.parameters(), config.lr)
        self._adam("critics", self._critics.parameters(), config.critic_lr or config.lr)
        temperature = self._algorithm.temperature
        self._learned: _Temperature | None = None
        self._fixed = 0.0
        if temperature == "auto":
            self._learned = _Temperature(1.0).to(self._device)
            self.modules["temperature"] = self._learned
            self._adam("temperature", self._learned.parameters(), config.lr)
        else:
            self._fixed = temperature
        self._target_entropy = self._algorithm.target_entropy
        if self._target_entropy is None:
            self._target_entropy = -float(math.prod(spaces.actions.shape))  # type: ignore[union-attr]

    def update(self, batch: Mapping[str, Tensor], random: torch.Generator) -> Tensor:
        seen, taken = batch["observations"], batch["actions"].flatten(1)
        temperature: Tensor | float = self._fixed
        if self._learned is not None:
            temperature = self._learned.log.detach().exp()
        # Critics
        with torch.no_grad():
            means, log_std = self.policy(batch["next_observations"])
            after = squashed_gaussian(means, log_std, self._normal(means, random))
            targets = sac_targets(
                batch["rewards"],
                batch["discounts"],
                self._targets(batch["next_observations"], after.actions),
                after.logprobs,
                temperature,
            )
        values = self._critics(seen, taken)
        loss, errors = critic_loss(values, targets, batch.get("weights"))
        self._step("critics", loss, self._critics)
        # The policy: the critics pass gradients on and get none
        means, log_std = self.policy(seen)
        drawn = squashed_gaussian(means, log_std, self._normal(means, random))
        self._critics.requires_grad_(False)
        reached = self._critics(seen, drawn.actions)
        self._critics.requires_grad_(True)
        policy_loss = sac_policy_loss(reached, drawn.logprobs, temperature)
        self._step("policy", policy_loss, self.policy)
        if self._learned is not None:
            entropy = self._target_entropy
            assert entropy is not None
            change = temperature_loss(self._learned.log, drawn.logprobs, entropy)
            self._step("temperature", change, self._learned)
            self._note("temperature", self._learned.log.detach().exp().sum())
        self.updates += 1
        if self._follows_now:
            self._follow(self._targets, self._critics)
        self._note("critic_loss", loss)
        self._note("policy_loss", policy_loss)
        self._note("entropy", -drawn.logprobs.mean())
        self._note("value", values.mean())
        return errors


class Td3Learner(Learner):
    """TD3: the least of two critics, a delayed policy, smoothed targets (Fujimoto et al., arXiv:1802.09477)."""

    def __init__(self, spaces: Spaces, blocks: OffPolicyBlocks, *rest: Any) -> None:
        super().__init__(spaces, blocks, *rest)
        seed = rest[0]
        config = self._config
        self._critics = new_critics(spaces, config, seed).to(self._device)
        self.modules["critics"] = self._critics
        self._targets = self._copy("targets", self._critics)
        self._target_policy = self._copy("target_policy", self.policy)
        self._adam("policy", self.policy.parameters(), config.lr)
        self._adam("critics", self._critics.parameters(), config.critic_lr or config.lr)

    def update(self, batch: Mapping[str, Tensor], random: torch.Generator) -> Tensor:
        algorithm = self._algorithm
        seen, taken = batch["observations"], batch["actions"].flatten(1)
        with torch.no_grad():
            after = self._target_policy(batch["next_observations"])
            after = smoothed(
                after,
                self._normal(after, random),
                std=algorithm.target_noise,
                clip=algorithm.target_noise_clip,
            )
            targets = td3_targets(
                batch["rewards"],
                batch["discounts"],
                self._targets(batch["next_observations"], after),
            )
        values = self._critics(seen, taken)
        loss, errors = critic_loss(values, targets, batch.get("weights"))
        self._step("critics", loss, self._critics)
        self.updates += 1
        if self.updates % algorithm.policy_delay == 0:
            self._critics.requires_grad_(False)
            policy_loss = -self._critics(seen, self.policy(seen))[0].mean()
            self._critics.requires_grad_(True)
            self._step("policy", policy_loss, self.policy)
            self._note("policy_loss", policy_loss)
            self._follow(self._targets, self._critics)
            self._follow(self._target_policy, self.policy)
        self._note("critic_loss", loss)
        self._note("value", values.mean())
        return errors


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
        if self._follows_now:
            self._follow(self._target, self.policy)
        self._note("critic_loss", loss)
        self._note("value", values.mean())
        return errors


LEARNERS: Mapping[str, type[Learner]] = {
    "sac": SacLearner,
    "td3": Td3Learner,
    "dqn": DqnLearner,
}
