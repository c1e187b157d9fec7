"""Rules of the off-policy job: numbers of steps and updates, shares of ranks, and simulators that fit an algorithm."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from fractions import Fraction
from math import lcm, log, prod
from typing import TYPE_CHECKING

from rlplace.checks.rule import Found, Rule, at_key
from rlplace.config.blocks.off_policy import OffPolicyConfig
from rlplace.config.fields import own_values, users_of
from rlplace.envs.action_bounds import WIDEST
from rlplace.envs.contract import ContinuousActions, DiscreteActions
from rlplace.envs.registry import normalized_by, without_texts
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.memory.replay import replay_bytes
from rlplace.placement.plan import Plan
from rlplace.units import show_bytes

if TYPE_CHECKING:
    from rlplace.envs.contract import Spaces

_SYNC = "algorithm.sync_every"
_STEPS = "algorithm.steps_per_iteration"
_ENVS = "env.total_num_envs"
_CAPACITY = "replay.capacity"
_BATCH = "algorithm.batch_size"
# Largest share of the weights of the start that target networks may have at the end of a run
_MOST_OLD = 0.1


# ── steps and updates ────────────────────────────────────────────────────────────────────────────────────────────────


def _broken_pieces(config: OffPolicyConfig) -> Iterator[Found]:
    """Yield a finding if the updates between two syncs are not those of a whole number of steps of all environments."""
    algorithm = config.blocks.algorithm
    envs = config.env.total_num_envs
    ratio = algorithm.ratio
    rounds = algorithm.piece_steps / envs
    if rounds.denominator == 1:
        return
    # The least number of updates that belong to whole steps of all environments
    least = (ratio * envs).numerator
    yield at_key(
        _SYNC,
        algorithm.sync_every,
        "pieces",
        updates=algorithm.sync_every,
        ratio=algorithm.updates_per_step,
        steps=_text(algorithm.piece_steps),
        envs=envs,
        above=-(-algorithm.sync_every // least) * least,
    )


def _broken_iterations(config: OffPolicyConfig) -> Iterator[Found]:
    """Yield a finding if an iteration is no whole number of pieces."""
    algorithm = config.blocks.algorithm
    piece = algorithm.piece_steps
    whole = (piece / config.env.total_num_envs).denominator == 1
    steps = algorithm.steps_per_iteration
    if not whole or steps % piece == 0:
        return
    yield at_key(
        _STEPS,
        steps,
        "iteration",
        steps=steps,
        piece=int(piece),
        updates=algorithm.sync_every,
        ratio=algorithm.updates_per_step,
        above=int(-(-steps // piece) * piece),
    )


def _small_memory(config: OffPolicyConfig) -> Iterator[Found]:
    """Yield a finding if the memory keeps less than a step of each environment, or is no multiple of that."""
    capacity = config.blocks.replay.capacity
    envs = config.env.total_num_envs
    if capacity % envs:
        above = -(-capacity // envs) * envs
        yield at_key(_CAPACITY, capacity, "capacity", envs=envs, above=above)


def _no_updates(config: OffPolicyConfig) -> Iterator[Found]:
    """Yield a finding if the run ends before its first update."""
    algorithm = config.blocks.algorithm
    steps = algorithm.steps_per_iteration * config.runner.total_iterations
    if algorithm.offline or algorithm.learning_starts < steps:
        return
    enough = algorithm.learning_starts // algorithm.steps_per_iteration + 1
    yield at_key(
        "algorithm.learning_starts",
        algorithm.learning_starts,
        steps=steps,
        iterations=enough,
    )


def _skipped_poison(config: OffPolicyConfig) -> Iterator[Found]:
    if config.faults.on_poison == "skip":
        yield at_key("faults.on_poison", "skip", "poison")


def _prioritised_demonstrations(config: OffPolicyConfig) -> Iterator[Found]:
    replay = config.blocks.replay
    if replay.demonstrations is not None and replay.prioritised:
        yield at_key("replay.sampling", replay.sampling, "priorities")


def _offline(config: OffPolicyConfig) -> Iterator[Found]:
    """Yield a finding if an algorithm that takes no steps has none to learn from."""
    blocks = config.blocks
    if not blocks.algorithm.offline:
        return
    name = blocks.algorithm.name
    if blocks.replay.demonstrations is None:
        yield at_key("replay.demonstrations", None, "no-steps", name=name)


def _targets_of_td3(config: OffPolicyConfig) -> Iterator[Found]:
    """Yield a finding if the interval of target networks is set for TD3, which does not use it."""
    algorithm = config.blocks.algorithm
    every = algorithm.target_every
    if algorithm.name in ("td3", "td3_bc") and every != 1:
        yield at_key("algorithm.target_every", every, "targets-of-td3", every=every)


def _too_late(config: OffPolicyConfig) -> Iterator[Found]:
    """Yield a finding for each setting that comes into effect after the end of the run, or hardly before it."""
    algorithm = config.blocks.algorithm
    steps = algorithm.steps_per_iteration * config.runner.total_iterations
    before = 0 if algorithm.offline else algorithm.learning_starts
    updates = int(algorithm.ratio * max(0, steps - before))
    if not updates:
        return
    every = algorithm.target_every
    if algorithm.uses("target_every") and every > updates:
        key = "algorithm.target_every"
        # Small steps have to be many
        fitting = max(1, updates // 20) if algorithm.tau == 1.0 else 1
        yield at_key(key, every, "targets", updates=updates, fitting=fitting)
    elif algorithm.uses("target_every") and every > 1:
        # Weights of the start that target networks still have at the end, as a share of all
        old = (1.0 - algorithm.tau) ** (updates // every)
        if old > _MOST_OLD:
            share = f"{old:.0%}"
            yield at_key(
                "algorithm.tau", algorithm.tau, "tau", share=share, every=every
            )
    delay = algorithm.policy_delay
    if algorithm.uses("policy_delay") and delay > updates:
        yield at_key("algorithm.policy_delay", delay, "policy", updates=updates)
    falls = algorithm.epsilon_steps
    if algorithm.uses("epsilon_steps") and falls > steps:
        fallen = (algorithm.epsilon_start - algorithm.epsilon_end) * steps / falls
        yield at_key(
            "algorithm.epsilon_steps",
            falls,
            "epsilon",
            share=f"{algorithm.epsilon_start - fallen:.0%}",
            steps=steps,
            fitting=max(1, steps // 5),
        )


def _without_effect(config: OffPolicyConfig) -> Iterator[Found]:
    """Yield a finding for each key with a value of its own that the algorithm, or the memory, does not use."""
    blocks = config.blocks
    name = blocks.algorithm.name
    for block, of in (("algorithm", blocks.algorithm), ("actor", blocks.actor)):
        for leaf, value in own_values(of).items():
            users = users_of(of, leaf)
            if users and name not in users:
                told = {"name": name, "users": " or ".join(users), "first": users[0]}
                yield at_key(f"{block}.{leaf}", value, "algorithm", **told)
    replay = blocks.replay
    prioritised = ("sampling", replay.prioritised, "prioritised")
    shown = ("demonstrations", replay.demonstrations is not None, "<a file>")
    needs = {
        "priority_exponent": prioritised,
        "priority_correction": prioritised,
        "demonstration_share": shown,
    }
    for leaf, value in own_values(replay).items():
        other, used, needed = needs.get(leaf, ("", True, ""))
        if not used:
            fix = f"replay.{other}={needed}"
            yield at_key(f"replay.{leaf}", value, "memory", other=other, fix=fix)


def _explored(config: OffPolicyConfig) -> Iterator[Found]:
    """Yield a finding if the share of random actions has fallen before anything is learned.

    Until the first update, all actions are random; the share counts from the first step.
    """
    algorithm = config.blocks.algorithm
    falls = algorithm.epsilon_steps
    before = algorithm.learning_starts
    flat = algorithm.epsilon_start <= algorithm.epsilon_end
    if not algorithm.uses("epsilon_steps") or flat or falls > before:
        return
    steps = algorithm.steps_per_iteration * config.runner.total_iterations
    yield at_key(
        "algorithm.epsilon_steps",
        falls,
        "explored",
        end=f"{algorithm.epsilon_end:.0%}",
        before=before,
        fitting=min(steps, before + max(1, steps // 5)),
    )


# Warnings of the config alone
WARNINGS: tuple[Rule[OffPolicyConfig], ...] = (
    Rule(code="setting-without-effect", facts=_without_effect),
    Rule(code="setting-without-effect", facts=_explored),
    Rule(code="too-late-in-run", facts=_too_late),
)
# Rules of the config alone
RULES: tuple[Rule[OffPolicyConfig], ...] = (
    Rule(code="uneven-updates", facts=_broken_pieces),
    Rule(code="uneven-updates", facts=_broken_iterations),
    Rule(code="uneven-updates", facts=_small_memory),
    Rule(code="no-updates", facts=_no_updates),
    Rule(code="off-policy-misfit", facts=_targets_of_td3),
    Rule(code="off-policy-misfit", facts=_skipped_poison),
    Rule(code="off-policy-misfit", facts=_prioritised_demonstrations),
    Rule(code="off-policy-misfit", facts=_offline),
)


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOffPolicyJob:
    """A config of the off-policy job with its placement."""

    config: OffPolicyConfig
    placement: HybridComponentPlacement

    def ranks(self, component: str) -> int:
        if component not in self.placement.components:
            return 1
        return max(1, self.placement.world_size(component))


def _uneven_rows(case: PlacedOffPolicyJob) -> Iterator[Found]:
    """Yield a finding if the environments cannot be dealt evenly to the ranks of rollout or replay."""
    envs = case.config.env.total_num_envs
    block = lcm(case.ranks("rollout"), case.ranks("replay"))
    for component in ("rollout", "replay"):
        ranks = case.ranks(component)
        if envs % ranks:
            yield at_key(
                _ENVS,
                envs,
                "rows",
                envs=envs,
                ranks=ranks,
                component=component,
                above=-(-envs // block) * block,
            )


def _uneven_batches(case: PlacedOffPolicyJob) -> Iterator[Found]:
    """Yield a finding if a batch cannot be dealt evenly to replay ranks, which draw, and actor ranks, which learn."""
    batch = case.config.blocks.algorithm.batch_size
    actors = case.ranks("actor")
    shards = case.ranks("replay")
    block = actors * shards
    if batch % block:
        yield at_key(
            _BATCH,
            batch,
            "batch",
            batch=batch,
            actors=actors,
            shards=shards,
            above=-(-batch // block) * block,
        )


def _uneven_demonstrations(case: PlacedOffPolicyJob) -> Iterator[Found]:
    """Yield a finding if the share of demonstrations of a batch is no whole number of samples."""
    blocks = case.config.blocks
    replay = blocks.replay
    batch = blocks.algorithm.batch_size
    block = case.ranks("actor") * case.ranks("replay")
    samples = batch // block
    if batch % block or blocks.demonstrated(samples).denominator == 1:
        return
    nearest = max(1, round(blocks.demonstrated(samples)))
    yield at_key(
        "replay.demonstration_share",
        replay.demonstration_share,
        "demonstrations",
        share=replay.demonstration_share,
        samples=samples,
        nearest=float(Fraction(nearest, samples)),
    )


def _divided_batches(case: PlacedOffPolicyJob) -> Iterator[Found]:
    """Yield a finding if ranks would normalise by the statistics of their shares of a batch."""
    name = case.config.blocks.algorithm.name
    ranks = case.ranks("actor")
    if name == "crossq" and ranks > 1:
        yield at_key("algorithm.name", name, "shares", ranks=ranks)


PLACED: tuple[Rule[PlacedOffPolicyJob], ...] = (
    Rule(code="off-policy-misfit", facts=_divided_batches),
    Rule(code="uneven-updates", facts=_uneven_rows),
    Rule(code="uneven-updates", facts=_uneven_batches),
    Rule(code="uneven-updates", facts=_uneven_demonstrations),
)


# ── the simulator ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MadeOffPolicyJob:
    """A config of the off-policy job with its plan, and the spaces of its simulator."""

    config: OffPolicyConfig
    spaces: Spaces
    plan: Plan


def _unsuited_actions(job: MadeOffPolicyJob) -> Iterator[Found]:
    """Yield a finding if the algorithm cannot take the simulator's actions."""
    name = job.config.blocks.algorithm.name
    actions = job.spaces.actions
    simulator = job.config.env.id or job.config.env.kind
    if name == "dqn":
        if not isinstance(actions, DiscreteActions):
            yield at_key("algorithm.name", name, "no-choice", simulator=simulator)
        return
    if not isinstance(actions, ContinuousActions):
        error = "choices"
        if not isinstance(actions, DiscreteActions):
            error = "many-choices"
        yield at_key("algorithm.name", name, error, simulator=simulator, name=name)
    elif not all(abs(bound) < WIDEST for bound in (*actions.low, *actions.high)):
        yield at_key(
            "algorithm.name", name, "no-bounds", simulator=simulator, name=name
        )


def _unreachable_entropy(job: MadeOffPolicyJob) -> Iterator[Found]:
    """Yield a finding if SAC's temperature aims at an entropy that no policy has: elements are in [-1, 1]."""
    algorithm = job.config.blocks.algorithm
    target = algorithm.target_entropy
    actions = job.spaces.actions
    if not algorithm.draws or target is None or algorithm.temperature != "auto":
        return
    if not isinstance(actions, ContinuousActions):
        return
    # The entropy of the uniform distribution
    elements = prod(actions.shape)
    most = elements * log(2)
    if target >= most:
        yield at_key(
            "algorithm.target_entropy",
            target,
            "entropy",
            target=target,
            elements=elements,
            most=most,
            fitting=-float(elements),
        )


def _images(job: MadeOffPolicyJob) -> Iterator[Found]:
    """Yield a finding if an observation has an image or a text."""
    if job.spaces.texts:
        name = job.spaces.texts[0].name
        wrappers = without_texts(job.config.env, job.spaces)
        yield at_key("env.id", name, "texts", wrappers=wrappers)
    elif job.spaces.observation_dtype == "uint8":
        shape = list(job.spaces.observation_shape)
        simulator = job.config.env.id or job.config.env.kind
        yield Found(key="env.id", got=f"{simulator}: {shape} of bytes", error="images")


def _statistics(job: MadeOffPolicyJob) -> Iterator[Found]:
    """Yield a finding if the simulator normalizes: the numbers in the memory would be those of older statistics."""
    if not job.spaces.normalized and not job.spaces.own_statistics:
        return
    env = job.config.env
    key, got = normalized_by(env)
    error = "normal" if env.wrappers else "normal-within"
    yield Found(key=key, got=got, error=error, facts={"simulator": env.id or env.kind})


def _on_this_machine(job: MadeOffPolicyJob) -> bool:
    """Return whether the memory lies on this machine, and the plan does not know how much this machine has."""
    nodes = job.plan.placement.topology.nodes
    own = job.config.cluster.ray.address is None
    return own and len(nodes) == 1 and not nodes[0].host_memory_bytes


def _large_memory(job: MadeOffPolicyJob) -> Iterator[Found]:
    """Yield a finding if the replay memory is larger than the memory of this machine."""
    replay = job.config.blocks.replay
    kept = job.config.blocks.kept_steps
    size = replay_bytes(job.spaces, kept, prioritised=replay.prioritised)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size <= there:
        return
    # Half of the machine, in whole steps of all environments
    envs = job.config.env.total_num_envs
    each = size / kept
    steps = max(1, int(there / 2 / each / envs)) * envs
    yield at_key(
        _CAPACITY,
        replay.capacity,
        size=show_bytes(size),
        there=show_bytes(there),
        each=show_bytes(round(each)),
        steps=steps,
    )


# Of the spaces alone: a plan checks them where the simulator is surely made
SUITED: tuple[Rule[MadeOffPolicyJob], ...] = (
    Rule(code="off-policy-misfit", facts=_unsuited_actions),
    Rule(code="off-policy-misfit", facts=_unreachable_entropy),
    Rule(code="off-policy-misfit", facts=_images),
    Rule(code="off-policy-misfit", facts=_statistics),
)
MADE: tuple[Rule[MadeOffPolicyJob], ...] = (
    *SUITED,
    Rule(code="replay-does-not-fit", applies=_on_this_machine, facts=_large_memory),
)


def _text(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number)
    return f"{float(number):g}"
