"""Arguments of every worker of a run, and the names of the channels between workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.config.schema import Config
from rlplace.envs.contract import Spaces
from rlplace.placement.flow import Delivery, Routes, block_edges
from rlplace.placement.language.spec import Parallel, role_of
from rlplace.placement.schedule import FROZEN
from rlplace.trained import Trained

# Roles that read samples and score them
SCORERS = ("critic", *FROZEN)

# Channels of simulator jobs. Keys: rollout rank; "<env rank>/<stage group>"; actor rank.
OBSERVATIONS = "observations"
ACTIONS = "actions"
TRAJECTORIES = "trajectories"
# Channels of text tasks. Keys: "" if any free rank takes an item, else the number of the rank that takes it.
REQUESTS = "requests"  # "": any rollout rank with room takes
COMPLETIONS = "completions"  # the env rank
SAMPLES = "samples"  # "": whole groups, taken by actor rank 0
COMMANDS = "commands"  # "": of clients of the training API, taken by actor rank 0
RESULTS = "results"  # "": of these commands, taken by env rank 0
HELD_OUT = "samples.held_out"  # "": held-out rows with answers, taken by actor rank 0
RETURNS = "returns"  # "": one tuple of Scores for each group, taken by critic rank 0
# Channels of both.
WEIGHTS = "weights"  # the rollout rank
REFERENCE_WEIGHTS = "weights.reference"  # the reference rank


def samples_for(component: str) -> str:
    """Return the name of the channel that carries groups of samples to `component`, a critic, a reference or a reward.

    The actor gets the same groups through the channel `samples`.
    """
    return f"{SAMPLES}.{component}"


def scores_of(component: str) -> str:
    """Return the name of the channel that carries the scores of `component` to actor rank 0.

    Each item of the channel is a tuple of any number of Scores.
    """
    return f"scores.{component}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndOfIteration:
    """Message to one rollout rank: no more requests come in this iteration. It travels in the channel `requests`.

    `drop`: whether unanswered requests are dropped instead of answered.
    """

    iteration: int
    drop: bool = False  # whether unanswered requests are dropped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Message to env rank 0: env rank `env_rank` has received all its answers of the iteration.

    It travels in the channel `completions`.
    """

    iteration: int
    env_rank: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArguments:
    """What every worker of a run is told: the value of `Worker.config`.

    `ranks`: component -> number of ranks. `deliveries`: planned copies of the weights, if ranks share copies.
    `working`: component -> stage -> planned bytes of working memory on each accelerator. `parallel`: component -> how
    many ranks share a model. `read_again`: component -> cost of a prompt token that the answers of a group share,
    counted once for each answer, relative to a token of the answer itself. `copies_checkpoints`: whether a checkpoint
    is copied and then written during the next iteration.
    """

    config: Config
    ranks: Mapping[str, int]  # number of ranks of each placed component
    # Planned copies of the weights, if ranks share memory; if empty, each rank gets its own copy
    deliveries: tuple[Delivery, ...] = ()
    # component -> stage -> planned bytes of working memory on each accelerator, beside the resident state
    working: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    # Parallel sizes by component; a component that is missing has one rank per replica
    parallel: Mapping[str, Parallel] = dataclasses.field(default_factory=dict)
    # component -> cost of a prompt token for each answer that shares the prompt (`SampleSizes.again`); missing
    # components compute the prompt anew for each answer
    read_again: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Whether checkpoints are copied and written during the next iteration; if not, that iteration waits
    copies_checkpoints: bool = True

    def parallel_of(self, component: str) -> Parallel:
        return self.parallel.get(component, Parallel())

    def differs_only_in_plan(self, other: WorkerArguments, component: str) -> bool:
        """Return whether the arguments of another plan of the job have equal settings for `component`.

        Settings are what a worker uses in its set-up. Places of other components, routes, copies of weights and
        planned bytes may differ.
        """
        return (
            type(self) is type(other)
            and _settings(self.config) == _settings(other.config)
            and self.ranks[component] == other.ranks[component]
            and self.parallel_of(component) == other.parallel_of(component)
            and self.read_again == other.read_again
            and self.copies_checkpoints == other.copies_checkpoints
        )


def _settings(config: Config) -> Config:
    """Return what workers use of a config. Of the block `cluster`, they use the accelerators alone."""
    accelerator = config.cluster.accelerator
    cluster = ClusterConfig(component_placement={}, accelerator=accelerator)
    return dataclasses.replace(config, cluster=cluster)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextArguments(WorkerArguments):
    """The value of `Worker.config` for every worker of a run on a language model.

    `resumed_at`: number of iterations before the checkpoint of a resumed run. `asked_before`: number of prompts that
    the run has used in these iterations.
    """

    config: LanguageModelJobConfig
    resumed_at: int = 0
    asked_before: int = 0

    def first_prompt(self, iteration: int) -> int:
        """Return the number, in the run, of the first prompt of `iteration`.

        Prompts are numbered without gaps, even if a resume has changed the number of prompts per iteration.
        """
        return self.asked_before + (iteration - self.resumed_at) * self.prompts

    @property
    def model(self) -> Path:
        """Path of the Hugging Face folder with the model and its tokenizer."""
        return Path(self.config.model_path)

    @property
    def scorers(self) -> tuple[str, ...]:
        """Names of the components that score samples: critic, reference, teacher and rewards of the job."""
        return tuple(c for c in self.ranks if role_of(c) in SCORERS)

    @property
    def rewards(self) -> tuple[str, ...]:
        """Names of the reward components of the job."""
        return tuple(c for c in self.ranks if role_of(c) == "reward")

    def refreshes(self, iteration: int) -> bool:
        """Return whether the reference gets the actor's weights before `iteration` (counted from 0)."""
        every = self.config.reference.refresh_every
        return every > 0 and iteration > 0 and iteration % every == 0

    @property
    def prompts(self) -> int:
        """Number of prompts of one iteration, which is also its number of groups."""
        prompts = self.config.algorithm.prompts
        assert prompts is not None, "checked before a run"
        return prompts

    def groups(self, env_rank: int) -> range:
        """Return the indices of the groups that env rank `env_rank` owns in an iteration.

        The indices are consecutive. The ranks have equally many groups, or differ by one.
        """
        return self._block(self.prompts, env_rank)

    def held_out(self, env_rank: int, prompts: int) -> range:
        """Return the indices of the held-out prompts for which env rank `env_rank` requests answers in an
        evaluation.

        `prompts`: number of held-out prompts of the evaluation.
        """
        return self._block(prompts, env_rank)

    def _block(self, rows: int, env_rank: int) -> range:
        first, stop = block_edges(rows, self.ranks["env"])[env_rank : env_rank + 2]
        return range(first, stop)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorArguments(WorkerArguments):
    """The value of `Worker.config` for every worker of a run with simulators.

    `spaces`: shapes of observations and actions. `routes`: which rows (environments) go from which rank to which.
    `begins_with`: the trained policy with whose weights a new run begins; None: the weights are random.
    """

    config: SimulatorJobConfig
    spaces: Spaces
    routes: Routes
    begins_with: Trained | None = None

    def differs_only_in_plan(self, other: WorkerArguments, component: str) -> bool:
        assert isinstance(other, SimulatorArguments), "both are of one job"
        if component == "actor":
            # What an actor rank keeps from one iteration to the next is of its rows
            rows = self.routes.trajectories
            if rows.blocks() != other.routes.trajectories.blocks():
                return False
        # A class with slots has no super() without arguments
        return WorkerArguments.differs_only_in_plan(self, other, component)


def asked_of(
    config: LanguageModelJobConfig,
) -> frozenset[Literal["old", "reference", "values"]]:
    """Return what the actor has to compute for the samples of an iteration before its first optimizer step.

    "old": log-probabilities by its own weights. "reference": log-probabilities of a reference that shares the actor's
    model. "values": values of a critic that shares the actor's model.
    """
    algorithm = config.algorithm
    asked: set[Literal["old", "reference", "values"]] = set()
    penalised = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    if algorithm.name == "ppo" or penalised or config.teacher_needs_old:
        asked.add("old")
    if config.reference.share_actor:
        asked.add("reference")
    if config.critic.on_actor:
        asked.add("values")
    return frozenset(asked)


# ── the parts of an iteration of a language model ─────────────────────────────────────────────────────────────────────
#
#   samples:  ▪▪▪ ▪▪▪ ▪▪▪ ▪▪▪ ...        in the order in which they are whole
#   learn:       [ step ][ step ]        of `train_batch` samples at most, rounded down to whole groups
#
# A part is learned like an iteration of its own: its advantages are made of its own groups, and the old
# log-probabilities of the ratio are those of the weights when it begins (the proximal policy of decoupled PPO,
# arXiv:2110.00641). `tis_cap` corrects the difference between these weights and the weights that sampled the tokens, by
# the log-probabilities of the engine. The tokens are up to `max_staleness` versions old; those of a partial rollout are
# of several versions.


def parts_of(job: TextArguments) -> tuple[int, ...]:
    """Return the sizes of the parts in which an iteration's groups are learned: the number of groups of each part, in
    order.

    There is a single part if `max_staleness` is 0, `train_batch` is None, `epochs` exceeds 1, or the samples are scored
    by other components or by the actor before the first optimizer step. Otherwise a part has the groups of one
    `train_batch`.
    """
    config, algorithm = job.config, job.config.algorithm
    scored = job.scorers or config.reference.share_actor or config.critic.on_actor
    if (
        not algorithm.max_staleness
        or algorithm.train_batch is None
        or algorithm.epochs > 1
        or scored
    ):
        return (job.prompts,)
    each = max(1, algorithm.train_batch // algorithm.samples_per_prompt)
    whole, rest = divmod(job.prompts, each)
    return (each,) * whole + ((rest,) if rest else ())
