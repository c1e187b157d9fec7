"""Rules of jobs that would certainly learn nothing, since all advantages would be zero."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.models.folders import existing_folder

# Algorithms that compare an answer with other answers to the same prompt
_OF_GROUPS = ("grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp_baseline")
# Tasks whose episodes are one conversation each, which has room for `algorithm.longest` tokens
_ONE_CONVERSATION = (
    "arithmetic",
    "prompts",
    "reasoning_gym",
    "guess_number",
    "toy_text",
    "text_arena",
)
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
    if config.has_teacher:
        return
    if config.env.rewards and not any(weights):
        yield Found(key="env.rewards", got="weight: 0", error="no-weight")


def _unreachable_penalty(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding for each `length_penalty` that begins beyond the longest answers: it is 0 for every answer."""
    algorithm = config.algorithm
    # An episode has the sampled tokens of all its turns, and of all conversations of an agent
    most = config.env.max_turns * algorithm.max_new_tokens
    if config.env.max_turns == 1 or config.env.task in _ONE_CONVERSATION:
        most = min(most, algorithm.longest)
    for number, reward in enumerate(config.env.rewards):
        free = reward.kwargs.get("free_tokens")
        if reward.name == "length_penalty" and isinstance(free, int) and free >= most:
            yield Found(
                key=f"env.rewards[{number}].kwargs.free_tokens",
                got=f"free_tokens: {free}",
                error="unreachable-penalty",
                facts={"most": most, "free": most // 2},
            )


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


# ── teacher ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _distills(config: LanguageModelJobConfig) -> bool:
    return config.algorithm.name == "distill"


def _no_teacher(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if the algorithm learns from a teacher alone, and none is placed."""
    if not config.has_teacher:
        yield Found(key="algorithm.name", got="name: distill", error="no-teacher")


def _has_teacher(config: LanguageModelJobConfig) -> bool:
    return config.has_teacher


def _teaches_itself(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if the teacher has the first weights of the actor: both give equal log-probabilities."""
    block = config.teacher.model
    if block is None:
        yield Found(key="teacher.model", got="null", error="no-model")
        return
    policy = existing_folder(config.model)
    if policy is not None and policy == existing_folder(block):
        yield Found(key="teacher.model.path", got=str(policy), error="same-model")


def _drops_groups(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if groups with equal rewards are left out, although the teacher says something of them."""
    if config.algorithm.only_with_signal:
        yield Found(key="algorithm.dynamic_sampling", error="drops-groups")


def _kl_of_rewards(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if a KL penalty is part of the rewards, of which the algorithm makes no use."""
    algorithm = config.algorithm
    if algorithm.kl_coef == 0 or algorithm.kl_in != "reward":
        return
    error = "kl-of-rewards"
    if algorithm.kl_estimator == "k1":
        error = "k1-of-rewards"
    yield Found(key="algorithm.kl_in", got="kl_in: reward", error=error)


RULES: tuple[Rule[LanguageModelJobConfig], ...] = (
    Rule(code="learns-nothing", applies=compares_groups, facts=_one_answer),
    Rule(code="learns-nothing", applies=compares_groups, facts=_equal_answers),
    Rule(code="learns-nothing", facts=_no_weight),
    Rule(code="learns-nothing", facts=_unreachable_penalty),
    Rule(code="bad-comparison", facts=_compared_by),
    Rule(code="teacher-misfit", applies=_distills, facts=_no_teacher),
    Rule(code="teacher-misfit", applies=_has_teacher, facts=_teaches_itself),
    Rule(code="teacher-misfit", applies=_has_teacher, facts=_drops_groups),
    Rule(code="teacher-misfit", applies=_distills, facts=_kl_of_rewards),
)
