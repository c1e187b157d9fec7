"""What critics, references and rewards said of an iteration's samples, gathered by rank 0 of the actor.

::

    scores.critic    ──▶ ┐
    scores.reference ──▶ ├ each sample once from each of them, of the right length, finite ──▶ by component, in order
    scores.reward    ──▶ ┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlplace.comm.channel import Channel
from rlplace.errors import ChannelTimeout, Problem
from rlplace.placement.language.spec import role_of
from rlplace.tokens import Sample, Scores
from rlplace.workers.arguments import scores_of
from rlplace.workers.refusals import score_not_finite
from rlplace.workers.training.samples import TokenArray
from rlplace.workers.worker import out_of_step

# All who score have come back before the loop asks for their scores: only the network is still to be waited for.
DEADLINE_S = 60.0


def gather_scores(
    channels: Mapping[str, Channel],
    judges: Sequence[str],
    samples: Sequence[Sample],
    owner: str,
    timeout_s: float = DEADLINE_S,
) -> dict[str, list[TokenArray]]:
    """By component what it says of each of `samples`, in their order.

    Raises ChannelTimeout, which says whose scores are missing for which samples; RewardError for a number that is none;
    ChannelMisuse for scores that are not of these samples.
    """
    return {judge: _gather(channels[scores_of(judge)], judge, samples, owner, timeout_s) for judge in judges}


def _gather(channel: Channel, judge: str, samples: Sequence[Sample], owner: str, timeout_s: float) -> list[TokenArray]:
    missing = {(sample.group, sample.sample): sample for sample in samples}
    found: dict[tuple[int, int], TokenArray] = {}
    while missing:
        try:
            item: Sequence[Scores] = channel.get(timeout_s=timeout_s)
        except ChannelTimeout as error:
            raise _missing(owner, judge, list(missing), len(samples), timeout_s) from error
        for scores in item:
            place = scores.group, scores.sample
            sample = missing.pop(place, None)
            if sample is None:
                got, due = f"scores of sample {place[0]}/{place[1]}", "each sample of this iteration once"
                raise out_of_step(owner, f"{judge} scored what it was not asked for", got=got, expected=due)
            found[place] = _checked(owner, judge, scores, sample)
    return [found[sample.group, sample.sample] for sample in samples]


def _checked(owner: str, judge: str, scores: Scores, sample: Sample) -> TokenArray:
    due = 1 if role_of(judge) == "reward" else sample.learned
    values = np.asarray(scores.values, np.float32)
    if values.shape != (due,):
        got, expected = f"an array of shape {values.shape}", f"{due} for sample {sample.group}/{sample.sample}"
        raise out_of_step(owner, f"{judge} gave another number of scores", got=got, expected=expected)
    if not np.isfinite(values).all():
        raise score_not_finite(judge, scores)
    return values


def _missing(
    owner: str, judge: str, missing: Sequence[tuple[int, int]], samples: int, timeout_s: float
) -> ChannelTimeout:
    shown = ", ".join(f"{group}/{sample}" for group, sample in missing[:8]) + ", ..." * (len(missing) > 8)
    return ChannelTimeout(
        Problem(
            code="scores-missing",
            key=scores_of(judge),
            what=f"{owner} waited {timeout_s:g} s for {judge} to score {len(missing)} of {samples} samples",
            got=f"no scores of {shown}   (group/sample)",
            why=f"{judge} has said that it is done, and every sample needs its scores before anything is learned",
            fix=f"look at what {judge} logged: it must put scores of every sample it is given",
        )
    )
