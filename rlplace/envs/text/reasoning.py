"""Procedurally generated reasoning tasks with their own verifiers, from the library reasoning-gym."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rlplace.envs.registry import missing_library, unknown_choice
from rlplace.envs.text.contract import OneTurn, Split, Transcript

_LOG = logging.getLogger(__name__)

_ENDLESS = 1 << 30  # the library wants a size; an entry is made when it is asked for
_HALF = 1 << 30  # entry i is made from first seed + i: held-out ones begin where training never comes


class ReasoningGym:
    """One dataset of the library by its name, with its own arguments in `options`."""

    rewards: ClassVar[Sequence[str]] = ("reasoning_score",)

    def __init__(self, *, seed: int, split: Split, dataset: str, options: Mapping[str, object] | None = None) -> None:
        try:
            from reasoning_gym import factory
        except ModuleNotFoundError as error:
            if error.name != "reasoning_gym":
                raise
            why, got = "there is no module reasoning_gym", f"reasoning_gym, for {dataset}"
            raise missing_library(why, got=got, extra="text") from error
        if dataset not in factory.DATASETS:
            known = f"it is none of the {len(factory.DATASETS)} datasets of reasoning_gym"
            raise unknown_choice("dataset", dataset, factory.DATASETS, why=known, example="chain_sum")
        first = random.Random(seed).getrandbits(29) + (_HALF if split == "held_out" else 0)
        try:
            self._made = factory.create_dataset(dataset, seed=first, size=_ENDLESS, **(options or {}))
        except AssertionError as error:  # how the library checks its arguments
            raise ValueError(f"{dataset} refuses options: {error}") from error

    @property
    def size(self) -> int | None:
        return None

    def episode(self, number: int) -> OneTurn:
        entry = self._made[number]
        return OneTurn(prompt=entry["question"], known={"answer": str(entry["answer"]), "entry": entry})


def reasoning_score(transcript: Transcript) -> float:
    """Score the last answer by the library's verifier: all of it, or its last <answer></answer>."""
    from reasoning_gym import get_score_answer_fn

    entry = transcript.facts["entry"]
    verify = get_score_answer_fn(entry["metadata"]["source_dataset"])
    tagged = re.findall(r"<answer>(.*?)</answer>", transcript.answer, re.DOTALL)
    try:
        return float(verify(answer=(tagged[-1] if tagged else transcript.answer).strip(), entry=entry))
    except Exception as error:  # noqa: BLE001  # one of a hundred foreign verifiers fails on this answer
        _LOG.warning("an answer scores 0: the verifier of %s raised %r", entry["metadata"]["source_dataset"], error)
        return 0.0
