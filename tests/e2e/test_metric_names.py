"""Every metric that runs write is in docs/metrics.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.site_reference import metric_names
from tests.e2e.test_off_policy_inline import TINY
from tests.e2e.training import INLINE, Finished, placed, train

RUNS = {
    "off-policy": ("sac", TINY),
    "written answers": (
        "sft_tiny",
        (
            "cluster.launcher=inline",
            "cluster.accelerator.kind=emulated",
            "cluster.component_placement.actor=0",
            "algorithm.prompts=4",
            "runner.eval_every=1",
        ),
    ),
    "simulators": ("hybrid_ppo", (*INLINE, *placed("0", "0", "1"))),
    "language model with critic, reference and reward": (
        "rlhf_tiny",
        (
            "cluster.launcher=inline",
            "cluster.accelerator.kind=emulated",
            *(
                f"cluster.component_placement.{c}=0"
                for c in ("actor", "critic", "reference", "reward", "rollout", "env")
            ),
            "algorithm.prompts=4",
            "runner.eval_every=1",
            "runner.eval_prompts=4",
        ),
    ),
}


@pytest.mark.parametrize("kind", RUNS)
def test_every_metric_of_a_run_is_listed(
    kind: str, models: tuple[str, ...], tmp_path: Path
) -> None:
    config, words = RUNS[kind]
    # sft_tiny has no reward
    own = {"rlhf_tiny": models, "sft_tiny": models[:1]}.get(config, ())
    run: Finished = train(config, tmp_path, *words, *own, "runner.total_iterations=2")
    assert run.code == 0, run.err
    written = {name for line in run.metrics() for name in line}
    listed = metric_names()
    assert {
        name for name in written if not any(metric.matches(name) for metric in listed)
    } == set()
    learned = "actor/critic_loss" if config == "sac" else "actor/lr"
    assert {"time/iteration_s", "util/busy_share", learned} <= written
