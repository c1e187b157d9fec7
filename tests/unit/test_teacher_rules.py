"""Jobs that would learn nothing from a teacher are refused before the start."""

from __future__ import annotations

import pytest

import rlplace
from rlplace.errors import ProblemsError

PLACED = "+cluster.component_placement.teacher=2"
OFFLOADED = "+teacher.enable_offload=true"
DISTILL = "algorithm.name=distill"


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        ((DISTILL,), "algorithm.name", "no teacher is placed"),
        ((DISTILL, PLACED, OFFLOADED), "teacher.model", "no model of its own"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(
    words: tuple[str, ...], key: str, text: str
) -> None:
    with pytest.raises(ProblemsError) as caught:
        rlplace.plan("hybrid_grpo_llm", words)
    (told,) = [p for p in caught.value.problems if p.code == "teacher-misfit"]
    assert told.key == key
    assert text in told.render()
