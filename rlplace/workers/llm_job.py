"""What every worker of a language-model run is told: the config, the sizes of its parts and the routes of the plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlplace.llm_config import LlmConfig
from rlplace.placement.routes import block_edges
from rlplace.placement.weight_routes import Delivery

# Names of the channels of a run. Keys: "" where whoever is free takes, else the rank it is for.
REQUESTS = "requests"  # "": any rollout rank with room takes
COMPLETIONS = "completions"  # the env rank
SAMPLES = "samples"  # "": whole groups, taken by actor rank 0
WEIGHTS = "weights"  # the rollout rank


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
    """The `config` of TextEnvWorker, TextRolloutWorker and LmActor."""

    config: LlmConfig
    env_ranks: int
    rollout_ranks: int
    deliveries: tuple[Delivery, ...] = ()  # of weights, where ranks share memory; without any each rank gets its own

    @property
    def model(self) -> Path:
        """The Hugging Face folder of the model and its tokenizer."""
        return Path(self.config.model_path)

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
