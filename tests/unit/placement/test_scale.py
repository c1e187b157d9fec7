"""Plans of large clusters: the work grows with the accelerators, not with their square."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest

from benchmarks.plan_scale import SHIPPED, plan_shipped, shipped_values
from rlplace.config.read import read_config
from rlplace.errors import ConfigError
from rlplace.placement.flow import DeviceDelivery

_SMALL = 256
_TIMES = 4


def calls_of(act: Callable[[], None]) -> int:
    """Return how many Python functions are called, or generators continued, while `act` runs."""
    found = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("job", SHIPPED)
def test_work_grows_with_the_accelerators(job: str) -> None:
    def planned(values: Mapping[str, Any]) -> int:
        return calls_of(lambda: plan_shipped(values))

    small, large = (shipped_values(job, count) for count in (_SMALL, _SMALL * _TIMES))
    # Imports and caches
    plan_shipped(small)
    assert planned(large) < planned(small) * _TIMES * 1.1


def test_members_of_a_device_sync_are_told_apart_without_their_list() -> None:
    device = DeviceDelivery(
        readers=(0, 1, 2), owners=(4, None, None, 5), actors=6, parts=(1, 2, 1)
    )
    assert [taker.name for taker in device.apart] == [
        "rollout rank 1 part 0",
        "rollout rank 1 part 1",
    ]
    assert [device.owners_of(reader) for reader in range(3)] == [
        (4,),
        (None, None),
        (5,),
    ]
    assert device.grouped
    assert device.grouped is (len(device.group) > 1)
    alone = DeviceDelivery(readers=(0,), owners=(0,), actors=1)
    assert alone.grouped is (len(alone.group) > 1) is False


def test_a_hundred_thousand_accelerators_may_be_declared() -> None:
    nodes = {"count": 12_500, "accelerators": 8}
    cluster = {"num_nodes": 12_500, "nodes": [nodes]}
    placement = {"actor": "all", "env": "all", "rollout": "all"}
    values: dict[str, Any] = {
        "cluster": cluster | {"component_placement": placement},
        "env": {"id": "CartPole-v1", "total_num_envs": 100_000},
    }
    assert read_config(values).cluster.num_nodes == 12_500
    values["cluster"]["num_nodes"] = 40_000
    with pytest.raises(ConfigError, match="32768"):
        read_config(values)
