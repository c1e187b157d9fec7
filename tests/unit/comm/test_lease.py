"""A lease lends memory as long as its item is used: never shorter, whoever keeps an array, and not longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlplace.comm import codec
from rlplace.comm.channel import Lease
from rlplace.comm.lease import OwnedLease, SlabLease
from rlplace.errors import ChannelMisuse


class Memory:
    """A value in memory that is lent, and how often it was given back."""

    def __init__(self, value: Any) -> None:
        self.pieces = [np.frombuffer(bytearray(piece), np.uint8) for piece in codec.encode(value).pieces]
        self.freed = 0

    def lend(self) -> SlabLease:
        pieces, self.pieces = self.pieces, []
        return SlabLease(pieces, codec.unpack, self.free)

    def free(self) -> None:
        self.freed += 1


ARRAYS: list[Callable[[], Any]] = [
    lambda: np.arange(100),
    lambda: np.arange(6.0).reshape(2, 3).T,
    lambda: torch.arange(100),
    lambda: torch.arange(9, dtype=torch.bfloat16).reshape(3, 3),
]
arrays = pytest.mark.parametrize("array", ARRAYS)


def test_a_released_lease_frees_once_and_has_no_item() -> None:
    memory = Memory({"a": np.arange(3), "b": np.arange(4)})
    lease: Lease = memory.lend()
    assert lease.item["b"].sum() == 6
    lease.item["a"][:] = 7  # writing is allowed
    lease.release()
    lease.release()
    assert memory.freed == 1
    with pytest.raises(ChannelMisuse) as caught:
        _ = lease.item
    assert caught.value.code == "lease-released"


@arrays
def test_release_is_refused_while_an_array_is_kept(array: Callable[[], Any]) -> None:
    memory = Memory([array()])
    lease = memory.lend()
    kept = lease.item[0][1:]  # a view will do
    with pytest.raises(ChannelMisuse) as caught:
        lease.release()
    assert caught.value.code == "lease-in-use"
    assert memory.freed == 0
    assert (np.asarray(kept.tolist()) == np.asarray(array()[1:].tolist())).all()
    del kept
    assert memory.freed == 1
    lease.release()
    assert memory.freed == 1


@arrays
def test_a_lease_that_nobody_releases_frees_with_the_last_array(array: Callable[[], Any]) -> None:
    memory = Memory([array(), array()])
    one, two = memory.lend().item
    del one
    assert memory.freed == 0
    del two
    assert memory.freed == 1


def test_a_cycle_does_not_keep_memory() -> None:
    memory = Memory(np.arange(3))
    lease = memory.lend()
    cycle: list[Any] = [lease.item]
    cycle.append(cycle)
    del cycle
    lease.release()
    assert memory.freed == 1


def test_the_end_of_a_block_releases_and_masks_no_error() -> None:
    memory = Memory(np.arange(3))
    with memory.lend() as lease:
        total = lease.item.sum()
    assert (total, memory.freed) == (3, 1)
    memory = Memory(np.arange(3))
    kept: list[Any] = []

    def fail() -> None:
        with memory.lend() as lease:
            kept.append(lease.item)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert memory.freed == 0
    kept.clear()
    assert memory.freed == 1


def test_a_value_that_cannot_be_decoded_frees_its_memory() -> None:
    freed = []
    with pytest.raises(ZeroDivisionError):
        SlabLease([np.zeros(1, np.uint8)], lambda pieces: 1 / 0, lambda: freed.append(1))
    assert freed == [1]


def test_a_value_without_arrays_frees_at_once() -> None:
    memory = Memory({"text": "x"})
    lease = memory.lend()
    assert memory.freed == 1
    assert lease.item == {"text": "x"}


def test_an_owned_lease_gives_nothing_back_but_its_item() -> None:
    kept = np.arange(3)
    lease: Lease
    with OwnedLease(kept) as lease:
        assert lease.item is kept
    lease.release()
    with pytest.raises(ChannelMisuse):
        _ = lease.item
