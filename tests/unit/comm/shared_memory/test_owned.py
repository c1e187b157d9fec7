"""Memory of large copies: used again when nothing refers to it any more, and not before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlplace.comm.shared_memory import arena
from rlplace.comm.shared_memory.arena import OwnedMemory

SIZE = 1000


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "LARGE", SIZE)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("made_of", [np.asarray, lambda a: np.ndarray((10,), "<f4", a), torch.frombuffer])
def test_memory_is_used_again_only_when_all_that_was_made_of_it_is_gone(made_of) -> None:  # type: ignore[no-untyped-def]
    memory = OwnedMemory()
    first = memory.take(SIZE)
    at = address(first)
    kept = made_of(first, dtype=torch.uint8) if made_of is torch.frombuffer else made_of(first)
    kept = kept[1:]
    del first
    second = memory.take(SIZE)
    assert address(second) != at
    del kept
    assert address(memory.take(SIZE)) == at


def test_a_block_serves_for_what_is_a_little_smaller_and_not_for_what_is_larger_or_tiny() -> None:
    memory = OwnedMemory()
    at = address(memory.take(SIZE + 100))
    smaller = memory.take(SIZE)
    assert (address(smaller), smaller.nbytes) == (at, SIZE)
    del smaller
    assert memory.take(5 * SIZE).nbytes == 5 * SIZE
    assert len(memory._idle) == 1  # only the last: what did not serve was given up


def test_idle_memory_is_bounded_and_small_memory_is_not_kept() -> None:
    memory = OwnedMemory()
    many = [memory.take(SIZE) for _ in range(5)]
    many.clear()
    assert len(memory._idle) == 2
    few = OwnedMemory()
    few.take(SIZE - 1)
    assert len(few._idle) == 0
