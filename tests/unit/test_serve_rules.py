"""What has no effect in a training API is refused before the start, with a fix that works."""

from __future__ import annotations

import pytest

import rlplace
from rlplace.errors import ProblemsError


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (
            ["+cluster.component_placement.reference=0"],
            "cluster.component_placement.reference",
            "~cluster.component_placement.reference",
        ),
        (
            ["+algorithm.samples_per_prompt=8"],
            "algorithm.samples_per_prompt",
            "algorithm.samples_per_prompt=1",
        ),
        (["+actor.sync.mode=delta"], "actor.sync.mode", "actor.sync.mode=all"),
        (
            ["cluster.component_placement.env=0-1"],
            "cluster.component_placement.env",
            "cluster.component_placement.env=cpu",
        ),
        (["serve.turn_s=1000"], "serve.turn_s", "serve.turn_s=900"),
    ],
)
def test_what_has_no_effect_is_refused_with_a_fix_that_works(
    words: list[str], key: str, fix: str
) -> None:
    with pytest.raises(ProblemsError) as caught:
        rlplace.plan("serve_tiny", words)
    (told,) = [p for p in caught.value.problems if p.code == "serve-asks-nothing"]
    assert told.key == key
    assert told.fix is not None
    proposed = told.fix.partition(" " * 8)[0]
    assert proposed == fix
    rlplace.plan(
        "serve_tiny", [*words, f"++{proposed}" if "=" in proposed else proposed]
    )
