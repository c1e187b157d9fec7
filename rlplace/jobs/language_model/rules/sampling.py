"""Rules of sampling settings, of the corrections of the loss that depend on them, and of the limits of lengths."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule, at_key
from rlplace.config.blocks.language_model import LanguageModelJobConfig

# Keys of the correction by truncated importance sampling, with their defaults
_CORRECTION = {"tis_level": "token", "tis_above": "cap", "tis_floor": None}


def _part_of_vocabulary(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding for each of `top_p` and `top_k` that restricts sampling to a part of the vocabulary.

    With such a restriction, the engine's probabilities of the sampled tokens differ from the actor's.
    """
    rollout = config.rollout
    if rollout.top_p < 1:
        yield _narrowed("top_p", rollout.top_p, 1.0)
    if rollout.top_k > 0:
        yield _narrowed("top_k", rollout.top_k, 0)


def _narrowed(name: str, value: float, off: float) -> Found:
    return Found(
        key=f"rollout.{name}",
        got=f"{name}: {value}",
        error="part",
        facts={"name": name, "off": off},
    )


def _penalised(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding for each sampling penalty that is set.

    This rule applies to jobs without importance-sampling correction (`tis_cap`).
    """
    for name, value in config.rollout.penalties.items():
        off: float = 0
        if name == "repetition_penalty":
            off = 1.0
        yield Found(
            key=f"rollout.{name}",
            got=f"{name}: {value}",
            error="penalty",
            facts={"name": name, "off": off},
        )


def _draws(config: LanguageModelJobConfig) -> bool:
    return config.rollout.temperature > 0


def _corrects(config: LanguageModelJobConfig) -> bool:
    return config.algorithm.tis_cap is not None


def _does_not_correct(config: LanguageModelJobConfig) -> bool:
    return config.algorithm.tis_cap is None


def _corrects_nothing(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding for the first of the keys `tis_level`, `tis_above` and `tis_floor` that is set.

    This rule applies to jobs without `tis_cap`, in which these keys of the importance-sampling correction do nothing.
    """
    for name, default in _CORRECTION.items():
        value = getattr(config.algorithm, name)
        if value != default:
            yield Found(key=f"algorithm.{name}", got=f"{name}: {value}", error="no-cap")
            return


def _floor_above_cap(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield findings about a `tis_floor` that is not below `tis_cap`."""
    cap = config.algorithm.tis_cap
    floor = config.algorithm.tis_floor
    if cap is not None and floor is not None and floor >= cap:
        yield Found(
            key="algorithm.tis_floor",
            got=f"{floor:g}",
            error="floor-above-cap",
            facts={"cap": cap, "near": cap / 4},
        )


def _clipped_twice(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield findings about `dual_clip` with the surrogate "cispo", which does not use it."""
    bound = config.algorithm.dual_clip
    if config.algorithm.surrogate == "cispo" and bound is not None:
        yield Found(
            key="algorithm.dual_clip", got=f"dual_clip: {bound:g}", error="cispo"
        )


def _ratio_for_distance(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if the upper clip is probably the ratio itself, such as 1.28, instead of its distance from 1."""
    high = config.algorithm.clip_ratio_high
    if config.algorithm.surrogate == "clip" and high is not None and 1 < high < 2:
        yield Found(
            key="algorithm.clip_ratio_high",
            got=f"clip_ratio_high: {high:g}",
            error="ratio-for-distance",
            facts={"distance": round(high - 1, 6)},
        )


def _shortest_above_longest(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield findings about a minimum length of answers above their maximum length."""
    least = config.rollout.min_tokens
    most = config.algorithm.max_new_tokens
    if least > most:
        yield Found(
            key="rollout.min_tokens",
            got=f"min_tokens: {least}",
            error="min_tokens",
            facts={"most": most},
        )


def _empty_stop(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield findings about an empty text in `rollout.stop`."""
    if "" in config.rollout.stop:
        yield Found(key="rollout.stop", got="''", error="empty")


def _short_sequence(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield findings about a `sequence_length` below the longest prompt and the longest answer together."""
    algorithm = config.algorithm
    least = algorithm.max_prompt_length + algorithm.max_new_tokens
    if algorithm.longest < least:
        yield Found(
            key="algorithm.sequence_length",
            got=f"sequence_length: {algorithm.longest}",
            error="sequence_length",
            facts={"least": least},
        )


def _equal_answers(config: LanguageModelJobConfig) -> Iterator[Found]:
    """Yield a finding if an evaluation asks each prompt several times and gets the same answer each time."""
    runner = config.runner
    temperature = runner.eval_temperature
    key = "runner.eval_temperature"
    if temperature is None:
        temperature = config.rollout.temperature
        key = "rollout.temperature"
    if runner.eval_every and runner.eval_samples > 1 and not temperature:
        yield at_key(
            "runner.eval_samples",
            runner.eval_samples,
            "equal-answers",
            cause=key,
            samples=runner.eval_samples,
        )


RULES: tuple[Rule[LanguageModelJobConfig], ...] = (
    Rule(code="cut-distribution", applies=_draws, facts=_part_of_vocabulary),
    Rule(code="cut-distribution", applies=_does_not_correct, facts=_penalised),
    Rule(code="roles-contradict", applies=_does_not_correct, facts=_corrects_nothing),
    Rule(code="roles-contradict", applies=_corrects, facts=_floor_above_cap),
    Rule(code="roles-contradict", facts=_clipped_twice),
    Rule(code="out-of-bounds", facts=_ratio_for_distance),
    Rule(code="context-too-short", facts=_shortest_above_longest),
    Rule(code="stop-text", facts=_empty_stop),
    Rule(code="context-too-short", facts=_short_sequence),
    Rule(code="evaluation-of-no-use", facts=_equal_answers),
)
