"""Scores as they are gathered: in any order and pieces, each once, and what is missing or wrong by its name."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.local import LocalChannel
from rlplace.errors import ChannelMisuse, ChannelTimeout, RewardError
from rlplace.tokens import Sample, Scores
from rlplace.workers.training.samples import gather_scores
from tests.lm_ranks import made_up_samples

SCORERS = ("reference", "reward.math")


def everything() -> list[Sample]:
    return [sample for group in made_up_samples() for sample in group]


def said(judge: str, sample: Sample, **other: object) -> Scores:
    size = 1 if judge.startswith("reward") else sample.response_tokens
    facts = {"group": sample.group, "sample": sample.sample, "values": np.full(size, sample.sample, np.float32)}
    return Scores(**{**facts, **other})  # type: ignore[arg-type]


def channels() -> dict[str, LocalChannel]:
    return {
        f"scores.{judge}": LocalChannel(ChannelSpec(name=f"scores.{judge}", capacity_items=64)) for judge in SCORERS
    }


def gathered(made: dict[str, LocalChannel], judges: tuple[str, ...] = SCORERS) -> dict[str, list[np.ndarray]]:
    return gather_scores(made, judges, everything(), "actor rank 0", timeout_s=0.01)


def test_scores_come_in_any_order_and_pieces() -> None:
    made, samples = channels(), everything()
    for judge in SCORERS:
        for start in (6, 9, 0, 3):
            made[f"scores.{judge}"].put(tuple(said(judge, s) for s in reversed(samples[start : start + 3])))
    found = gathered(made)
    assert list(found) == list(SCORERS)
    for judge in SCORERS:
        for sample, values in zip(samples, found[judge], strict=True):
            assert values.tolist() == said(judge, sample).values.tolist()


def test_whose_scores_are_missing_is_said() -> None:
    made, samples = channels(), everything()
    made["scores.reference"].put(tuple(said("reference", s) for s in samples[:-2]))
    with pytest.raises(ChannelTimeout, match="for reference to score 2 of 12 samples") as caught:
        gathered(made)
    assert caught.value.code == "scores-missing"
    assert "no scores of 2/2, 2/3 " in str(caught.value)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_score_that_is_no_number_names_who_gave_it(wrong: float) -> None:
    made, samples = channels(), everything()
    values = np.array([wrong], np.float32)
    made["scores.reward.math"].put((said("reward.math", samples[5], values=values),))
    with pytest.raises(RewardError, match=r"reward\.math") as caught:
        gathered(made, ("reward.math",))
    assert caught.value.code == "score-not-finite"


@pytest.mark.parametrize(
    ("scores", "what"),
    [
        (lambda s: (said("reference", s), said("reference", s)), "reference scored what it was not asked for"),
        (lambda s: (said("reference", s, group=9),), "reference scored what it was not asked for"),
        (lambda s: (said("reference", s, values=np.zeros(99, np.float32)),), "another number of scores"),
    ],
    ids=["twice", "unknown", "length"],
)
def test_scores_of_something_else_are_refused(scores: object, what: str) -> None:
    made, samples = channels(), everything()
    made["scores.reference"].put(scores(samples[0]))  # type: ignore[operator]
    with pytest.raises(ChannelMisuse, match=what) as caught:
        gathered(made, ("reference",))
    assert caught.value.code == "out-of-step"
