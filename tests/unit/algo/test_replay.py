"""The replay memory against plain lists of steps: rings, n-step sums, ends of episodes, priorities, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.algo import replay
from rlplace.algo.priorities import Priorities
from rlplace.algo.replay import ReplayMemory, SavedRows, Steps
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.placement.memory.replay import replay_bytes

GAMMA = 0.9


def memory(slots: int = 6, rows: int = 2, **more: Any) -> ReplayMemory:
    return ReplayMemory(
        slots=slots,
        rows=rows,
        observation_shape=(1,),
        observation_dtype=np.float32,
        action_shape=(),
        action_dtype=np.int64,
        **more,
    )


def steps(count: int, rows: int, first: int = 0, seed: int = 0) -> Steps:
    """Steps whose observation is 100 x row + number of the step, with random ends."""
    random = np.random.default_rng([seed, first])
    numbers = first + np.arange(count)[:, None] + 100.0 * np.arange(rows)
    ended = random.random((count, rows)) < 0.15
    cut = ~ended & (random.random((count, rows)) < 0.15)
    return Steps(
        observations=numbers[..., None].astype(np.float32),
        actions=numbers.astype(np.int64),
        rewards=random.normal(size=(count, rows)).astype(np.float32),
        terminated=ended,
        truncated=cut,
        next_observations=(numbers + 0.5)[..., None].astype(np.float32),
        begins=np.zeros(rows, np.bool_),
    )


def plain(all_steps: list[Steps], row: int, at: int, n: int) -> tuple[float, ...]:
    """(sum of rewards, discount, next observation) of n steps, from lists without a ring."""
    lists = {
        name: np.concatenate([s.arrays[name][:, row] for s in all_steps])
        for name in ("rewards", "terminated", "truncated", "next_observations")
    }
    total, discount = 0.0, 1.0
    for t in range(at, min(at + n, len(lists["rewards"]))):
        total += discount * float(lists["rewards"][t])
        discount *= GAMMA
        after = float(lists["next_observations"][t, 0])
        if lists["terminated"][t]:
            return total, 0.0, after
        if lists["truncated"][t]:
            break
    return total, discount, after


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("pieces", [(4,), (4, 4), (5, 5, 5, 2), (9,)])
@pytest.mark.parametrize("exponent", [None, 0.6])
def test_samples_are_those_of_plain_lists(
    n: int, pieces: tuple[int, ...], exponent: float | None
) -> None:
    kept = memory(exponent=exponent)
    added = []
    for count in pieces:
        added.append(steps(count, 2, first=sum(len(s.rewards) for s in added)))
        kept.add(added[-1])
    total = sum(pieces)
    batch = kept.sample(200, np.random.default_rng(0), n_step=n, gamma=GAMMA)
    seen = set()
    for i in range(200):
        row, at = divmod(int(batch["observations"][i, 0]), 100)
        seen.add((row, at))
        found = (
            batch["rewards"][i],
            batch["discounts"][i],
            batch["next_observations"][i, 0],
        )
        assert found == pytest.approx(plain(added, row, at, n), abs=1e-5)
        assert batch["actions"][i] == 100 * row + at
    # All steps that are still there are drawn, and no other
    assert seen == {(r, t) for r in range(2) for t in range(max(0, total - 6), total)}
    assert len(kept) == len(seen)


def test_a_row_that_begins_anew_does_not_go_on_from_its_last_step() -> None:
    kept = memory(rows=1)
    quiet = steps(2, 1)
    quiet.terminated[:] = quiet.truncated[:] = False
    kept.add(quiet)
    after = steps(2, 1, first=2)
    after.terminated[:] = after.truncated[:] = False
    after.begins[:] = True
    kept.add(after)
    batch = kept.sample(50, np.random.default_rng(0), n_step=3, gamma=GAMMA)
    for seen, found in zip(
        batch["observations"], batch["next_observations"], strict=True
    ):
        # Steps 0 and 1 end with step 1, whose value counts on
        assert float(found[0]) == (1.5 if seen[0] < 2 else 3.5)
    assert (batch["discounts"] > 0).all()


def test_equal_seeds_draw_equal_samples_and_ranks_draw_others() -> None:
    kept = memory(slots=50)
    kept.add(steps(50, 2))
    drawn = [
        kept.sample(20, np.random.default_rng([7, rank]), n_step=1, gamma=GAMMA)
        for rank in (0, 0, 1)
    ]
    assert np.array_equal(drawn[0]["observations"], drawn[1]["observations"])
    assert not np.array_equal(drawn[0]["observations"], drawn[2]["observations"])


def test_prioritised_draws_follow_the_errors() -> None:
    kept = Priorities(5, exponent=1.0)
    kept.add(np.arange(5))
    errors = np.array([1.0, 0.0, 3.0, 0.5, 0.5])
    kept.change(np.arange(5), errors)
    drawn, chances = kept.draw(50_000, np.random.default_rng(0))
    shares = np.bincount(drawn, minlength=5) / 50_000
    assert shares == pytest.approx(errors / errors.sum(), abs=1e-3)
    assert chances == pytest.approx((errors / errors.sum())[drawn], abs=1e-5)
    # One step of which all is known is drawn no more
    kept.change(np.array([2]), np.array([0.0]))
    drawn, _ = kept.draw(1000, np.random.default_rng(0))
    assert 2 not in drawn


def test_of_equal_steps_the_last_error_counts_and_weights_correct_for_the_draws() -> (
    None
):
    kept = memory(slots=4, rows=1, exponent=1.0, correction=1.0)
    kept.add(steps(4, 1))
    kept.change_priorities(
        np.array([0, 1, 2, 3, 0]), np.array([9.0, 1.0, 1.0, 2.0, 4.0])
    )
    batch = kept.sample(4000, np.random.default_rng(0), n_step=1, gamma=GAMMA)
    shares = np.bincount(batch["steps"], minlength=4) / 4000
    assert shares == pytest.approx([0.5, 0.125, 0.125, 0.25], abs=0.01)
    # Weights of memories with other priorities are comparable
    chances = np.array([0.5, 0.125, 0.125, 0.25])
    assert batch["weights"] == pytest.approx(1 / (4 * chances[batch["steps"]]))
    # The mean over weighted draws is that over all steps alike
    weights = np.bincount(batch["steps"], weights=batch["weights"], minlength=4)
    assert weights / weights.sum() == pytest.approx([0.25] * 4, abs=0.01)


@pytest.mark.parametrize("exponent", [None, 0.6])
def test_a_saved_memory_draws_the_same_samples(
    tmp_path: Path, exponent: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "SEGMENT_SLOTS", 4)
    kept = memory(slots=10, exponent=exponent)
    for first in (0, 8):
        kept.add(steps(8, 2, first=first))
    if exponent is not None:
        kept.change_priorities(np.arange(5), np.arange(5.0))
    names = kept.write(tmp_path, "memory")
    assert sorted(names) == sorted(file.name for file in tmp_path.iterdir())
    # Three segments, and all else
    assert len(names) == 4
    other = memory(slots=10, exponent=exponent)
    other.read(tmp_path, [SavedRows(name="memory", count=2, rows=slice(0, 2))])
    for each in (kept, other):
        each.add(steps(1, 2, first=16))
    drawn = [
        each.sample(30, np.random.default_rng(1), n_step=2, gamma=GAMMA)
        for each in (kept, other)
    ]
    for name, array in drawn[0].items():
        assert np.array_equal(array, drawn[1][name]), name


@pytest.mark.parametrize("exponent", [None, 0.6])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_saved_memory_is_dealt_to_another_number_of_ranks(
    tmp_path: Path, exponent: float | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two memories of three rows each become `ranks` memories of the same six rows."""
    monkeypatch.setattr(replay, "SEGMENT_SLOTS", 4)
    given = steps(14, 6)
    errors = np.arange(60.0).reshape(10, 6)
    for rank in range(2):
        rows = slice(3 * rank, 3 * rank + 3)
        kept = memory(slots=10, rows=3, exponent=exponent)
        kept.add(given.of_rows(rows))
        if exponent is not None:
            kept.change_priorities(np.arange(30), errors[:, rows].ravel())
        kept.write(tmp_path, f"memory_{rank}")
    each = 6 // ranks
    for rank in range(ranks):
        whole = memory(slots=10, rows=each, exponent=exponent)
        rows = slice(each * rank, each * (rank + 1))
        whole.add(given.of_rows(rows))
        if exponent is not None:
            whole.change_priorities(np.arange(10 * each), errors[:, rows].ravel())
        parts = []
        for saved in range(2):
            first = max(rows.start - 3 * saved, 0)
            last = min(rows.stop - 3 * saved, 3)
            if first < last:
                part = SavedRows(
                    name=f"memory_{saved}", count=3, rows=slice(first, last)
                )
                parts.append(part)
        other = memory(slots=10, rows=each, exponent=exponent)
        other.read(tmp_path, parts)
        drawn = [
            one.sample(30, np.random.default_rng(1), n_step=2, gamma=GAMMA)
            for one in (whole, other)
        ]
        for name, array in drawn[0].items():
            assert np.array_equal(array, drawn[1][name]), name


def test_files_of_another_number_of_rows_are_refused(tmp_path: Path) -> None:
    """One of two files is lost, and the other has one row: it must not stand for both rows."""
    kept = memory(slots=10, rows=1)
    kept.add(steps(8, 1))
    kept.write(tmp_path, "memory")
    other = memory(slots=10)
    with pytest.raises(ValueError, match="memory has 1 rows, not 2"):
        other.read(tmp_path, [SavedRows(name="memory", count=2, rows=slice(0, 2))])
    with pytest.raises(ValueError, match="other numbers of steps"):
        other.read(tmp_path, [])


def test_only_segments_with_new_steps_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "SEGMENT_SLOTS", 4)
    kept = memory(slots=12)
    kept.add(steps(5, 2))
    before = kept.written
    kept.add(steps(4, 2, first=5))
    changed = [kept.changed_since(segment, before) for segment in kept.segments()]
    assert changed == [False, True, True]
    # The ring has come round: all slots are new
    kept.add(steps(12, 2, first=9))
    assert all(kept.changed_since(segment, before) for segment in kept.segments())


@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize(
    "actions",
    [
        DiscreteActions(n=3),
        ContinuousActions(shape=(2, 3), low=(-1,) * 6, high=(1,) * 6),
    ],
)
def test_the_plan_counts_the_bytes_that_the_memory_has(
    prioritised: bool, actions: DiscreteActions | ContinuousActions
) -> None:
    spaces = Spaces(observation_shape=(17,), actions=actions)
    continuous = isinstance(actions, ContinuousActions)
    kept = ReplayMemory(
        slots=100,
        rows=3,
        observation_shape=spaces.observation_shape,
        observation_dtype=spaces.observation_dtype,
        action_shape=actions.shape if isinstance(actions, ContinuousActions) else (),
        action_dtype=np.float32 if continuous else np.int64,
        exponent=0.6 if prioritised else None,
    )
    assert kept.nbytes == replay_bytes(spaces, 300, prioritised=prioritised)
