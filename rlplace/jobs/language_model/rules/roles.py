"""Rules for critic, reference and rewards: roles that are missing, that contradict, or that use no accelerator.

A reference is either a component of its own or the actor without its LoRA factors. Values come either from a critic or
from a value head on the actor. Having both at once is a problem; so is having none where the algorithm needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlplace.checks.placed import runs
from rlplace.checks.rule import Found, Rule, at_key, at_line
from rlplace.config.blocks.language_model import LanguageModelJobConfig, RewardConfig
from rlplace.config.keys import PLACEMENT
from rlplace.errors import ConfigError, did_you_mean
from rlplace.jobs.language_model.rules.case import PlacedTextJob
from rlplace.placement.language.spec import role_of
from rlplace.placement.memory.model import read_model
from rlplace.placement.schedule import placed_names

_CRITIC = f"{PLACEMENT}.critic"
_SHARE_ACTOR = "reference.share_actor"


def _written(case: PlacedTextJob) -> Sequence[str]:
    """Return the names of the components that the config places, even if their placement is wrong."""
    return placed_names(case.config.cluster.component_placement)


# ── critic ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _has_critic(case: PlacedTextJob) -> bool:
    return "critic" in _written(case)


def _has_head(case: PlacedTextJob) -> bool:
    """Return whether values come from a value head on the actor."""
    return case.config.critic.on_actor


def _critic_and_head(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the job has a placed critic and also a value head on the actor."""
    if _has_critic(case) and _has_head(case):
        yield at_key("critic.on_actor", True, "critic-and-head")


def _no_values(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the algorithm is "ppo", but the job has neither a critic nor a value head."""
    ppo = case.config.algorithm.name == "ppo"
    if ppo and not _has_critic(case) and not _has_head(case):
        yield at_key(_CRITIC, None)


def _needless_values(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the job has a critic or a value head, but its algorithm does not use values."""
    name = case.config.algorithm.name
    if name == "ppo":
        return
    if _has_head(case):
        yield at_key("critic.on_actor", None, "needless-critic", name=name)
    elif _has_critic(case):
        yield at_key(_CRITIC, None, "needless-critic", name=name)


def _warmup_of_head(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if `critic.warmup_iterations` is set.

    This rule applies to jobs with a value head on the actor, which always learns together with the actor.
    """
    warmup = case.config.critic.warmup_iterations
    if warmup:
        yield at_key("critic.warmup_iterations", warmup, "warmup-of-head")


# ── reference ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _has_reference(case: PlacedTextJob) -> bool:
    return "reference" in _written(case)


def _shares_actor(case: PlacedTextJob) -> bool:
    return case.config.reference.share_actor


def _refreshed(case: PlacedTextJob) -> bool:
    """Return whether the config places a reference and has the actor's weights copied to it every few iterations."""
    return _has_reference(case) and case.config.reference.refresh_every > 0


def _has_kl(case: PlacedTextJob) -> bool:
    return case.config.algorithm.kl_coef > 0


def _reference_and_shared(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the job places a reference.

    This rule applies to jobs that set `reference.share_actor`: the actor without its LoRA factors is their reference.
    """
    if _has_reference(case):
        yield at_key(_SHARE_ACTOR, True, "reference-and-shared")


def _shared_without_factors(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the actor has no LoRA factors.

    This rule applies to jobs that set `reference.share_actor`: the actor without its LoRA factors is their reference.
    """
    if case.config.actor.lora_rank is None:
        yield at_key(_SHARE_ACTOR, True, "shared-without-factors")


def _refreshed_shared(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if `reference.refresh_every` is set.

    This rule applies to jobs that set `reference.share_actor`. The weights of their reference are the actor's base
    weights, which never change.
    """
    every = case.config.reference.refresh_every
    if every:
        yield at_key("reference.refresh_every", every, "refreshed-shared")


def _refreshed_shape(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the actor's weights cannot be copied to the reference, since the shapes differ."""
    if _other_shape(case.config):
        yield at_key("reference.model", None, "refreshed-shape")


def _other_shape(config: LanguageModelJobConfig) -> bool:
    """Return whether the weights of the reference's own model differ in shape from the weights of the actor.

    Return False if the reference has no model of its own, or if a model cannot be read.
    """
    own = config.reference.model
    shared = config.model
    if own is None or shared is None:
        return False
    try:
        return read_model(own) != read_model(shared)
    # Reported for each component when its memory is counted
    except ConfigError:
        return False


def _no_reference(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the config sets a KL penalty, but the job has no reference."""
    has_kl = _has_kl(case)
    if has_kl and not _has_reference(case) and not _shares_actor(case):
        yield at_key("algorithm.kl_coef", case.config.algorithm.kl_coef)


def _k1_in_loss(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the loss uses the KL estimator k1: in the loss, the gradient of k1 is zero on average."""
    algorithm = case.config.algorithm
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield at_key("algorithm.kl_estimator", "k1", "k1-in-loss")


def _target_of_nothing(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if `algorithm.kl_target` is set and the KL coefficient is 0: the coefficient would stay 0."""
    algorithm = case.config.algorithm
    if algorithm.kl_target is not None and algorithm.kl_coef == 0:
        yield at_key("algorithm.kl_target", algorithm.kl_target, "target-of-nothing")


# ── rewards ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rewards(case: PlacedTextJob) -> list[str]:
    """Return the names of the rewards that the config places."""
    return [c for c in _written(case) if role_of(c) == "reward"]


def _unnamed_reward(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the component "reward" is placed, but the config names its rewards (`reward.<name>`)."""
    reward = case.config.reward
    if not isinstance(reward, RewardConfig) and "reward" in _written(case):
        names = ", ".join(reward)
        yield at_key(f"{PLACEMENT}.reward", None, "unnamed-reward", names=names)


def _unplaced_rewards(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding for each config block `reward.<name>` without a placement of the component `reward.<name>`."""
    blocks = case.config.reward
    if isinstance(blocks, RewardConfig):
        return
    rewards = _rewards(case)
    names = [c.partition(".")[2] for c in rewards]
    for name in blocks:
        if name in names:
            continue
        near = did_you_mean(name, names)
        error = "reward"
        if near:
            error = "misspelt-reward"
        elif not rewards:
            error = "reward-of-none"
        placed = ", ".join(rewards)
        yield at_key(f"reward.{name}", None, error, name=name, near=near, placed=placed)


def _function_and_url(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding for each reward that has a function and also the URL of an endpoint."""
    for component in _rewards(case):
        reward = case.config.reward_of(component)
        block = case.config.key_of(component)
        if reward.function is not None and reward.url is not None:
            yield at_key(f"{block}.url", reward.url, "function-and-url", block=block)


def _reward_of_nothing(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding if the component "reward" is placed, and the config says nothing of its model or function."""
    if "reward" in _written(case) and case.config.reward == RewardConfig():
        yield at_key(f"{PLACEMENT}.reward", None, "reward-of-nothing")


def _needless_accelerators(case: PlacedTextJob) -> Iterator[Found]:
    """Yield a finding for each reward without a model (a function or an endpoint) that is placed on accelerators."""
    placement = case.placement
    for component in placement.components:
        if role_of(component) != "reward" or not placement.accelerators(component):
            continue
        kind = case.config.reward_of(component).kind
        if kind == "model":
            continue
        error = "function"
        if kind == "url":
            error = "endpoint"
        yield at_line(placement.spec(component), error, component=component)


RULES = (
    # critic
    Rule(code="roles-contradict", facts=_critic_and_head),
    Rule(code="critic-missing", applies=runs, facts=_no_values),
    Rule(code="roles-contradict", applies=runs, facts=_needless_values),
    Rule(code="roles-contradict", applies=_has_head, facts=_warmup_of_head),
    # reference
    Rule(code="roles-contradict", applies=_shares_actor, facts=_reference_and_shared),
    Rule(code="roles-contradict", applies=_shares_actor, facts=_shared_without_factors),
    Rule(code="roles-contradict", applies=_shares_actor, facts=_refreshed_shared),
    Rule(code="roles-contradict", applies=_refreshed, facts=_refreshed_shape),
    Rule(code="reference-missing", applies=runs, facts=_no_reference),
    Rule(code="roles-contradict", applies=_has_kl, facts=_k1_in_loss),
    Rule(code="roles-contradict", facts=_target_of_nothing),
    # rewards
    Rule(code="roles-contradict", facts=_unnamed_reward),
    Rule(code="unknown-component", facts=_unplaced_rewards),
    Rule(code="roles-contradict", applies=runs, facts=_reward_of_nothing),
    Rule(code="roles-contradict", facts=_function_and_url),
    Rule(code="needs-no-accelerators", facts=_needless_accelerators),
)
