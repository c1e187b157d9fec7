"""The rule of the pilot: when a run changes its placement, keeps it or goes back. Numbers alone, no run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.foresight.decide import (
    Case,
    Left,
    Level,
    Verdict,
    decide,
    drift,
    judge,
    level_of,
)

QUIET = Level(seconds=1.0, noise=0.0)
WORK = {"rollout": 0.6, "learn": 0.4}


def case(
    *,
    best_s: float = 0.8,
    predicted_s: float = 1.0,
    level: Level = QUIET,
    left: Left | None = None,
    error: float = 0.0,
    cost_s: float = 2.0,
    pay_back: float = 50,
    iterations: int = 1000,
) -> Case:
    return Case(
        level=level,
        predicted_s=predicted_s,
        best_s=best_s,
        left=left,
        work=WORK,
        error=error,
        cost_s=cost_s,
        pay_back=pay_back,
        iterations=iterations,
    )


def test_a_gain_beyond_the_error_that_pays_back_changes_the_placement() -> None:
    found = decide(case())
    assert found.verdict is Verdict.CHANGE
    assert found.gain == pytest.approx(0.2)
    assert found.expected_s == pytest.approx(0.8)
    assert found.pays_back == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (case(best_s=1.0), "no other placement"),
        (case(best_s=1.2), "no other placement"),
        # The model is off by 25 % on the present placement
        (case(best_s=1.0, predicted_s=1.25), "within the error of 25.0%"),
        # An earlier prediction was off by 30 %
        (case(error=0.3), "within the error of 30.0%"),
        (case(level=Level(seconds=1.0, noise=0.19)), "within the error of 21.0%"),
        (case(cost_s=10.1), "pays back in 51 iterations, not in 50"),
        (case(cost_s=9.9, iterations=49), "pays back in 50 iterations, not in 49"),
        (case(left=Left(work=WORK)), "has left this placement"),
    ],
)
def test_the_placement_stays_with_a_reason(of: Case, why: str) -> None:
    found = decide(of)
    assert found.verdict is Verdict.STAY
    assert why in found.why


def test_a_gain_pays_back_in_just_as_many_iterations_as_are_allowed() -> None:
    assert decide(case(cost_s=9.999)).verdict is Verdict.CHANGE
    assert decide(case(cost_s=9.999, pay_back=49)).verdict is Verdict.STAY


def test_without_a_gain_nothing_pays_back() -> None:
    assert decide(case(best_s=1.0)).pays_back == math.inf


def test_a_placement_that_was_left_is_chosen_again_when_the_work_has_changed() -> None:
    grown = Left(work={"rollout": 0.3, "learn": 0.4})
    assert drift(grown.work, WORK) == pytest.approx(0.3 / 0.7)
    assert decide(case(left=grown)).verdict is Verdict.CHANGE
    # By less than the error: it stays away
    assert decide(case(left=grown, error=0.19)).verdict is Verdict.CHANGE
    little = Left(work={"rollout": 0.55, "learn": 0.4})
    assert decide(case(left=little, error=0.19)).verdict is Verdict.STAY


def test_drift_counts_stages_that_change_in_opposite_directions() -> None:
    assert drift({"a": 1.0, "b": 1.0}, {"a": 1.5, "b": 0.5}) == pytest.approx(0.5)
    assert drift({}, {"a": 1.0}) == 0.0


def test_a_slower_placement_is_given_back() -> None:
    found = judge([1.0] * 6, [1.2] * 6, apart=3, least=6)
    assert found.verdict is Verdict.BACK
    assert "slower by 20.0%" in found.why
    assert found.level.seconds == pytest.approx(1.2)


def test_a_faster_placement_is_kept() -> None:
    found = judge([1.0] * 6, [0.8] * 6, apart=3, least=6)
    assert found.verdict is Verdict.KEEP
    assert found.why.startswith("faster by 20.0%")


def test_a_change_is_not_judged_by_too_few_iterations() -> None:
    found = judge([1.0] * 6, [0.5] * 4, apart=3, least=6)
    assert found.verdict is Verdict.WAIT
    assert found.why == "2 more iterations are measured"


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ([2.0, 2.1, 1.9], Verdict.BACK),
        ([2.0, 2.1], Verdict.WAIT),
        # One is as fast as before
        ([2.0, 2.1, 1.0], Verdict.WAIT),
        # Hardly slower than the noise
        ([1.03, 1.03, 1.03], Verdict.WAIT),
    ],
)
def test_a_placement_that_is_clearly_slower_is_given_back_early(
    after: list[float], verdict: Verdict
) -> None:
    assert judge([1.0] * 6, after, apart=3, least=6).verdict is verdict


def test_work_that_grows_does_not_make_a_new_placement_look_slow() -> None:
    """The work grows by 0.02 of the first iteration each time; the new placement takes 0.97 of the old one's seconds.

    It is slower than the old placement was, and faster than the old placement would be.
    """
    before = [1.0 + 0.02 * i for i in range(6)]
    after = [0.97 * (1.0 + 0.02 * i) for i in range(8, 14)]
    assert min(after) > max(before)
    found = judge(before, after, apart=3, least=6)
    assert found.verdict is Verdict.KEEP
    assert found.due_s == pytest.approx(1.0 + 0.02 * 10.5, rel=0.01)
    slower = [1.1 / 0.97 * each for each in after]
    assert judge(before, slower, apart=3, least=6).verdict is Verdict.BACK


def test_noise_is_no_growth_of_the_work() -> None:
    before = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0]
    after = [1.0, 0.95, 1.1, 0.9, 1.05, 1.0]
    found = judge(before, after, apart=3, least=6)
    assert found.verdict is Verdict.KEEP
    assert "within the noise" in found.why


def test_one_slow_iteration_does_not_move_the_level() -> None:
    assert level_of([1.0, 1.0, 9.0, 1.0, 1.0]).seconds == 1.0


def test_growth_of_the_work_is_no_noise() -> None:
    level = level_of([1.0 + 0.05 * i for i in range(8)])
    assert level.seconds == pytest.approx(1.175)
    assert level.noise == pytest.approx(0.0)
    assert level_of([1.0, 1.1, 0.9, 1.05, 0.95, 1.0]).noise > 0.02


# ── noisy work ───────────────────────────────────────────────────────────────────────────────────────────────────────


def flown(
    true_s: Callable[[int, int], float],
    work: Callable[[int], float],
    off: Sequence[float],
    noise: float,
    draw: random.Random,
    searches: int = 40,
    window: int = 6,
) -> tuple[list[int], int]:
    """Let the rule drive a run that starts with placement 0. Return the chosen placements, and the last one.

    `true_s`: (placement, iteration) -> its seconds. `work`: iteration -> size of the work. `off`: factor by which the
    model is off for each placement until the run has had it; then it predicts what it has measured. `noise`: standard
    deviation of measured and predicted seconds, as a share.
    """
    now = 0
    known = {0}
    left: dict[int, Left] = {}
    error = 0.0
    at = 0
    chosen: list[int] = []

    def noisy(seconds: float) -> float:
        return seconds * max(0.5, draw.gauss(1.0, noise))

    def predicted(placement: int) -> float:
        wrong = 1.0 if placement in known else off[placement]
        # From a profile of several iterations
        return true_s(placement, at) * wrong * draw.gauss(1.0, noise / window**0.5)

    for _ in range(searches):
        error /= 2
        measured = [noisy(true_s(now, at + i)) for i in range(window)]
        at += window
        others = {p: predicted(p) for p in range(len(off)) if p != now}
        best = min(others, key=others.__getitem__)
        decision = decide(
            Case(
                level=level_of(measured),
                predicted_s=predicted(now),
                best_s=others[best],
                left=left.get(best),
                work={"all": work(at) * draw.gauss(1.0, noise / window**0.5)},
                error=error,
                cost_s=1.0,
                pay_back=50,
                iterations=1000,
            )
        )
        if decision.verdict is not Verdict.CHANGE:
            continue
        after = [noisy(true_s(best, at + 3 + i)) for i in range(window)]
        judged = judge(measured, after, apart=4, least=window)
        at += window + 3
        known.add(best)
        expected_s = judged.due_s * (1.0 - decision.gain)
        error = max(error, abs(expected_s / judged.level.seconds - 1.0))
        chosen.append(best)
        there = now if judged.verdict is Verdict.KEEP else best
        left[there] = Left(work={"all": work(at)})
        if judged.verdict is Verdict.KEEP:
            now = best
    return chosen, now


@settings(max_examples=150, deadline=None)
@given(
    seconds=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=5),
    off=st.lists(st.floats(0.5, 1.5), min_size=5, max_size=5),
    noise=st.floats(0.0, 0.05),
    seed=st.integers(0, 2**32),
)
def test_stationary_noisy_work_never_oscillates(
    seconds: list[float], off: list[float], noise: float, seed: int
) -> None:
    """However wrong the model is: each placement is tried at most once, and a slower one does not stay."""
    chosen, last = flown(
        lambda placement, _: seconds[placement],
        lambda _: 1.0,
        off[: len(seconds)],
        noise,
        random.Random(seed),
    )
    assert len(chosen) == len(set(chosen))
    # The first placement is left by the first choice that is kept
    assert 0 not in chosen
    allowed = 1.0 + 0.02 + 12 * noise
    assert seconds[last] <= seconds[0] * allowed ** len(chosen)


@settings(max_examples=100, deadline=None)
@given(
    slower=st.lists(st.floats(1.0, 2.0), min_size=1, max_size=4),
    noise=st.floats(0.0, 0.01),
    seed=st.integers(0, 2**32),
)
def test_the_best_placement_stays_under_stationary_work(
    slower: list[float], noise: float, seed: int
) -> None:
    seconds = [1.0, *slower]
    chosen, last = flown(
        lambda placement, _: seconds[placement],
        lambda _: 1.0,
        [1.0] * len(seconds),
        noise,
        random.Random(seed),
    )
    assert (chosen, last) == ([], 0)


def test_work_that_grows_and_shrinks_moves_the_run_there_and_back() -> None:
    """Placement 0 is the best for little generation, placement 1 for much: each border is crossed once."""

    def generation(iteration: int) -> float:
        return 1.0 + 2.0 * max(0.0, 1.0 - abs(iteration - 200) / 200)

    def true_s(placement: int, iteration: int) -> float:
        ranks = (1.0, 3.0)[placement]
        return generation(iteration) / ranks + (0.2, 1.0)[placement]

    chosen, last = flown(
        true_s,
        lambda i: generation(i) + 0.2,
        [1.0, 1.0],
        0.005,
        random.Random(3),
        searches=80,
    )
    assert (chosen, last) == ([1, 0], 0)
