"""Requests, answers and groups of a predicted language-model job, and the lengths that a prediction draws for them."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rlplace.algo.packing import SampleSizes
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.foresight.costs import Costs


class Request(NamedTuple):
    """A request of an env rank for answers. In the first turn it covers all samples of a group, later one sample.

    `asked`: the iteration in which the request is made. `iteration`: the iteration that owns the prompt; it differs
    from `asked` if the prompt was postponed or is asked ahead. `env`: the env rank. `group`: index of the group in
    `iteration`. `first`: index of the first sample in the group. `samples`: count of samples. `turn`: index of the
    turn. `tokens`: tokens of the conversation so far.
    """

    asked: int
    iteration: int
    env: int
    group: int
    first: int
    samples: int
    turn: int
    tokens: int


class Answer(NamedTuple):
    request: Request
    sample: int
    tokens: int


class Graded(NamedTuple):
    """A sample with its reward. `request`: the last request of the sample. `tokens`: its tokens with the prompt."""

    request: Request
    tokens: int


class Group(NamedTuple):
    """A group with all its samples.

    `number`: (iteration that owns the prompt, index of the group in this iteration). `prompt`: tokens of the prompt.
    `tokens`: tokens of each sample, with the prompt.
    """

    number: tuple[int, int]
    prompt: int
    tokens: tuple[int, ...]


class _DrawnFrom(NamedTuple):
    """Everything on which the lengths of an iteration with single turns depend.

    `prompts`, `answers`: measured token counts. `groups`: number of groups. `each`: answers of a group.
    `longest_prompt`, `longest_answer`, `longest`: the most tokens of a prompt, of an answer and of both.
    """

    prompts: tuple[float, ...]
    answers: tuple[float, ...]
    groups: int
    each: int
    longest_prompt: int
    longest_answer: int
    longest: int
    iteration: int


class Lengths:
    """Lengths of prompts, answers and conversations in tokens, and seconds of rewards, for a prediction.

    Each iteration uses quantiles of the measured values, in a random order. The order depends on the number of the
    iteration, but not on the placement.
    """

    def __init__(self, config: LanguageModelJobConfig, costs: Costs) -> None:
        self._costs = costs
        algorithm = config.algorithm
        self._prompts = algorithm.prompts or 1
        self._each = algorithm.samples_per_prompt
        self._longest_answer = algorithm.max_new_tokens
        self._longest = algorithm.longest
        self._longest_prompt = algorithm.max_prompt_length
        self._turns = config.env.max_turns

    def prompt(self, iteration: int, group: int) -> int:
        drawn = self._drawn(
            "env.prompt_tokens", self._longest_prompt, self._prompts, iteration, 0
        )
        return min(drawn[group % len(drawn)], self._longest - 1)

    def turns(self, iteration: int, group: int, sample: int) -> int:
        """Return the number of turns, one answer each, in the episode of a sample."""
        if self._turns > 1:
            return min(
                self._turns,
                self._of("env.turns", self._turns, iteration, group, sample, 0),
            )
        return 1

    def reply(self, iteration: int, group: int, sample: int, turn: int) -> int:
        """Return the number of tokens that the environment replies to the answer of turn `turn`, from 0."""
        return self._of(
            "env.reply_tokens", self._longest_prompt, iteration, group, sample, turn
        )

    def reward_s(self, iteration: int, group: int, sample: int) -> float:
        """Return the seconds from the end of a sample's episode to its reward; 0 if no such seconds were measured."""
        drawn = self._quantiles(
            "env.reward_s", self._prompts * self._each, iteration, 0
        )
        if drawn:
            return drawn[(group * self._each + sample) % len(drawn)]
        return 0.0

    def answer(self, request: Request, sample: int) -> int:
        drawn = self._of(
            "rollout.answer_tokens",
            self._longest_answer,
            request.iteration,
            request.group,
            sample,
            request.turn,
        )
        return max(1, min(drawn, self._longest_answer, self._longest - request.tokens))

    def groups(self, iteration: int) -> Sequence[tuple[Group, tuple[int, ...]]]:
        """Return each group of an iteration with single turns, and the tokens of its answers in their order.

        Predictions of one job share the result, because it does not depend on the placement.
        """
        return _groups(*self._drawn_from(iteration))

    def sizes(self, iteration: int, again: float | None) -> SampleSizes:
        """Return the token counts of all samples of an iteration with single turns, for packing.

        Predictions of one job share the result. `again`: as for `sizes_of`.
        """
        return _sizes(self._drawn_from(iteration), again)

    def _drawn_from(self, iteration: int) -> _DrawnFrom:
        samples = self._costs.profile.samples
        prompts = tuple(samples.get("env.prompt_tokens", ()))
        if not prompts:
            self._costs.missing.setdefault("env.prompt_tokens", self._longest_prompt)
        answers = tuple(samples.get("rollout.answer_tokens", ()))
        if not answers:
            name = "rollout.answer_tokens"
            self._costs.missing.setdefault(name, self._longest_answer)
        return _DrawnFrom(
            prompts,
            answers,
            self._prompts,
            self._each,
            self._longest_prompt,
            self._longest_answer,
            self._longest,
            iteration,
        )

    def _of(
        self,
        name: str,
        unknown: int,
        iteration: int,
        group: int,
        sample: int,
        turn: int,
    ) -> int:
        drawn = self._drawn(name, unknown, self._prompts * self._each, iteration, turn)
        return drawn[(group * self._each + sample) % len(drawn)]

    @functools.lru_cache(maxsize=64)  # noqa: B019  it lives as long as a prediction
    def _drawn(
        self, name: str, unknown: int, count: int, iteration: int, turn: int
    ) -> Sequence[int]:
        drawn = [
            round(value) for value in self._quantiles(name, count, iteration, turn)
        ]
        if not drawn:
            self._costs.missing.setdefault(name, unknown)
        return drawn or [unknown]

    @functools.lru_cache(maxsize=64)  # noqa: B019  the same
    def _quantiles(
        self, name: str, count: int, iteration: int, turn: int
    ) -> Sequence[float]:
        measured = self._costs.profile.samples.get(name, ())
        return _shuffled(tuple(measured), count, f"{name} {iteration} {turn}")


@functools.lru_cache(maxsize=64)
def _shuffled(measured: tuple[float, ...], count: int, seed: str) -> Sequence[float]:
    """Return `count` quantiles of measured values in an order that follows from `seed`; none of no values."""
    ordered = sorted(measured)
    drawn = [
        ordered[int((place + 0.5) / count * len(ordered))]
        for place in range(count)
        if ordered
    ]
    random.Random(seed).shuffle(drawn)
    return drawn


@functools.lru_cache(maxsize=16)
def _groups(
    prompts: tuple[float, ...],
    answers: tuple[float, ...],
    count: int,
    each: int,
    longest_prompt: int,
    longest_answer: int,
    longest: int,
    iteration: int,
) -> Sequence[tuple[Group, tuple[int, ...]]]:
    """Return the groups of an iteration, as `Lengths` draws them: see `Lengths.groups` and `_DrawnFrom`."""
    asked = _shuffled(prompts, count, f"env.prompt_tokens {iteration} 0")
    drawn = _shuffled(answers, count * each, f"rollout.answer_tokens {iteration} 0")
    found = list[tuple[Group, tuple[int, ...]]]()
    for number in range(count):
        prompt = round(asked[number]) if asked else longest_prompt
        prompt = min(prompt, longest - 1)
        most = min(longest_answer, longest - prompt)
        own = drawn[number * each : (number + 1) * each] or [longest_answer] * each
        tokens = tuple(max(1, min(round(answer), most)) for answer in own)
        # Answers of a group that begin together end in the order of their lengths.
        whole = tuple(prompt + answer for answer in sorted(tokens))
        found.append((Group((iteration, number), prompt, whole), tokens))
    return tuple(found)


@functools.lru_cache(maxsize=16)
def _sizes(drawn: _DrawnFrom, again: float | None) -> SampleSizes:
    """Return the token counts of an iteration's samples: see `Lengths.sizes`."""
    return sizes_of(
        ((group.prompt, group.tokens) for group, _ in _groups(*drawn)), again=again
    )


def sizes_of(
    groups: Iterable[tuple[int, Sequence[int]]], *, again: float | None
) -> SampleSizes:
    """Return the token counts of all samples of some groups.

    `groups`: for each group, the number of prompt tokens and the number of tokens of each sample, prompt included.
    `again`: the cost of a shared prompt token for each sample that reads it, as a fraction of the cost of computing a
    token; None: prompts are not shared, so each sample computes its prompt itself.
    """
    whole = [
        (number, prompt, each)
        for number, (prompt, tokens) in enumerate(groups)
        for each in tokens
    ]
    numbers, prompts, tokens = zip(*whole, strict=True) if whole else ((), (), ())
    if again is None:
        return SampleSizes(tokens, groups=numbers)
    return SampleSizes(tokens, prompts, numbers, again)
