"""Results of environments that break their spaces or Gymnasium's interface: refused in words, or read right."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlplace.envs.gymnasium_vector import GymnasiumVector
from rlplace.envs.observations import encoding_of
from rlplace.errors import Problem, SimulatorError
from tests.odd_gyms import BYTES, OBSERVED, RIGHT, Odd

ROWS = 3
# Words of NumPy and Python that are no help
FOREIGN = ("broadcast", "inhomogeneous", "unpack", "ambiguous", "NoneType'", "float()")


def vector(rows: int = ROWS, **odd: Any) -> GymnasiumVector:
    made = [Odd(**odd), *(Odd(odd.get("space", "pair")) for _ in range(rows - 1))]
    return GymnasiumVector(made, max_episode_steps=7, name="odd:Odd")


def played(envs: GymnasiumVector, steps: int = 4) -> list[Any]:
    rows = len(envs._envs)
    results: list[Any] = [envs.reset(list(range(rows)))]
    results += [envs.step(np.zeros(rows, np.int64)) for _ in range(steps)]
    return results


def refused(**odd: Any) -> Problem:
    """The problem of an environment with one fault, alone and beside environments without."""
    found = []
    for rows in (1, ROWS):
        with pytest.raises(SimulatorError) as caught:
            played(vector(rows, **odd))
        found.append(caught.value.problem)
    assert found[0] == found[1]
    text = str(caught.value)
    assert found[0].code == "environment-interface"
    assert "odd:Odd" in text
    assert not any(word in text for word in FOREIGN), text
    return found[0]


@pytest.mark.parametrize(
    ("space", "shown", "got", "expected"),
    [
        ("pair", np.float32(0.3), "float32", "numbers of shape (2,)"),
        ("pair", 0.3, "float 0.3", "numbers of shape (2,)"),
        ("pair", [0.5], "list [0.5]", "numbers of shape (2,)"),
        ("pair", RIGHT[None], "shape (1, 2)", "numbers of shape (2,)"),
        ("pair", np.zeros(3), "float64 array of shape (3,)", "shape (2,)"),
        ("pair", np.zeros((2, 2)), "shape (2, 2)", "shape (2,)"),
        ("pair", [[1.0], [1.0, 2.0]], "list", "shape (2,)"),
        ("pair", [None, 1.0], "list [None, 1.0]", "shape (2,)"),
        ("pair", "ab", "str 'ab'", "shape (2,)"),
        ("pair", np.zeros(2, complex), "complex128", "shape (2,)"),
        ("pair", {"a": RIGHT}, "dict", "shape (2,)"),
        ("pair", (RIGHT, {}), "tuple", "shape (2,)"),
        ("image", np.full((36, 36, 3), 0.5), "float64", "bytes (uint8, 0 to 255)"),
        ("image", BYTES / 255, "from 0.0274", "bytes (uint8, 0 to 255)"),
        ("image", BYTES.astype(int) + 250, "from 257", "bytes"),
        ("image", BYTES.astype(int) - 8, "from -1", "bytes"),
        ("image", BYTES[..., 0], "shape (36, 36)", "shape (36, 36, 3)"),
        ("image", np.moveaxis(BYTES, 2, 0), "shape (3, 36, 36)", "(36, 36, 3)"),
        ("choice", -1, "int -1", "from 0 to 4"),
        ("choice", 5, "int 5", "from 0 to 4"),
        ("choice", 2.7, "float 2.7", "from 0 to 4"),
        ("choice", float("nan"), "float nan", "from 0 to 4"),
        ("choice", np.array([1, 2]), "int64", "from 0 to 4"),
        ("choice", "2", "str '2'", "from 0 to 4"),
        ("from_five", 4, "int 4", "from 5 to 7"),
        ("from_five", 8, "int 8", "from 5 to 7"),
        ("choices", np.array([2, 0]), "from 0 to 2", "to [1, 2]"),
        ("choices", np.array([-1, 0]), "from -1 to 0", "to [1, 2]"),
        ("choices", np.array([0.5, 0.0]), "float64", "to [1, 2]"),
        ("choices", 1, "int 1", "whole numbers of shape (2,)"),
        ("switches", np.array([0, 1, 2]), "from 0 to 2", "zeros and ones"),
        ("switches", 1, "int 1", "zeros and ones"),
        ("nested", {"camera": BYTES}, "entries: camera", "an entry arm.place"),
        ("nested", RIGHT, "float32 array", "an entry arm.place"),
        ("nested", {"arm": {"place": RIGHT}}, "entries: arm", "an entry camera"),
        (
            "nested",
            {"arm": {"place": RIGHT[:1]}, "camera": BYTES},
            "shape (1,)",
            "its entry arm.place should be numbers of shape (2,)",
        ),
        (
            "nested",
            {"arm": {"place": RIGHT}, "camera": BYTES / 255},
            "float64",
            "its entry camera should be bytes",
        ),
        ("tuple", (RIGHT,), "tuple", "a tuple of 2 entries"),
        ("tuple", (RIGHT, 1, 2), "tuple", "a tuple of 2 entries"),
        ("tuple", (RIGHT, 3), "int 3", "its entry 1 should be"),
        ("tuple", 1.0, "float 1.0", "a tuple of 2 entries"),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_observation_that_is_not_in_its_space_is_refused(
    space: str, shown: Any, got: str, expected: str, at: int
) -> None:
    found = refused(space=space, shown=shown, at=at)
    assert ("reset()" if at == 0 else "step()") in found.what
    assert found.got is not None
    assert got in found.got
    assert found.why is not None
    assert expected in found.why


def test_all_rows_with_the_same_wrong_observation_are_refused() -> None:
    """The check of all rows at once may not take several wrong ones for a right one."""
    for wrong in (np.float32(0.3), np.zeros(1), np.zeros((1, 2)), np.zeros(4)):
        envs = GymnasiumVector(
            [Odd(shown=wrong, at=2) for _ in range(2)], max_episode_steps=None
        )
        with pytest.raises(SimulatorError, match="another shape"):
            played(envs)
    images = [Odd("image", shown=BYTES / 255, at=2) for _ in range(2)]
    with pytest.raises(SimulatorError, match="not bytes"):
        played(GymnasiumVector(images, max_episode_steps=None))


@pytest.mark.parametrize(
    ("space", "shown", "same"),
    [
        ("pair", [0.25, -0.25], np.array([0.25, -0.25], np.float32)),
        ("pair", np.array([0.25, -0.25]), np.array([0.25, -0.25], np.float32)),
        ("pair", np.array([1, 0]), np.array([1.0, 0.0], np.float32)),
        ("pair", np.array([True, False]), np.array([1.0, 0.0], np.float32)),
        ("one", 0.5, np.array([0.5], np.float32)),
        ("one", np.array([[0.5]]), np.array([0.5], np.float32)),
        ("scalar", [0.25], np.float32(0.25)),
        ("image", BYTES.astype(np.int64) + 200, BYTES + 200),
        ("image", BYTES.tolist(), BYTES),
        ("choice", np.array([3]), 3),
        ("choice", np.int64(3), 3),
        ("choice", 3.0, 3),
        ("choice", True, 1),
        ("choices", [1.0, 2.0], [1, 2]),
        ("switches", [True, False, True], [1, 0, 1]),
        ("nested", {"arm": {"place": [0.5, -0.5]}, "camera": BYTES, "x": 1}, None),
    ],
)
def test_an_observation_whose_meaning_is_certain_is_read_right(
    space: str, shown: Any, same: Any
) -> None:
    declared, right = OBSERVED[space]
    encoding = encoding_of(declared)
    assert encoding is not None
    expected = encoding.read(right if same is None else same)
    for at in (0, 2):
        first, *steps = played(vector(space=space, shown=shown, at=at))
        assert first.dtype == steps[-1].observations.dtype == encoding.whole.dtype
        assert np.array_equal(steps[-1].observations[0], expected)
        assert at or np.array_equal(first[0], expected)


@pytest.mark.parametrize("space", OBSERVED)
def test_what_is_read_is_what_gymnasium_flattens(space: str) -> None:
    declared, right = OBSERVED[space]
    encoding = encoding_of(declared)
    assert encoding is not None
    if any(part.dtype == "uint8" for part in (encoding.whole, *encoding.parts)):
        return
    flat = gymnasium.spaces.flatten(declared, right)
    assert np.array_equal(np.ravel(encoding.read(right)), np.ravel(flat))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda pair: pair[0],
        lambda pair: pair[0].tolist(),
        lambda pair: (*pair, {}),
        lambda pair: None,
        lambda pair: (pair[0], "info"),
        lambda pair: {"observation": pair[0], "info": {}},
    ],
)
def test_a_reset_that_returns_no_pair_is_refused(wrong: Any) -> None:
    found = refused(first=wrong)
    assert "reset() of odd:Odd did not return (observation, info)" in found.what
    assert found.fix == "return observation, {}"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda five: five[:3],
        lambda five: (*five, 0),
        lambda five: None,
        lambda five: five[0],
        lambda five: (five[0], 1.0, False, None),
        lambda five: (five[0], 1.0, {"a": False}, {}),
    ],
)
@pytest.mark.parametrize("at", [1, 3])
def test_a_step_that_returns_something_else_is_refused(wrong: Any, at: int) -> None:
    assert "step() of odd:Odd did not return" in refused(result=wrong, at=at).what


def test_the_four_values_of_the_old_interface_are_taken_and_told_once() -> None:
    def four(done: bool, info: dict[str, Any]) -> Any:
        return lambda five: (five[0], five[1], done, dict(info))

    for done, info, ends in (
        (False, {}, (False, False)),
        (True, {}, (True, False)),
        (True, {"TimeLimit.truncated": True}, (False, True)),
        (True, {"TimeLimit.truncated": False}, (True, False)),
    ):
        envs = vector(result=four(done, info))
        _, *steps = played(envs, 2)
        for step in steps:
            assert (bool(step.terminated[0]), bool(step.truncated[0])) == ends
        (remark,) = envs.remarks
        assert "four values" in remark
        assert "odd:Odd" in remark


@pytest.mark.parametrize(
    "reward",
    [None, {"score": 1.0}, [1.0, 2.0], np.zeros(0), np.array([None]), 1j, "much"],
)
@pytest.mark.parametrize("at", [1, 3])
def test_a_reward_that_is_not_one_number_is_refused(reward: Any, at: int) -> None:
    if reward is None:
        found = refused(result=lambda five: (five[0], None, *five[2:]), at=at)
    else:
        found = refused(reward=reward, at=at)
    assert "a reward that is not one number" in found.what


@pytest.mark.parametrize(
    "reward",
    [2, True, "2.0", np.float32(2), np.float64(2), np.array(2.0), np.array([2.0])],
)
def test_a_reward_of_one_number_counts_whatever_its_type(reward: Any) -> None:
    for rows in (1, ROWS):
        envs = vector(rows, reward=reward, cut=True)
        result = played(envs, 1)[1]
        assert result.rewards.shape == (rows,)
        assert result.rewards.dtype == np.float32
        assert result.rewards[0] == result.episode_returns[0] == 2.0 - (reward is True)


@pytest.mark.parametrize("name", ["ended", "cut"])
@pytest.mark.parametrize("wrong", [{}, {"a": False}, [], "False", 2, np.array([0, 1])])
def test_an_end_that_is_no_bool_is_refused(name: str, wrong: Any) -> None:
    assert "terminated or truncated" in refused(**{name: wrong}).what


@pytest.mark.parametrize("yes", [True, np.True_, 1, np.array([True]), np.array(1)])
def test_an_end_of_another_type_counts(yes: Any) -> None:
    assert played(vector(ended=yes), 1)[1].terminated.tolist() == [True, False, False]
    assert played(vector(cut=yes), 1)[1].truncated.tolist() == [True, False, False]
    no = {True: None}.get(yes, np.False_) if isinstance(yes, bool) else yes * 0
    assert not played(vector(cut=no), 1)[1].truncated.any()


class NoSeed(Odd):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class NeedsSeed(Odd):
    def reset(self, seed: int) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


class NeedsOptions(Odd):
    def reset(self, *, seed: int | None = None, options: Any) -> Any:
        return super().reset(seed=seed, options=options)


class ByPlace(Odd):
    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


@pytest.mark.parametrize("kind", [NoSeed, NeedsSeed, NeedsOptions])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_reset_with_other_arguments_is_refused(
    kind: type[Odd], wrapped: bool
) -> None:
    env: Any = gymnasium.wrappers.OrderEnforcing(kind()) if wrapped else kind()
    with pytest.raises(SimulatorError) as caught:
        GymnasiumVector([env], max_episode_steps=None, name="odd:Odd")
    found = caught.value.problem
    assert "reset() of odd:Odd cannot be called" in found.what
    assert found.got is not None
    assert f"{kind.__name__}.reset(" in found.got


def test_a_seed_may_be_taken_by_place() -> None:
    played(GymnasiumVector([ByPlace(), ByPlace()], max_episode_steps=None))


class Shared(Odd):
    """All environments show the same array."""

    _array = np.zeros(2, np.float32)

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def _seen(self) -> Any:
        self._array[:] = self._number, self._step
        return self._array[:]


def test_environments_that_share_an_array_keep_their_own_observations() -> None:
    envs = GymnasiumVector([Shared(0), Shared(1), Shared(2)], max_episode_steps=2)
    first, one, two, three = played(envs, 3)
    assert first.tolist() == [[0, 0], [1, 0], [2, 0]]
    assert one.observations.tolist() == [[0, 1], [1, 1], [2, 1]]
    assert two.final_observations.tolist() == [[0, 2], [1, 2], [2, 2]]
    assert two.observations.tolist() == [[0, 0], [1, 0], [2, 0]]
    assert three.observations.tolist() == [[0, 1], [1, 1], [2, 1]]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_numbers_outside_of_their_box_are_told_once(
    at: int, caplog: pytest.LogCaptureFixture
) -> None:
    envs = vector(shown=np.array([0.5, 50.0]), at=at)
    played(envs, 200)
    (remark,) = envs.remarks
    assert "odd:Odd shows numbers outside" in remark
    assert "from -1 to 1 there: 50" in remark
    assert caplog.text.count("outside of its observation_space") == 1


def test_bytes_beside_numbers_are_compared_with_bounds_too() -> None:
    far = {"arm": {"place": np.array([1e8, 0.0])}, "camera": BYTES}
    envs = vector(space="nested", shown=far)
    played(envs)
    (remark,) = envs.remarks
    assert "1e+08" in remark


@pytest.mark.parametrize("space", OBSERVED)
def test_observations_in_their_space_are_not_remarked(space: str) -> None:
    envs = vector(space=space)
    played(envs, 130)
    assert envs.remarks == []
    edge = np.float32(1.0) + np.float32(1e-6)  # rounding
    rounded = vector(shown=np.array([edge, -edge]))
    played(rounded)
    assert rounded.remarks == []


class Stuck(Odd):
    """Cannot be closed."""

    closed = 0

    def close(self) -> None:
        Stuck.closed += 1
        raise RuntimeError("the viewer is gone")


def test_an_environment_that_cannot_be_closed_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    envs = GymnasiumVector([Stuck(), Stuck()], max_episode_steps=None, name="odd:Odd")
    envs.close()
    assert Stuck.closed == 2
    assert "close() of odd:Odd failed" in caplog.text
    assert "RuntimeError: the viewer is gone" in caplog.text


def test_an_error_of_the_environment_itself_is_not_hidden() -> None:
    class Fails(Odd):
        def step(self, action: Any) -> Any:
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        played(GymnasiumVector([Fails()], max_episode_steps=None))


def test_a_space_of_numbers_of_another_type_is_read_as_before() -> None:
    class Whole(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = Box(0, 1 << 40, (2,), np.int64)
            self.action_space = Discrete(2)

        def _seen(self) -> Any:
            return np.array([1 << 33, 5])

    step = played(GymnasiumVector([Whole(), Whole()], max_episode_steps=None))[-1]
    assert step.observations.tolist() == [[float(1 << 33), 5.0]] * 2
