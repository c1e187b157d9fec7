"""Rules of jobs that would certainly learn nothing, since all advantages would be zero."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule
from rlplace.config.blocks.language_model import LanguageModelJobConfig

# Algorithms that compare an answer with other answers to the same prompt
_OF_GROUPS = ("grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp_baseline")
_ENOUGH = 8  # answers to a prompt that a fix proposes


def compares_groups(config: LanguageModelJobConfig) -> bool:
    """Return whether advantages are relative to other answers to the same prompt, by one of the shipped estimators."""
    algorithm = config.algorithm
    return algorithm.name in _OF_GROUPS and algorithm.variant.name is None


def _one_answer(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if each prompt has one answer, which is compared with no other."""
    if config.algorithm.samples_per_prompt == 1:
        yield Found(
            key="algorithm.samples_per_prompt",
            got="samples_per_prompt: 1",
            error="one-answer",
            facts={"name": config.algorithm.name, "enough": _ENOUGH},
        )


def _equal_answers(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if all answers to a prompt are equal, since none is drawn.

    Answers of several turns may differ by the replies, and a judge may give equal answers different rewards.
    """
    rewards = [c for c in config.placed if c.startswith("reward")]
    if config.env.max_turns > 1 or rewards:
        return
    if config.rollout.temperature == 0:
        yield Found(
            key="rollout.temperature",
            got="temperature: 0",
            error="equal-answers",
            facts={"name": config.algorithm.name},
        )


def _no_weight(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if all rewards have the weight 0, so that the sum is 0 for every answer."""
    weights = [reward.weight for reward in config.env.rewards]
    for component in config.placed:
        if component.partition(".")[0] == "reward":
            weights.append(config.reward_of(component).weight)
    # Without functions in the config, those of the task count with the weight 1
    if config.env.rewards and not any(weights):
        yield Found(key="env.rewards", got="weight: 0", error="no-weight")


def _compared_by(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if dynamic sampling compares by a reward that does not exist, or is not in use."""
    algorithm = config.algorithm
    name = algorithm.dynamic_sampling_by
    if name is None:
        return
    key = "algorithm.dynamic_sampling_by"
    if not algorithm.only_with_signal:
        off = {"name": name}
        yield Found(key=key, got=name, error="no-dynamic-sampling", facts=off)
        return
    names = [reward.name.rpartition(":")[2] for reward in config.env.rewards]
    names += [c for c in config.placed if c.partition(".")[0] == "reward"]
    if name not in names:
        known = ", ".join(names) or "none"
        facts = {"name": name, "known": known}
        yield Found(key=key, got=name, error="no-such-reward", facts=facts)


RULES: tuple[Rule[LanguageModelJobConfig], ...] = (
    Rule(code="learns-nothing", applies=compares_groups, facts=_one_answer),
    Rule(code="learns-nothing", applies=compares_groups, facts=_equal_answers),
    Rule(code="learns-nothing", facts=_no_weight),
    Rule(code="bad-comparison", facts=_compared_by),
)
