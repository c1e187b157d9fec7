"""Templates on the nodes of a Ray that is joined."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from rlplace.config.blocks.machines import AcceleratorConfig, RayConfig
from rlplace.placement.language.slots import FlexiblePlacementStrategy
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.ray_launch.session import RaySession
from rlplace.workers.ray_launch.templates import Templates
from tests.contract.launch_workers import Probe

pytestmark = [pytest.mark.ray, pytest.mark.slow]
NOWHERE = {"resources": {"no_such_resource": 1}}
TOO_LONG = "x" * 200_000  # for an argument of a program


@pytest.fixture
def joined() -> Iterator[None]:
    session = RaySession(RayConfig())
    session.start()
    yield
    session.close()


@pytest.mark.usefixtures("joined")
def test_a_node_whose_template_fails_stays_without_and_the_others_clean_up() -> None:
    templates = Templates(None)
    templates.start_on({0: {}, 1: NOWHERE}, ["json"], timeout_s=15.0)
    command = templates.command(0)
    assert command is not None
    assert templates.command(1) is None
    assert templates.why_not() == "node 1: no template within 15 s"

    templates.start_on({3: {}}, ["tests.contract.starts_a_thread"], timeout_s=15.0)
    until = time.monotonic() + 30.0
    while "node 3: importing tests.contract.starts_a_thread starts threads (1)" not in (
        templates.why_not() or ""
    ):
        assert time.monotonic() < until
        time.sleep(0.1)

    templates.start_on({0: {}, 1: {}, 2: {}}, [TOO_LONG], timeout_s=30.0)
    assert (templates.command(0), templates.command(1)) == (command, None), (
        "each node is asked once"
    )
    assert templates.command(2) is None
    assert "node 2: OSError: [Errno 7] Argument list too long" in (
        templates.why_not() or ""
    )

    door = Path(command.split()[-1])
    assert door.parent.exists()
    templates.stop()
    assert not door.parent.exists()


@pytest.mark.parametrize(("start", "forks"), [("fork", True), ("plain", False)])
def test_workers_start_as_the_config_says(
    start: Literal["fork", "plain"], forks: bool
) -> None:
    accelerator = AcceleratorConfig(kind="emulated")
    with Cluster(1, 1, accelerator=accelerator, ray=RayConfig(start=start)) as cluster:
        where = FlexiblePlacementStrategy([[0]])
        probe = Probe.create_group("a config").launch(
            cluster, name="probe", placement_strategy=where
        )
        assert probe.rank().wait() == [0]
        assert ("1 fork of" in cluster.describe()) == forks
