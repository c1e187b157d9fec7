"""Templates on the nodes of a Ray that is joined."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.config.schema import RayConfig
from rlplace.workers.ray_launch.session import RaySession
from rlplace.workers.ray_launch.template import Templates

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
    templates = Templates()
    templates.start_on({0: {}, 1: NOWHERE}, ["json"], timeout_s=4.0)
    command = templates.command(0)
    assert command is not None
    assert templates.command(1) is None
    assert templates.why_not() == "node 1: no template within 4 s"

    templates.start_on({0: {}, 1: {}, 2: {}}, [TOO_LONG], timeout_s=30.0)
    assert (templates.command(0), templates.command(1)) == (command, None), "each node is asked once"
    assert templates.command(2) is None
    assert "node 2: OSError: [Errno 7] Argument list too long" in (templates.why_not() or "")

    door = Path(command.split()[-1])
    assert door.parent.exists()
    templates.stop()
    assert not door.parent.exists()
