"""What the facts of an episode of verifiers are made of, with stand-ins for the traces of the library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlplace.envs.text.verifiers_library import _facts


def trace(**scores: float | None) -> Any:
    """Return a trace with rewards of weight 2. As in the library, its reward is the sum of those that are there."""
    rewards = {
        name: None if score is None else SimpleNamespace(score=score)
        for name, score in scores.items()
    }
    total = sum(2 * score for score in scores.values() if score is not None)
    return SimpleNamespace(reward=total, rewards=rewards, metrics={"turns": 3})


def test_a_score_is_the_mean_over_the_trained_agents() -> None:
    facts = _facts([trace(right=1.0, form=0.5), trace(right=0.0, form=0.5)])
    assert facts["score"] == pytest.approx(2.0)
    assert facts["parts"] == {"right": 0.5, "form": 0.5}
    assert facts["measures"] == {"turns": 3.0}


def test_a_reward_that_is_missing_is_no_reward_of_0() -> None:
    with pytest.raises(RuntimeError, match="the reward right was not computed"):
        _facts([trace(right=None, form=0.5)])
    with pytest.raises(RuntimeError, match="no agent of the episode is trained"):
        _facts([])
