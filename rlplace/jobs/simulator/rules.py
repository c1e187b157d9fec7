"""Rules of jobs on simulators: rows for every rank, minibatches, sequences, sync of a part of the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from math import lcm
from typing import TYPE_CHECKING

from rlplace.checks.placed import PlacedJob
from rlplace.checks.rule import Found, Rule, at_key
from rlplace.codes import problem
from rlplace.config.blocks.policies import VlaConfig
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.envs.registry import normalized_by
from rlplace.errors import Problem
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency, makes_room

if TYPE_CHECKING:
    from rlplace.envs.contract import Spaces

_ENVS = "env.total_num_envs"
_MINIBATCHES = "algorithm.num_minibatches"
_UNROLL_STEPS = "algorithm.unroll_steps"
_BURN_IN = "algorithm.burn_in"
_ENTROPY = "algorithm.entropy_coef"
# Sync modes that send only part of the weights: the rollout ranks must still hold the rest.
_SOME_WEIGHTS = (
    "trainable",
    "lora",
    "adapter",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSimulatorJob(PlacedJob):
    """A config of a job on simulators with its placement, as rules of placements take them."""

    config: SimulatorJobConfig


# ── rows of environments ─────────────────────────────────────────────────────────────────────────────────────────────


def _envs(case: PlacedSimulatorJob) -> int:
    return case.config.env.total_num_envs


def _groups(case: PlacedSimulatorJob) -> int:
    """Return the number of stage groups of each env rank: shares of its environments that step in turn."""
    return case.config.rollout.pipeline_stage_num


def _block(case: PlacedSimulatorJob) -> int:
    """Return stage groups times env ranks. The number of environments has to be a multiple of this number."""
    return _groups(case) * max(case.ranks("env"), 1)


def _env_is_placed(case: PlacedSimulatorJob) -> bool:
    return "env" in case.placement.components


def agents_problems(
    config: SimulatorJobConfig, plan: Plan, together: int
) -> list[Problem]:
    """Return a problem if the rows of a stage group are no whole number of environments.

    `together`: number of rows of one environment, such as its agents.
    """
    if "env" not in plan.placement.components:
        return []
    block = config.rollout.pipeline_stage_num * plan.placement.world_size("env")
    total = config.env.total_num_envs
    rows = total // block
    if rows % together == 0:
        return []
    found = problem(
        "agents-misfit",
        "env.total_num_envs",
        f"{total}: {rows} rows in each stage group",
        agents=together,
        simulator=config.env.id,
        above=-(-total // (block * together)) * block * together,
    )
    return [found]


def _uneven_envs(case: PlacedSimulatorJob) -> Iterator[Found]:
    """Yield a finding if the environments cannot be divided evenly over env ranks and stage groups."""
    envs = _envs(case)
    block = _block(case)
    if envs % block == 0:
        return
    below = envs // block * block
    error = "fewer-than-block"
    if below:
        error = "between-blocks"
    yield at_key(
        _ENVS,
        envs,
        error,
        envs=envs,
        ranks=case.ranks("env"),
        groups=_groups(case),
        block=block,
        below=below,
        above=below + block,
    )


def _rollout_without_rows(case: PlacedSimulatorJob) -> Iterator[Found]:
    """Yield a finding if a stage group has fewer rows (environments) than there are rollout ranks.

    A stage group is a share of all environments; its environments step together. Some rollout rank would have no row.
    """
    envs = _envs(case)
    groups = _groups(case)
    ranks = case.ranks("rollout")
    rows = envs // groups
    if ranks > rows:
        block = _block(case)
        yield at_key(
            _ENVS,
            envs,
            "rollout",
            ranks=ranks,
            envs=envs,
            groups=groups,
            rows=rows,
            least=-(-ranks * groups // block) * block,
        )


def _actor_without_rows(case: PlacedSimulatorJob) -> Iterator[Found]:
    """Yield a finding if there are more actor ranks than environments, so that a rank would have no row."""
    envs = _envs(case)
    ranks = case.ranks("actor")
    if ranks > envs:
        block = _block(case)
        least = -(-ranks // block) * block
        yield at_key(_ENVS, envs, "actor", ranks=ranks, envs=envs, least=least)


# ── minibatches and sequences ────────────────────────────────────────────────────────────────────────────────────────


def _remembers(case: PlacedSimulatorJob) -> bool:
    return bool(case.config.actor.policy.remembered)


def _forgets(case: PlacedSimulatorJob) -> bool:
    return not _remembers(case)


def _empty_minibatches(case: PlacedSimulatorJob) -> Iterator[Found]:
    """Yield a finding if there are more minibatches than sequences (policy with memory) or than samples."""
    algorithm = case.config.algorithm
    envs = _envs(case)
    minibatches = algorithm.num_minibatches
    steps = algorithm.rollout_steps
    sequences = envs * (steps // algorithm.unrolled)
    samples = envs * steps
    if _remembers(case) and minibatches > sequences > 0:
        yield at_key(
            _MINIBATCHES,
            minibatches,
            "sequences",
            minibatches=minibatches,
            sequences=sequences,
            envs=envs,
            steps=steps,
            unrolled=algorithm.unrolled,
        )
    elif minibatches > samples:
        yield at_key(
            _MINIBATCHES,
            minibatches,
            "samples",
            minibatches=minibatches,
            samples=samples,
            envs=envs,
            steps=steps,
        )


def _sequences_without_memory(case: PlacedSimulatorJob) -> Iterator[Found]:
    """Yield a finding for each of the keys `unroll_steps` and `burn_in` that is set.

    This rule applies to policies without memory, which learn from single steps instead of sequences.
    """
    algorithm = case.config.algorithm
    given = {_UNROLL_STEPS: algorithm.unroll_steps, _BURN_IN: algorithm.burn_in}
    for name, value in given.items():
        if value:
            yield at_key(name, value, "no-memory", name=name)


def _cut_sequences(case: PlacedSimulatorJob) -> Iterator[Found]:
    """Yield a finding if the rollout steps are not a multiple of the sequence length.

    Otherwise, yield a finding if the burn-in is longer than a sequence.
    """
    algorithm = case.config.algorithm
    steps = algorithm.rollout_steps
    length = algorithm.unrolled
    if steps % length:
        longest = min(length, steps)
        fitting = [fit for fit in range(1, longest + 1) if steps % fit == 0]
        yield at_key(
            _UNROLL_STEPS,
            length,
            "cut",
            steps=steps,
            length=length,
            fitting=fitting[-1],
        )
    elif algorithm.burn_in > length:
        yield at_key(_BURN_IN, algorithm.burn_in, "burn-in", length=length)


# ── policies by flow matching ────────────────────────────────────────────────────────────────────────────────────────


def _entropy_of_given_noise(case: PlacedSimulatorJob) -> Iterator[Found]:
    """Yield a finding if entropy is rewarded, and the noise of the policy is given: the reward would have no effect."""
    model = case.config.actor.policy
    coefficient = case.config.algorithm.entropy_coef
    if isinstance(model, VlaConfig) and model.head == "flow" and coefficient:
        yield at_key(_ENTROPY, coefficient, "flow-entropy", noise=model.noise_level)


# ── sync ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sends_a_part(case: PlacedSimulatorJob) -> bool:
    """Return whether rollout has `enable_offload` and a sync sends only a part of the weights to rollout."""
    config = case.config
    part = config.actor.sync.mode in _SOME_WEIGHTS
    return part and config.rollout.enable_offload and case.ranks("rollout") > 0


def _sync_without_base(case: PlacedSimulatorJob) -> Iterator[Found]:
    """Yield a finding if rollout leaves its accelerators between syncs.

    This rule applies if a sync sends only a part of the weights: rollout would lose the weights that are not sent.
    """
    active = case.active
    away = [
        stage for stage in active.stages if active.of(stage, "rollout") is Residency.OFF
    ]
    if away and (active.shared or makes_room(case.placement, active, "rollout")):
        mode = case.config.actor.sync.mode
        yield at_key("actor.sync.mode", mode, away=" and ".join(away), mode=mode)


RULES = (
    Rule(code="uneven-envs", applies=_env_is_placed, facts=_uneven_envs),
    Rule(code="rank-without-rows", facts=_rollout_without_rows),
    Rule(code="rank-without-rows", facts=_actor_without_rows),
    Rule(code="empty-minibatches", facts=_empty_minibatches),
    Rule(code="bad-sequences", applies=_forgets, facts=_sequences_without_memory),
    Rule(code="bad-sequences", applies=_remembers, facts=_cut_sequences),
    Rule(code="model-misfit", facts=_entropy_of_given_noise),
    Rule(code="sync-without-base", applies=_sends_a_part, facts=_sync_without_base),
)


# ── waste ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rollout_rows(case: PlacedSimulatorJob) -> Iterator[Found]:
    """Yield a finding if some rollout ranks have fewer rows (environments) of a stage group than others."""
    groups = _groups(case)
    ranks = case.ranks("rollout")
    even = lcm(_block(case), ranks * groups)
    yield from _uneven_shares(case, "rollout", _envs(case) // groups, even)


def _actor_rows(case: PlacedSimulatorJob) -> Iterator[Found]:
    """Yield a finding if some actor ranks have fewer rows (environments) than other actor ranks."""
    even = lcm(_block(case), case.ranks("actor"))
    yield from _uneven_shares(case, "actor", _envs(case), even)


def _uneven_shares(
    case: PlacedSimulatorJob, component: str, rows: int, even: int
) -> Iterator[Found]:
    """Yield a finding if the ranks of a component cannot share the rows (environments) evenly.

    `rows`: number of rows that the ranks share. `even`: any multiple of this number of environments can be shared
    evenly.
    """
    envs = _envs(case)
    ranks = case.ranks(component)
    if rows % ranks == 0:
        return
    most = -(-rows // ranks)
    yield at_key(
        _ENVS,
        envs,
        component=component,
        ranks=ranks,
        rows=rows,
        most=most,
        least=most - 1,
        lost=1 - rows / (ranks * most),
        above=-(-envs // even) * even,
    )


def _uneven_minibatches(case: PlacedSimulatorJob) -> Iterator[Found]:
    """Yield a finding if samples (of a policy with memory: sequences) do not divide over the minibatches."""
    algorithm = case.config.algorithm
    minibatches = algorithm.num_minibatches
    what = "samples"
    count = _envs(case) * algorithm.rollout_steps
    if _remembers(case):
        what = "sequences"
        count //= algorithm.unrolled
    # More minibatches than samples are told by another rule
    if minibatches >= count or count % minibatches == 0:
        return
    below = max(n for n in range(1, minibatches) if count % n == 0)
    above = min(n for n in range(minibatches, count + 1) if count % n == 0)
    near = below if minibatches - below < above - minibatches else above
    yield at_key(
        _MINIBATCHES,
        minibatches,
        what=what,
        count=count,
        minibatches=minibatches,
        most=-(-count // minibatches),
        least=count // minibatches,
        near=near,
    )


WARNINGS = (
    Rule(code="uneven-minibatches", facts=_uneven_minibatches),
    Rule(code="uneven-shares", facts=_rollout_rows),
    Rule(code="uneven-shares", facts=_actor_rows),
)


# ── evaluations ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MadeSimulatorJob:
    """A config of a job on simulators, and what is known of its simulator because one was made."""

    config: SimulatorJobConfig
    spaces: Spaces


def evaluates(config: SimulatorJobConfig) -> bool:
    """Return whether the run of a config has evaluations."""
    return config.runner.eval_every > 0


def _evaluates(job: MadeSimulatorJob) -> bool:
    return evaluates(job.config)


def _not_like_training(job: MadeSimulatorJob) -> Iterator[Found]:
    """Yield a finding if rollout cannot play the episodes of an evaluation as env plays those of training."""
    if job.spaces.normalized:
        key, got = normalized_by(job.config.env)
        yield Found(key=key, got=got)


# Rules of a run that evaluates
EVALUATION: tuple[Rule[MadeSimulatorJob], ...] = (
    Rule(
        code="not-evaluated-in-training", applies=_evaluates, facts=_not_like_training
    ),
)
