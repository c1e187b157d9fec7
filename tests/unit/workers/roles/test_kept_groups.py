"""Groups that were generated ahead, to files and back, whatever rank wrote them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from rlplace.envs.text import Transcript
from rlplace.errors import ConfigError
from rlplace.tokens import Sample
from rlplace.workers.roles.kept_groups import Group, read, write


def sample(group: int, number: int, reward: float = 0.1) -> Sample:
    length = 3 + number
    return Sample(
        group=group,
        sample=number,
        tokens=np.arange(length, dtype=np.int32) + group,
        mask=np.arange(length) > 1,
        logprobs=-np.arange(length, dtype=np.float32) / 3,
        versions=np.full(length, group, np.int32),
        reward=reward,
        rewards={"one": reward, "two": 1 / 3},
        turns=2,
        truncated=number == 1,
        # The first one has two conversations
        parts=(2, 1) if number == 0 else (),
        transcript=Transcript(
            prompt="what",
            answers=("a", "b"),
            replies=("\u2026",),
            facts={"x": {1}},
            tokens=length - 2,
            truncated=False,
        ),
    )


def group(number: int) -> Group:
    return sample(number, 0), sample(number, 1, math.nan)


def alike(one: Sample, other: Sample, *left_out: str) -> bool:
    names = [
        field.name
        for field in dataclasses.fields(Sample)
        if field.name not in ("rewards", *left_out)
    ]
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    pairs += [(one.rewards[name], other.rewards[name]) for name in one.rewards]
    arrays = [(np.asarray(a), np.asarray(b)) for a, b in pairs]
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in arrays
        if a.dtype != object
    ) and all(a == b for a, b in pairs if isinstance(a, Transcript))


def test_groups_come_back_equal_to_the_bit_in_their_order(tmp_path: Path) -> None:
    kept = {5: [group(1), group(0)], 6: [group(0)]}
    assert write(tmp_path, range(2), "asked", kept, text=False) == [
        "groups_00000-00001.npz"
    ]
    found = read(tmp_path, range(2), "asked")
    assert {i: list(groups) for i, groups in found.items()} == {5: [1, 0], 6: [0]}
    for iteration, groups in kept.items():
        for whole in groups:
            back = found[iteration][whole[0].group]
            assert len(back) == 2
            assert all(
                alike(*pair, "transcript") for pair in zip(back, whole, strict=True)
            )
            assert back[0].transcript is None


def test_texts_are_kept_where_they_are_read(tmp_path: Path) -> None:
    write(tmp_path, range(1), "asked", {5: [group(0)]}, text=True)
    (back, _) = read(tmp_path, range(1), "asked")[5][0]
    assert back.transcript == dataclasses.replace(
        sample(0, 0).transcript, prompt="", facts={}
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_reads_what_another_wrote(
    tmp_path: Path, ranks: int
) -> None:
    for blocks in (range(2), range(2, 6), range(6, 6)):
        write(
            tmp_path,
            blocks,
            "asked",
            {7: [group(number) for number in blocks]},
            text=False,
        )
    each = 6 // ranks
    found = [
        read(tmp_path, range(first, first + each), "asked")
        for first in range(0, 6, each)
    ]
    assert [number for kept in found for number in kept[7]] == list(range(6))


def test_nothing_is_taken_where_something_else_is_asked(tmp_path: Path) -> None:
    write(tmp_path, range(1), "asked", {5: [group(0)]}, text=False)
    assert read(tmp_path, range(1), "asked otherwise") == {}
    assert write(tmp_path, range(1), "asked", {}, text=False)
    assert read(tmp_path, range(1), "asked") == {}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (name,) = write(tmp_path, range(1), "asked", {5: [group(0)]}, text=False)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-30])
    with pytest.raises(ConfigError) as error:
        read(tmp_path, range(1), "asked")
    assert error.value.codes == ("checkpoint-damaged",)
    assert name in str(error.value)


def test_routes_come_back_and_a_sample_without_them_has_unknown_ones(
    tmp_path: Path,
) -> None:
    one, failed = group(0)
    routes = np.arange(3 * 2 * 2, dtype=np.int16).reshape(3, 2, 2) + 200
    kept = {5: [(dataclasses.replace(one, routes=routes), failed)]}
    write(tmp_path, range(1), "asked", kept, text=False)
    back, other = read(tmp_path, range(1), "asked")[5][0]
    assert back.routes is not None
    assert back.routes.dtype == np.int16
    assert np.array_equal(back.routes, routes)
    assert other.routes is not None
    assert other.routes.shape == (4, 2, 2)
    assert (other.routes == -1).all()
