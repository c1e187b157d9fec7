"""The errors of a worker that is asked for something it cannot do now, in the house form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlplace.errors import (
    DivergedError,
    Problem,
    RewardError,
)

if TYPE_CHECKING:
    from rlplace.tokens import Scores


def diverged(
    owner: str, numbers: Mapping[str, float], *, iteration: int, rate: str = "actor.optimizer.lr"
) -> DivergedError:
    """`rate`: key of the learning rate."""
    shown = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
    return DivergedError(
        Problem(
            code="diverged",
            key=owner,
            what=f"the update of iteration {iteration} is not a finite number",
            got=shown,
            why="a reward or observation was not finite, or the policy left the range of its numbers",
            fix=f"{rate}=<smaller>, or look for nan in what the simulator returns",
        )
    )


def score_not_finite(component: str, score: Scores) -> RewardError:
    return RewardError(
        Problem(
            code="score-not-finite",
            key=component,
            what=f"its score of sample {score.sample} of group {score.group} is not a finite number",
            got=str(score.values[:8].tolist()) + (" ..." if len(score.values) > 8 else ""),
            why="nothing can be learned from nan or infinity; its weights are damaged, or overflow in its dtype",
            fix=f"{component}.dtype: fp32, or another model",
        )
    )
