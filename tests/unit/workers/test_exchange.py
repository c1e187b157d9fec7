"""Channels inside arguments are found, and nothing else is touched."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlplace.workers.launch.exchange import exchanged


class Token:
    """Stands for a channel."""


@dataclasses.dataclass(frozen=True)
class Request:
    name: str
    channel: Any


def swapped(value: Any) -> Any:
    return exchanged(value, (Token,), lambda token: "end")


def test_values_are_found_in_containers() -> None:
    assert swapped(Token()) == "end"
    assert swapped(([1, {"a": (Token(), 2)}], Token())) == (
        [1, {"a": ("end", 2)}],
        "end",
    )
    assert swapped([Request("x", [Token()])]) == [Request("x", ["end"])]


def test_what_has_none_stays_the_same_object() -> None:
    for value in (([1, {"a": 2}], "x"), Request("x", [1]), Request, None, {1: [2]}):
        assert swapped(value) is value


def test_a_circle_ends_the_search() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert swapped(circle) is circle
