"""A Ray that asks for a token, as `ray start --head` makes it where there is one; and a home that nobody can write."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.namespaces import RAY
from tests.e2e.training import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow]

UNWRITABLE = "/proc"  # also for root
JOIN = """
import sys
from rlplace.config.blocks.machines import AcceleratorConfig, RayConfig
from rlplace.errors import ClusterError
from rlplace.workers.launch.cluster import Cluster

address = sys.argv[1] if len(sys.argv) > 1 else None
with Cluster(1, 1, accelerator=AcceleratorConfig(kind="emulated"), ray=RayConfig(address=address)) as cluster:
    try:
        cluster.start()
        print(cluster.describe())
    except ClusterError as error:
        print(error.code, error)
"""


def environment(home: Path | str, **more: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_AUTH")
    }
    return kept | {"HOME": str(home)} | more


def join(home: Path | str, *address: str, **more: str) -> tuple[str, str]:
    command = [sys.executable, "-c", JOIN, *address]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(home, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        (Path(folder) / ".ray").mkdir()
        (Path(folder) / ".ray" / "auth_token").write_text("f" * 64, encoding="utf-8")
        yield Path(folder)


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    """A plain `ray start --head` in that home."""
    with started(home) as address:
        yield address


@contextlib.contextmanager
def started(home: Path, **variables: str) -> Iterator[str]:
    """`ray start --head`, until it is left."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        str(RAY),
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--num-cpus=1",
        f"--temp-dir={home}/ray{len(variables)}",
    ]
    command += [
        "--node-ip-address=127.0.0.1",
        "--include-dashboard=false",
        "--object-store-memory=100000000",
    ]
    head = subprocess.Popen(
        command,
        env=environment(home, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert head.stdout is not None
    assert any("Ray runtime started" in line for line in head.stdout)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.communicate(timeout=60)


def test_who_has_the_token_joins_by_host_and_port(home: Path, address: str) -> None:
    out, err = join(home, address)
    assert f"at {address}" in out
    assert err == ""


def test_who_has_none_is_told_where_it_is(home: Path, address: str) -> None:
    out, err = join(UNWRITABLE, address)
    assert out.startswith(
        "cluster-token cluster.ray.address: the Ray cluster asks for a token"
    )
    assert "there is none here" in out
    assert "fix: export RAY_AUTH_TOKEN=$(ssh 127.0.0.1 cat .ray/auth_token)" in out
    assert "InvalidAuthToken" not in err


def test_the_token_of_another_cluster_is_told_from_none(
    home: Path, address: str
) -> None:
    out, _ = join(home, address, RAY_AUTH_TOKEN="0" * 64)
    assert "the one that is here is of another cluster" in out
    out, _ = join(home, address, RAY_AUTH_MODE="disabled")
    assert "fix: export RAY_AUTH_MODE=token" in out


def test_ray_starts_where_home_cannot_be_written() -> None:
    out, err = join(UNWRITABLE)
    assert "started here" in out
    assert err == ""


def test_a_cluster_without_tokens_is_joined_where_there_is_one(home: Path) -> None:
    """Its server calls this process back for each actor, without a token."""
    script = JOIN.replace(
        "print(cluster.describe())",
        """group = Probe.create_group().launch(
            cluster, name="actor", placement_strategy=PackedPlacementStrategy(0, 0)
        )
        print(group.add(3, 4).wait())""",
    )
    script = (
        "import os\n"
        "from rlplace import PackedPlacementStrategy\n"
        "from tests.contract.launch_workers import Probe\n"
        f"{script}\n"
        "print(os.environ.get('RAY_AUTH_MODE'))\n"
    )
    with started(home, RAY_AUTH_MODE="disabled") as address:
        done = subprocess.run(
            [sys.executable, "-c", script, address],
            cwd=ROOT,
            env=environment(home),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    assert done.stdout.splitlines() == ["[7]", "None"], done.stderr
