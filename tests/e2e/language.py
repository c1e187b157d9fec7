"""Runs that train a tiny language model with random weights: small enough to start in seconds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from tests.e2e.text_tasks import LEARNABLE
from tests.e2e.training import Finished, placed, train

# Of actor, env and rollout: one and two ranks of everything.
PLACEMENTS = {
    "hybrid_grpo_llm": ("0-1", "0", "1-2"),
    "collocated_grpo_llm": ("0-1", "0-1", "0-1"),
    "disaggregated_grpo_llm": ("0", "2", "3"),
}
ONE_RANK_EACH = {
    "hybrid_grpo_llm": ("0", "0", "1"),
    "collocated_grpo_llm": ("0", "0", "0"),
    "disaggregated_grpo_llm": ("0", "2", "3"),
}
INLINE = ("cluster.launcher=inline", *placed(*ONE_RANK_EACH["hybrid_grpo_llm"]))


def tiny(folder: Path, engine: str = "transformers") -> tuple[str, ...]:
    """Overrides for the model in `folder`, made by `tests.tiny_lm`."""
    return (
        "model@actor.model=tiny",
        f"actor.model.path={folder}",
        f"rollout.engine={engine}",
        *LEARNABLE,
    )


def seeing(folder: Path, squares: Path) -> tuple[str, ...]:
    """Overrides for the model and the data set made by `tests.tiny_vlm`: 96 answers of one token an iteration."""
    return (
        f"actor.model.path={folder}",
        "rollout.engine=transformers",
        "env.task=prompts",
        f"env.kwargs={{path: {squares}, image: image}}",
        "env.rewards=[{name: exact_match}]",
        "rollout.seed=0",
        "algorithm.prompts=12",
        "algorithm.samples_per_prompt=8",
        "algorithm.max_new_tokens=1",
        "actor.optimizer.lr=3.0e-3",
        "actor.sync.verify=logprobs",
        "actor.sync.verify_every=1",
        "runner.eval_every=0",
        "rollout.kv_cache_memory=4MiB",
    )


def in_all_placements(
    folder: Path,
    *overrides: str,
    processes: Collection[str] = tuple(PLACEMENTS),
    threads: Collection[str] = (),
) -> dict[str, Finished]:
    """The same job, same seeds, by config; those among `threads` have one rank each."""
    jobs = {config: placed(*PLACEMENTS[config]) for config in processes}
    jobs |= {config: (INLINE[0], *placed(*ONE_RANK_EACH[config])) for config in threads}
    return {
        config: train(config, folder / config, *overrides, *where)
        for config, where in jobs.items()
    }


def check_alike(runs: dict[str, Finished], *, iterations: int) -> None:
    """The runs of all placements have made the same updates, but for rounding."""
    for metric in (
        "actor/reward",
        "actor/tokens_learned",
        "actor/entropy",
        "actor/grad_norm",
    ):
        first, *others = (
            [line[metric] for line in run.metrics()][:iterations]
            for run in runs.values()
        )
        assert all(
            other == pytest.approx(first, rel=5e-3, abs=5e-4) for other in others
        ), metric
