"""What has no effect in supervised fine-tuning is refused before the start, with a fix that works."""

from __future__ import annotations

import pytest

import rlplace
from rlplace.errors import ProblemsError


@pytest.mark.parametrize(
    ("word", "key", "fix"),
    [
        (
            "+cluster.component_placement.rollout=0",
            "cluster.component_placement.rollout",
            "~cluster.component_placement.rollout",
        ),
        (
            "algorithm.samples_per_prompt=8",
            "algorithm.samples_per_prompt",
            "algorithm.samples_per_prompt=1",
        ),
        (
            "+critic.on_actor=true",
            "critic.on_actor",
            "critic.on_actor=false",
        ),
    ],
)
def test_what_has_no_effect_is_refused_with_a_fix_that_works(
    word: str, key: str, fix: str
) -> None:
    with pytest.raises(ProblemsError) as caught:
        rlplace.plan("sft_tiny", [word])
    (told,) = [p for p in caught.value.problems if p.code == "sft-generates-nothing"]
    assert told.key == key
    assert told.fix is not None
    proposed = told.fix.partition(" " * 8)[0]
    assert proposed == fix
    rlplace.plan("sft_tiny", [word, f"++{proposed}" if "=" in proposed else proposed])
