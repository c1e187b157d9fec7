"""The garbage collector is paused for a simulation, and is afterwards as it was before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from rlplace.foresight.collector import paused_collector


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


class Node:
    """An object that refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_made_meanwhile_is_collected_at_the_end() -> None:
    with paused_collector():
        assert not gc.isenabled()
        made = weakref.ref(Node())
        assert made() is not None
    assert gc.isenabled()
    assert made() is None


def test_an_error_ends_the_pause() -> None:
    with pytest.raises(ValueError, match="in a simulation"), paused_collector():
        raise ValueError("in a simulation")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()
