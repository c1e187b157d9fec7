"""What every worker of a language-model run is told: the config, the sizes of its parts and the routes of the plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlplace.config import Config
from rlplace.placement.flow import Delivery, block_edges
from rlplace.placement.language.spec import role_of

JUDGES = ("critic", "reference", "reward")  # roles

# Names of the channels of a run. Keys: "" where whoever is free takes, else the rank it is for.
REQUESTS = "requests"  # "": any rollout rank with room takes
COMPLETIONS = "completions"  # the env rank
SAMPLES = "samples"  # "": whole groups, taken by actor rank 0
WEIGHTS = "weights"  # the rollout rank
REFERENCE_WEIGHTS = "weights.reference"  # the reference rank
RETURNS = "returns"  # "": one tuple of Returns for each group, taken by critic rank 0


def samples_for(component: str) -> str:
    """Channel of the same groups as `samples`, for rank 0 of a component that judges them."""
    return f"{SAMPLES}.{component}"


def scores_of(component: str) -> str:
    """Channel by which it puts tuples of Scores, as many in each as it likes; taken by actor rank 0."""
    return f"scores.{component}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndOfIteration:
    """Put on `requests` once for each rollout rank: nothing more will be asked in this iteration."""

    iteration: int

    @property
    def weight(self) -> int:
        return 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Put on `completions` for env rank 0: this env rank has all answers of the iteration."""

    iteration: int
    env_rank: int

    @property
    def weight(self) -> int:
        return 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlmJob:
    """The `config` of every worker of the run."""

    config: Config
    env_ranks: int
    rollout_ranks: int
    reference_ranks: int = 0
    components: tuple[str, ...] = ("actor", "env", "rollout")  # all that are placed
    deliveries: tuple[Delivery, ...] = ()  # of weights, where ranks share memory; without any each rank gets its own

    @property
    def model(self) -> Path:
        """The Hugging Face folder of the model and its tokenizer."""
        return Path(self.config.model_path)

    @property
    def judges(self) -> tuple[str, ...]:
        """All that are given the samples beside the actor and say something of each: critic, reference, rewards."""
        return tuple(c for c in self.components if role_of(c) in JUDGES)

    @property
    def rewards(self) -> tuple[str, ...]:
        """Of the judges, those whose scores are rewards."""
        return tuple(c for c in self.components if role_of(c) == "reward")

    def refreshes(self, iteration: int) -> bool:
        """Whether the reference takes the actor's weights before this iteration."""
        every = self.config.reference.refresh_every
        return every > 0 and iteration > 0 and iteration % every == 0

    def has(self, component: str) -> bool:
        return component in self.components

    @property
    def prompts(self) -> int:
        """Groups of one iteration."""
        prompts = self.config.algorithm.prompts
        assert prompts is not None, "checked before a run"
        return prompts

    def groups(self, env_rank: int) -> range:
        """The groups of an iteration that an env rank owns: neighbours, sizes that differ by one at most."""
        return _block(self.prompts, self.env_ranks, env_rank)

    def held_out(self, env_rank: int) -> range:
        """The same of the prompts of an evaluation."""
        return _block(self.config.runner.eval_prompts, self.env_ranks, env_rank)


def _block(rows: int, ranks: int, rank: int) -> range:
    first, stop = block_edges(rows, ranks)[rank : rank + 2]
    return range(first, stop)
