"""What a node holds for a job: its folder, its channels, and their end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import ray

from rlplace.comm.address import NodeLocation, Place
from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.comm.shared_memory.folder import spill_of
from rlplace.config.blocks.machines import CommConfig
from rlplace.errors import ChannelBroken, ClusterError
from rlplace.workers.ray_launch.channels import (
    DRIVER_APART,
    JobChannels,
    NodeChannels,
    make_keys,
)

SPEC = ChannelSpec(name="mail", capacity_items=2)
PATIENCE_S = 30.0


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def node(shm: Path) -> Iterator[NodeChannels]:
    node = NodeChannels(shm)
    yield node
    node.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_end_breaks_the_channels_and_leaves_nothing(shm: Path) -> None:
    before = descriptors()
    node = NodeChannels(shm)
    folder, place = node.folder(), Place(node=0)
    spill = spill_of(folder)
    assert spill is not None
    spill = spill.readlink()
    assert (folder.parent, folder.is_dir(), spill.is_dir()) == (shm, True, True)
    end = NodeLocation(spec=SPEC, node=0, path=node.create(SPEC)).connect(place)
    node.close()
    node.close()
    with pytest.raises(ChannelBroken, match="the cluster was closed"):
        end.get()
    place.ends.close()
    assert list(shm.iterdir()) == []
    assert not spill.exists()
    assert (
        descriptors() <= before
    )  # fewer, where what an earlier test held is collected meanwhile


def test_too_little_shared_memory_is_refused_with_the_size_needed(
    node: NodeChannels,
) -> None:
    node.check(1)
    with pytest.raises(ClusterError, match="docker run --shm-size=") as refused:
        node.check(1 << 60)
    assert refused.value.code == "shm-too-small"
    assert refused.value.problem.key == "cluster.comm.shm_folder"


@pytest.mark.parametrize(
    ("security", "mechanism"), [("encrypted", b"CURVE"), ("password", b"PLAIN")]
)
def test_each_job_has_keys_of_its_own(
    security: Literal["encrypted", "password"], mechanism: bytes
) -> None:
    keys = make_keys(security)
    assert keys.mechanism == mechanism
    assert make_keys(security) != keys


def test_only_the_clusters_own_channels_have_addresses(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here")
    )
    channels = JobChannels(
        [], CommConfig(shm_folder=str(shm)), {}, {}, timeout_s=PATIENCE_S
    )
    own, node = channels.create(SPEC, []), {DRIVER_APART}
    assert channels.addresses_for(node, {"mail": own}).keys() == {"mail"}
    for foreign in (
        ChannelSpec(name="other", capacity_items=2),
        ChannelSpec(name="mail", capacity_items=3),
    ):
        with pytest.raises(ClusterError, match=f"channel {foreign.name}: ") as caught:
            channels.addresses_for(node, {"mail": LocalChannel(foreign)})
        assert caught.value.code == "foreign-channel"
    channels.close()
