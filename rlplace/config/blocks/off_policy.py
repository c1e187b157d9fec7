"""The config of the off-policy job: its environments, algorithm, replay memory, networks and optimizers."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Literal

from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.config.fields import block, knob, users_of
from rlplace.config.open_job import ComponentConfig, EngineConfig, OpenConfig

OffPolicyName = Literal["sac", "crossq", "td3", "dqn", "td3_bc", "iql"]

# Algorithms that use some of the keys
_ENTROPY = ("sac", "crossq")
_TD3 = ("td3", "td3_bc")
_DQN = ("dqn",)
_CRITICS = ("sac", "crossq", "td3", "td3_bc", "iql")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyAlgorithmConfig:
    """The algorithm, and the numbers of steps and updates. Steps are those of all environments together."""

    name: OffPolicyName = knob(
        "sac, crossq, td3: continuous actions; dqn: one choice among n; td3_bc, iql: "
        "continuous actions, from recorded steps alone",
        "sac",
    )
    steps_per_iteration: int = knob(
        "environment steps of an iteration; td3_bc, iql: steps that it would have, for "
        "the number of its updates",
        minimum=1,
    )
    learning_starts: int = knob(
        "steps with random actions before the first update", 100, minimum=0
    )
    updates_per_step: float = knob(
        "updates for each environment step; this ratio is kept exactly", 1.0, above=0
    )
    sync_every: int = knob(
        "updates between two syncs of the policy; acting is two syncs behind at most",
        8,
        minimum=1,
    )
    batch_size: int = knob(
        "number of steps in an update, over all actor ranks", 256, minimum=1
    )
    gamma: float = knob("discount per step", 0.99, minimum=0, maximum=1, unit="share")
    n_step: int = knob(
        "rewards that are summed before the value of the next state", 1, minimum=1
    )
    tau: float = knob(
        "share of the new weights in an update of the target networks; 1: they become copies",
        0.005,
        above=0,
        maximum=1,
        unit="share",
        users=("sac", "td3", "dqn", "td3_bc", "iql"),
    )
    target_every: int = knob(
        "updates between two updates of the target networks",
        1,
        minimum=1,
        users=("sac", "dqn"),
    )
    temperature: float | Literal["auto"] = knob(
        "weight of the entropy; auto: learned", "auto", minimum=0, users=_ENTROPY
    )
    target_entropy: float | None = knob(
        "target of the entropy for auto; null: minus the number of elements of an action",
        None,
        users=_ENTROPY,
    )
    exploration_noise: float = knob(
        "deviation of the noise of an action, whose bounds are -1 and 1",
        0.1,
        minimum=0,
        users=("td3",),
    )
    target_noise: float = knob(
        "deviation of the target's noise", 0.2, minimum=0, users=_TD3
    )
    target_noise_clip: float = knob(
        "bound of the noise of the target", 0.5, minimum=0, users=_TD3
    )
    policy_delay: int = knob(
        "updates of the critics for each one of the policy",
        2,
        minimum=1,
        users=("td3", "td3_bc", "crossq"),
    )
    behaviour_weight: float = knob(
        "weight of the values in the loss, relative to the distance to recorded actions",
        2.5,
        above=0,
        users=("td3_bc",),
    )
    expectile: float = knob(
        "expectile of the action values that the value of a state estimates",
        0.7,
        above=0,
        below=1,
        users=("iql",),
    )
    advantage_weight: float = knob(
        "how much more likely a better recorded action becomes",
        3.0,
        minimum=0,
        users=("iql",),
    )
    double: bool = knob(
        "double Q-learning: the trained network selects actions, the target network evaluates them",
        True,
        users=_DQN,
    )
    epsilon_start: float = knob(
        "share of random actions at the start",
        1.0,
        minimum=0,
        maximum=1,
        unit="share",
        users=_DQN,
    )
    epsilon_end: float = knob(
        "share of random actions after epsilon_steps",
        0.05,
        minimum=0,
        maximum=1,
        unit="share",
        users=_DQN,
    )
    epsilon_steps: int = knob(
        "environment steps over which the share falls linearly",
        10_000,
        minimum=1,
        users=_DQN,
    )

    @property
    def ratio(self) -> Fraction:
        """Updates for each step, as the exact number that is written in the config."""
        return Fraction(str(self.updates_per_step))

    def uses(self, key: str) -> bool:
        """Return whether the algorithm uses one of its keys."""
        users = users_of(self, key)
        return not users or self.name in users

    @property
    def offline(self) -> bool:
        """Whether it learns from recorded steps alone; no environment is stepped but for evaluations."""
        return self.name in ("td3_bc", "iql")

    @property
    def draws(self) -> bool:
        """Whether the policy draws actions by itself; one that does not explores by noise."""
        return self.name in ("sac", "crossq")

    def epsilon(self, steps: int) -> float:
        """Return dqn's share of random actions after a number of steps."""
        done = min(1.0, steps / self.epsilon_steps)
        return self.epsilon_start + done * (self.epsilon_end - self.epsilon_start)

    @property
    def piece_steps(self) -> Fraction:
        """Steps between two syncs of the policy. A valid config has a whole number."""
        return self.sync_every / self.ratio


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyActorConfig(ComponentConfig):
    """The networks of policy and critics, and their optimizers."""

    hidden: tuple[int, ...] = knob(
        "widths of the hidden layers of each network", (256, 256), minimum=1
    )
    activation: Literal["tanh", "relu", "silu"] = knob(
        "activation function between the layers", "relu"
    )
    critics: int = knob(
        "number of critics; their smallest value is the target",
        2,
        minimum=1,
        users=_CRITICS,
    )
    critic_hidden: tuple[int, ...] = knob(
        "widths of the hidden layers of each critic; []: those of hidden",
        (),
        minimum=1,
        users=_CRITICS,
    )
    layer_norm: bool = knob(
        "normalise the hidden layers of the critics", False, users=_CRITICS
    )
    lr: float = knob("Adam's learning rate of the policy, or of dqn", 3e-4, above=0)
    critic_lr: float | None = knob(
        "learning rate of the critics; null: lr", None, above=0, users=_CRITICS
    )
    beta1: float = knob("Adam's decay of the mean gradient", 0.9, minimum=0, below=1)
    max_grad_norm: float | None = knob(
        "clip the norm of the gradient; null: never", None, above=0
    )

    @property
    def widths_of_critics(self) -> tuple[int, ...]:
        return self.critic_hidden or self.hidden


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig(ComponentConfig):
    """The replay memory, which the replay ranks share by environments."""

    capacity: int = knob(
        "number of steps that are kept, over all ranks", 100_000, minimum=1
    )
    sampling: Literal["uniform", "prioritised"] = knob(
        "prioritised: steps with large errors are sampled more often", "uniform"
    )
    priority_exponent: float = knob(
        "prioritised: exponent of the error; 0: uniform", 0.6, minimum=0
    )
    priority_correction: float = knob(
        "prioritised: exponent of the importance weights; 1: full correction",
        0.4,
        minimum=0,
        maximum=1,
    )

    demonstrations: str | None = knob(
        "steps of others, to learn from as well: a file (.npz, .hdf5), or a folder of "
        "Minari",
        None,
    )
    demonstration_share: float = knob(
        "share of each batch that comes from demonstrations; always 1 for td3_bc and iql",
        0.5,
        above=0,
        maximum=1,
        unit="share",
    )

    @property
    def prioritised(self) -> bool:
        return self.sampling == "prioritised"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActingConfig(ComponentConfig):
    """Rollout, which steps its own environments."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyBlocks(EngineConfig):
    """All blocks of the job's config: those of the engine, and its own."""

    env: SimulatorEnvConfig
    algorithm: OffPolicyAlgorithmConfig
    actor: OffPolicyActorConfig = block(OffPolicyActorConfig)
    rollout: ActingConfig = block(ActingConfig)
    replay: ReplayConfig = block(ReplayConfig)

    @property
    def kept_steps(self) -> int:
        """The steps that the memory has room for, beside demonstrations."""
        if self.algorithm.offline:
            return self.env.total_num_envs
        return self.replay.capacity

    def demonstrated(self, samples: int) -> Fraction:
        """Return how many of a number of samples are demonstrations. A valid config has a whole number."""
        if self.algorithm.offline:
            return Fraction(samples)
        if self.replay.demonstrations is None:
            return Fraction(0)
        return samples * Fraction(str(self.replay.demonstration_share))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyConfig(OpenConfig):
    """The whole config of the off-policy job, as the engine reads it, with the typed blocks. Immutable."""

    blocks: OffPolicyBlocks

    @property
    def env(self) -> SimulatorEnvConfig:
        return self.blocks.env
