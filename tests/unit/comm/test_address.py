"""What an address becomes at a place."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlplace.comm.address import ChannelAddress, Place, ProcessLocation
from rlplace.comm.channel import ChannelSpec


def location(process: str, *keys: str) -> ProcessLocation:
    return ProcessLocation(
        spec=ChannelSpec(name="observations", capacity_items=2, keys=keys),
        node=0,
        process=process,
    )


def address(*locations: ProcessLocation) -> ChannelAddress:
    keys = tuple(key for each in locations for key in each.spec.keys or ())
    spec = ChannelSpec(
        name="observations", capacity_items=2 * len(locations), keys=keys
    )
    return ChannelAddress(spec=spec, locations=locations)


def test_workers_of_one_process_meet_in_its_memory() -> None:
    sent = pickle.dumps(address(location("env+rollout 0", "0")))
    place = Place(node=0, process="env+rollout 0")
    with ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(lambda _: pickle.loads(sent).connect(place), range(8)))
    item = object()
    ends[0].put(item, key="0")
    assert ends[7].get(key="0") is item


def test_each_process_has_its_own_part_and_asks_for_no_other() -> None:
    both = address(location("env+rollout 0", "0"), location("env+rollout 1", "1"))
    ends = [
        both.connect(Place(node=0, process=f"env+rollout {rank}")) for rank in range(2)
    ]
    for rank, end in enumerate(ends):
        end.put(rank, key=str(rank))
    assert [end.get(key=str(rank)) for rank, end in enumerate(ends)] == [0, 1]
    assert ends[0].spec.capacity_items == 4
    with pytest.raises(AssertionError, match=r"env\+rollout 1"):
        ends[0].put("astray", key="1")
