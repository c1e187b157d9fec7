"""However learning and generating take turns: no iteration begins with weights that are too old, and none is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_loop_ahead import Stage

ITERATIONS = 8


@given(ahead=st.integers(1, 4), pushes=st.lists(st.booleans(), max_size=60))
def test_staleness_is_bounded_whatever_the_pace(ahead: int, pushes: list[bool]) -> None:
    stage = Stage(ahead=ahead, iterations=ITERATIONS)
    version, learned = 0, 0
    stage.push(version)
    for push in [*pushes, *[True, False] * 2 * ITERATIONS]:
        if not push:
            stage.end()
        elif version in stage.generation.over:  # its samples are there to learn
            learned += 1
            version += 1
            stage.push(version)
    assert learned == ITERATIONS
    held, begun = -1, []
    for call in stage.log:
        if call.startswith("rollout pull_weights"):
            held = int(call.split()[-1])
        elif call.startswith("rollout generate"):
            begun.append(int(call.split()[-1]))
            assert (
                begun[-1] - held <= ahead
            )  # learned by the version of the same number
    assert begun == list(range(ITERATIONS))
