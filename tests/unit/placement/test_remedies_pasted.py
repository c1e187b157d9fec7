"""Every proposed line of a job that does not fit is pasted into its config and planned again."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from rlplace.config.compose import with_hydra
from rlplace.placement.memory.solve import Knob, solve
from rlplace.runtime.prepare import prepare

SMALL = "cluster.nodes=[{accelerators: 8, memory: %s, host_memory: 2TiB}]"
# Engines of one accelerator each, apart from the actor, which are awake while a sync brings windows of weights.
APART = (
    "grpo_qwen3_8b cluster=64xA100 cluster.component_placement.actor=0-15 "
    "cluster.component_placement.rollout=16-63 rollout.enable_offload=false"
)
FULL_SHARE = "rollout.gpu_memory_utilization=0.95"
JOBS = {  # command line -> whether its remedies are enough
    f"rlhf_ppo_colocated {SMALL % '20GiB'}": True,
    f"rlhf_ppo_colocated {SMALL % '24GiB'} algorithm.max_new_tokens=64 algorithm.max_prompt_length=64": True,
    f"rlhf_ppo_colocated {SMALL % '40GiB'} actor.enable_offload=false cluster.allow_resident=[actor]": True,
    f"rlhf_ppo_colocated {SMALL % '2GiB'}": False,
    "rlhf_ppo_70b_hybrid actor.optimizer.on_host=false": True,
    "rlhf_ppo_70b_dedicated actor.optimizer.on_host=false": True,
    "collocated_grpo_llm cluster.accelerator.kind=emulated cluster.accelerator.memory=1GiB": False,
    "collocated_grpo_llm cluster.accelerator.kind=emulated cluster.accelerator.memory=1400MiB": True,
    f"rlhf_ppo_colocated {SMALL % '80GiB'} rollout.gpu_memory_utilization=0.2": True,
    f"grpo_qwen3_8b {SMALL % '24GiB'} actor.optimizer.on_host=true": True,
    f"{APART} {FULL_SHARE}": True,
    "hybrid_ppo cluster.accelerator.kind=emulated cluster.accelerator.memory=100MiB": False,
}


def words(job: str) -> list[str]:
    return ["--config-name", *re.split(r" (?=[a-z_.]+=)", job)]


def groups(fix: str) -> list[dict[str, Any]]:
    """The lines to paste together: one by one, or all where they say `and`."""
    lines = [
        line for line in fix.split("\n") if re.match(r"(or: |and: )?[a-z_.]+: ", line)
    ]
    read = [
        yaml.safe_load(
            re.sub(r" {8,}.*", "", line.removeprefix("or: ").removeprefix("and: "))
        )
        for line in lines
    ]
    joined: dict[str, Any] = {}
    for entry in read:
        joined |= entry
    return [joined] if "\nand: " in fix else read


@pytest.mark.parametrize("job", JOBS)
def test_every_proposed_line_works(job: str) -> None:
    (composed,) = with_hydra(words(job))
    shortages = prepare(composed.mapping).view.shortages
    assert shortages
    proposed = [
        group
        for problem in shortages
        if problem.fix
        for group in groups(problem.fix)
        if group
    ]
    print(*(problem.fix for problem in shortages), sep="\n\n")
    fits = [
        not prepare({**composed.mapping, **group}).view.shortages for group in proposed
    ]
    assert fits == [JOBS[job]] * len(fits)
    assert fits or not JOBS[job]


def test_engines_awake_at_a_share_of_0_9_have_room_for_a_sync() -> None:
    """Not for a second copy of the weights, which are 15.3 GiB."""
    (composed,) = with_hydra(words(f"{APART} rollout.gpu_memory_utilization=0.9"))
    assert not prepare(composed.mapping).view.shortages


def test_a_sync_through_the_hosts_saves_the_windows_of_weights() -> None:
    (composed,) = with_hydra(words(f"{APART} {FULL_SHARE}"))
    (shortage,) = prepare(composed.mapping).view.shortages
    assert shortage.got is not None
    assert "in stage sync" in shortage.got
    assert shortage.fix is not None
    assert shortage.fix.startswith("actor.sync.through_host: true  ")


def test_an_engine_with_a_share_of_0_95_has_room_for_its_context_beside_it() -> None:
    through_host = "actor.sync.through_host=true"
    (composed,) = with_hydra(words(f"{APART} {through_host} {FULL_SHARE}"))
    assert not prepare(composed.mapping).view.shortages


def test_what_is_too_small_because_it_is_emulated_says_so() -> None:
    kind = "cluster.accelerator.kind=emulated cluster.accelerator.memory=1GiB"
    (composed,) = with_hydra(words(f"collocated_grpo_llm {kind}"))
    (shortage, *_) = prepare(composed.mapping).view.shortages
    assert (
        "each is emulated with 1 GiB, set by cluster.accelerator.memory" in shortage.why
    )


def test_the_largest_micro_batch_is_one_that_the_batch_checks_accept() -> None:
    (composed,) = with_hydra(["--config-name", "rlhf_ppo_colocated"])
    for component in ("actor", "critic"):
        solution = solve(prepare(composed.mapping).case, Knob.MICRO_BATCH, component)
        assert solution is not None
        lines = {f"{component}.micro_batch": int(solution.value)}
        assert not prepare({**composed.mapping, **lines}).view.shortages
