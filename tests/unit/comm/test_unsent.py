"""Values that cannot be sent to another process: the error names the part."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlplace.comm.codec import Packers
from rlplace.errors import NotSent


@dataclasses.dataclass
class Sample:
    """A record of a user."""

    tokens: list[int]
    score: Any = None


def lines() -> Iterator[str]:
    yield "one"


@pytest.mark.parametrize(
    ("value", "part", "kind"),
    [
        (lambda: 3, "item", "function"),
        ((0, lambda: 3), "item[1]", "function"),
        ({"a": 1, "b": [2, threading.Lock()]}, "item['b'][1]", "lock"),
        ([Sample([1], lines())], "item[0].score", "generator"),
    ],
)
def test_the_part_is_named(value: object, part: str, kind: str) -> None:
    packers = Packers(1024)
    with pytest.raises(NotSent) as refused:
        packers.pack(value)
    problem = refused.value.problem
    assert (problem.code, problem.key) == ("not-sent", part)
    assert problem.got is not None
    assert problem.got.startswith(f"{kind}: ")
    assert pickle.loads(pickle.dumps(refused.value)).problem == problem
    assert packers.pack([1, 2])  # the next one is sent
