"""A task that a model without any training learns in seconds: to write small letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlplace.envs.text.contract import OneTurn, Split, Transcript

# Overrides: 32 answers of 8 tokens an iteration, to a task that is learned in a few of them.
LEARNABLE = (
    "env.task=tests.e2e.text_tasks:SmallLetters",
    "~env.kwargs",
    "algorithm.prompts=4",
    "algorithm.samples_per_prompt=8",
    "algorithm.max_prompt_length=64",
    "algorithm.max_new_tokens=8",
    "actor.optimizer.lr=5.0e-3",
    "runner.eval_every=0",
    "rollout.kv_cache_memory=4MiB",
)


class SmallLetters:
    """The same prompt every time; what counts is the share of small letters in the answer. Held-out prompts differ."""

    rewards: ClassVar[Sequence[str]] = ("tests.e2e.text_tasks:share_of_small_letters",)

    def __init__(self, *, seed: int, split: Split) -> None:
        self._prompt = "write"
        self._differ = split == "held_out"

    @property
    def size(self) -> int | None:
        return None

    def episode(self, number: int) -> OneTurn:
        if self._differ:
            return OneTurn(prompt=f"{self._prompt} {number}")
        return OneTurn(prompt=self._prompt)


class Twice(SmallLetters):
    """It is asked twice."""

    def episode(self, number: int) -> Repeated:
        return Repeated()


class Repeated:
    """One conversation of two answers."""

    prompt = "write"

    def __init__(self) -> None:
        self._answers = 0

    def reply(self, answer: str) -> str | None:
        self._answers += 1
        return "again" if self._answers == 1 else None

    def facts(self) -> Mapping[str, Any]:
        return {}


def half(transcript: Transcript) -> float:
    """Return the same reward for every answer."""
    return 0.5


def share_of_small_letters(transcript: Transcript) -> float:
    """Bytes that are no text count as one character each."""
    answer = transcript.answer
    return sum("a" <= letter <= "z" for letter in answer) / max(1, len(answer))
