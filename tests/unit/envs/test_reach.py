"""The shipped task of vision, language and action, and texts among the entries of observations."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Text
from gymnasium.wrappers import DiscretizeAction

from rlplace.envs.entries import Unfit
from rlplace.envs.gymnasium_state import restore, state_of
from rlplace.envs.observations import encoding_of
from rlplace.envs.reach import COLOURS, Nearer, Reach

FOUR = gymnasium.spaces.Dict({"said": Text(4, charset="aé"), "at": Box(0, 1, (1,))})


def test_a_text_becomes_bytes_with_zeros_behind_it() -> None:
    encoding = encoding_of(FOUR)
    assert encoding is not None
    assert [(part.name, part.shape, part.is_text) for part in encoding.parts] == [
        ("at", (1,), False),
        ("said", (8,), True),
    ]
    row = encoding.read({"said": "éa", "at": np.float32([0.5])})
    assert row[:4].view(np.float32).tolist() == [0.5]
    assert row[4:].tobytes() == "éa".encode() + bytes(5)


@pytest.mark.parametrize("said", [5, b"a", "a" * 9, "a\0a", None])
def test_what_is_no_such_text_is_refused(said: object) -> None:
    encoding = encoding_of(FOUR)
    assert encoding is not None
    with pytest.raises(Unfit, match="a text of at most 4 characters of its charset"):
        encoding.read({"said": said, "at": np.float32([0.5])})


def target(env: Reach) -> tuple[np.ndarray, np.ndarray]:
    """Places of the hand and of the named square, read from the picture alone."""
    seen = env._seen()
    colour = next(name for name in COLOURS if name in seen["instruction"])
    alike = (seen["image"] == COLOURS[colour]).all(axis=-1)
    rows, columns = np.nonzero(alike)
    middle = (np.array([columns.mean(), rows.mean()]) + 0.5) / len(alike)
    return seen["state"], middle


@pytest.mark.parametrize("seed", range(5))
def test_a_hand_that_follows_picture_and_instruction_succeeds(seed: int) -> None:
    env = DiscretizeAction(Nearer(Reach(), weight=2.0), 9, multidiscrete=True)
    env.reset(seed=seed)
    task = env.unwrapped
    assert isinstance(task, Reach)
    begun, total = task.distance, 0.0
    for _ in range(10):
        hand, goal = target(task)
        move = np.clip((goal - hand) / 0.2, -1, 1)
        bins = env.revert_action(move)
        assert np.abs(env.action(bins) - move).max() <= 1 / 9 + 1e-6
        seen, reward, ended, cut, _ = env.step(bins)
        assert env.observation_space.contains(seen)
        total += reward
        if ended or cut:
            break
    assert (ended, cut) == (True, False)
    # The reward of success, and all of the way
    assert total == pytest.approx(1 + 2 * (begun - task.distance))


def test_an_episode_ends_unreached_after_its_steps() -> None:
    env = Reach(steps=2)
    env.reset(seed=0)
    still = np.zeros(2, np.float32)
    assert env.step(still)[1:4] == (0.0, False, False)
    assert env.step(still)[1:4] == (0.0, False, True)


def test_an_episode_goes_on_where_it_was_saved() -> None:
    one, other = (DiscretizeAction(Nearer(Reach()), 9, True) for _ in range(2))
    one.reset(seed=1)
    one.step([8, 0])
    other.reset(seed=2)
    assert restore(other, state_of(one))
    for _ in range(3):
        left, right = one.step([8, 8]), other.step([8, 8])
        np.testing.assert_equal(left[0], right[0])
        assert left[1:] == right[1:]
    np.testing.assert_equal(one.reset()[0], other.reset()[0])


@pytest.mark.parametrize("wrong", [{"colours": 0}, {"colours": 4}, {"pixels": 8}])
def test_sizes_that_make_no_task(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="colours"):
        Reach(**wrong)
