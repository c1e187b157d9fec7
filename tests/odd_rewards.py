"""Reward functions as users write them, on bad days too.

Each process that grades imports the module of its functions: here, and not in a module of tests, which imports torch.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.envs.text import Transcript


def length(transcript: Transcript, *, times: float = 1.0) -> float:
    return times * len(transcript.answer)


def short(transcript: Transcript) -> float:
    return float(len(transcript.answer) < 5)


def last_digit(transcript: Transcript) -> float:
    return float(transcript.answer[-1])


def same_for_all(transcript: Transcript) -> float:
    return 0.5


def changes_facts(transcript: Transcript) -> float:
    """Add to the facts, and to a list within them, which are those of this function alone."""
    assert isinstance(transcript.facts, dict)
    transcript.facts["answer"] = "changed"
    transcript.facts["hints"].append("more")
    return float(len(transcript.facts["hints"]))


def counts_calls(transcript: Transcript, *, calls: list[str]) -> float:
    """Add to an argument."""
    calls.append("more")
    return float(len(calls))


def lucky(transcript: Transcript) -> float:
    """Draws from the random numbers of Python and NumPy."""
    return random.random() + float(np.random.random())


def process(transcript: Transcript) -> int:
    return os.getpid()


def not_a_number(transcript: Transcript) -> float:
    return float("nan")


def not_a_number_for_a_third(transcript: Transcript) -> float:
    return (
        float("nan")
        if sum(map(ord, transcript.answer)) % 3 == 0
        else len(transcript.answer)
    )


def text(transcript: Transcript) -> Any:
    return "very good"


def long_text(transcript: Transcript) -> Any:
    return 50_000 * "x"


def too_large(transcript: Transcript) -> Any:
    return 10**400


class Odd:
    """As a tensor of several numbers does, and worse."""

    def __float__(self) -> float:
        raise RuntimeError("several numbers")

    def __repr__(self) -> str:
        raise RuntimeError("no words either")


def raises_anything(transcript: Transcript) -> Any:
    return Odd()


def raises_anything_else(transcript: Transcript) -> float:
    raise ConnectionError("the judge is not reached from here")


class Unreached(Exception):
    """An error of a service, with a name by which it looks like one of Python's own."""


Unreached.__module__ = "builtins"
Unreached.__qualname__ = "KeyError"


def raises_alike(transcript: Transcript) -> float:
    raise Unreached("the judge is not reached from here")


class BadReply(ValueError):
    """An error of a library, derived from one of Python's."""


BadReply.__module__ = "builtins"
BadReply.__qualname__ = "ValueError: of a library"


def raises_derived(transcript: Transcript) -> float:
    raise BadReply("the judge answered nonsense")


def raises_long(transcript: Transcript) -> float:
    raise ValueError(50_000 * "x")


def leaves(transcript: Transcript) -> float:
    sys.exit(0)


def closes_its_pipe(transcript: Transcript) -> float:
    os.closerange(3, 1 << 16)
    return 1.0


def raises(transcript: Transcript) -> float:
    return float({}[transcript.answer])


def raises_of_wrong_answers(transcript: Transcript) -> float:
    return float(transcript.answer == transcript.facts["answer"]) or raises(transcript)


def raises_once(transcript: Transcript, *, folder: str) -> float:
    """Fail for each answer the first time that it is seen."""
    seen = Path(folder, transcript.answer)
    known = seen.exists()
    seen.touch()
    return float(known) or raises(transcript)


def hangs(transcript: Transcript) -> float:
    """In C code that lets no other thread run."""
    return float(bool(re.fullmatch(r"(a+)+", "a" * 50 + "b")))


def hangs_on_x(transcript: Transcript) -> float:
    return hangs(transcript) if transcript.answer == "x" else 1.0


def eats_memory(transcript: Transcript) -> float:
    return float(len(bytearray(2 << 30)))


def exits(transcript: Transcript) -> float:
    os._exit(3)


def spelled(
    prompts: list[str], answers: list[str], labels: list[str], bonus: float = 0.0
) -> list[float]:
    """Over lists, as other libraries have it."""
    assert prompts == [f"question {label}" for label in labels]
    return [
        100 * int(label) + len(answer) + bonus
        for answer, label in zip(answers, labels, strict=True)
    ]


def shortness(prompts: list[str], answers: list[str]) -> list[float]:
    return [-float(len(answer)) for answer in answers]


def nothing(prompts: list[str], answers: list[str]) -> Any:
    return None


def too_many(prompts: list[str], answers: list[str]) -> list[float]:
    return [1.0, 2.0]


def relative_length(
    completions: list[list[dict[str, str]]], **columns: object
) -> list[float]:
    """The length reward of open-r1: relative to the shortest and the longest answer."""
    lengths = [len(completion[0]["content"]) for completion in completions]
    if max(lengths) == min(lengths):
        return [0.0] * len(lengths)
    span = max(lengths) - min(lengths)
    return [0.5 - (length - min(lengths)) / span for length in lengths]


def own_length(completions: list[str], **columns: object) -> list[float]:
    """A length reward of each answer by itself."""
    return [-len(completion) / 100 for completion in completions]


def drawn(completions: list[str], **columns: object) -> list[float]:
    """A reward that is another one at each call."""
    return [random.random() for _ in completions]


def one_alone(completions: list[str], **columns: object) -> list[float]:
    """A reward that refuses several answers."""
    if len(completions) > 1:
        raise ValueError("one answer at a time")
    return [1.0]


class RelativeLength:
    """A class with the length reward of open-r1, in the form of OpenRLHF."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self._scale = scale

    def __call__(
        self, queries: list[str], prompts: list[str], labels: list[str]
    ) -> dict[str, list[float]]:
        longest = max(map(len, queries))
        return {"rewards": [self._scale * len(query) / longest for query in queries]}


def how_many(completions: list[str], **columns: object) -> list[float]:
    """The number of answers in the call."""
    return [float(len(completions))] * len(completions)


def compared(completions: list[str], **columns: object) -> list[float]:
    """The share of equal answers in the call, for each answer."""
    return [completions.count(each) / len(completions) for each in completions]


def always_one(completions: list[str], **columns: object) -> list[float]:
    """A list of one, whatever the call has."""
    return [1.0]


def fails_on_x(completions: list[str], **columns: object) -> list[float]:
    """The length of each answer, unless one of them is x."""
    if "x" in completions:
        raise ValueError("one answer is x")
    return [float(len(each)) for each in completions]


def second_is_text(completions: list[str], **columns: object) -> list[object]:
    return [1.0, *["very good" for _ in completions[1:]]]


def places(completions: list[str], **columns: object) -> list[float]:
    """The place of each answer in the call."""
    return [float(place) for place in range(len(completions))]


def process_of_all(completions: list[str], **columns: object) -> list[float]:
    return [float(os.getpid())] * len(completions)


def all_hang(completions: list[str], **columns: object) -> list[float]:
    time.sleep(60)
    return [1.0] * len(completions)


def all_exit(completions: list[str], **columns: object) -> list[float]:
    os._exit(3)
