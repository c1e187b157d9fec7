"""Two machines for a test: network namespaces joined by a cable of a chosen bandwidth, with a Ray node in each."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e import cables
from tests.e2e.cables import Cable
from tests.e2e.delayed_cable import DEVICE

RAY = Path(sys.executable).parent / "ray"
START_S = 60.0


class Machines:
    """Machine 0 is Ray's head. `inside(n)` is what a command begins with to run on machine n."""

    def __init__(self, cable: Cable) -> None:
        self.cable = cable

    def inside(self, machine: int) -> list[str]:
        nobody_else = "RAY_AUTH_MODE=disabled"
        return [
            "ip",
            "netns",
            "exec",
            self.cable.namespaces[machine],
            "env",
            nobody_else,
        ]

    def on(self, machine: int, *command: str) -> str:
        done = subprocess.run(
            [*self.inside(machine), *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def received_bytes(self, machine: int) -> int:
        """Over the cable, since it was laid."""
        return int(
            self.on(machine, "cat", f"/sys/class/net/{DEVICE}/statistics/rx_bytes")
        )


@contextlib.contextmanager
def machines_with_ray(
    mbit_per_s: int, delay_ms: float = 0.0
) -> Iterator[tuple[Machines, str]]:
    """Both of a cable of so much each way, with a Ray of both; its address. Ends all that they started.

    Skips the test where this machine refuses what `cables` needs.
    """
    with contextlib.ExitStack() as stack:
        try:
            two = Machines(stack.enter_context(cables.laid(mbit_per_s, delay_ms)))
        except cables.Refused as why:
            pytest.skip(str(why))
        address = f"{cables.ADDRESSES[0]}:6379"
        roles = (
            ["--head", "--port=6379", "--include-dashboard=false"],
            [f"--address={address}"],
        )
        for machine, options in enumerate(roles):
            stack.callback(_end, _start(two, machine, options))
            _wait(two, address, nodes=machine + 1)
        yield two, address


def _end(node: subprocess.Popen[bytes]) -> None:
    node.terminate()
    try:
        node.wait(20.0)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()


def _start(
    two: Machines, machine: int, options: Sequence[str]
) -> subprocess.Popen[bytes]:
    command = [
        str(RAY),
        "start",
        "--block",
        "--num-cpus=1",
        f"--node-ip-address={cables.ADDRESSES[machine]}",
    ]
    command += ["--disable-usage-stats", "--object-store-memory=100000000", *options]
    silent = subprocess.DEVNULL
    return subprocess.Popen(
        [*two.inside(machine), *command], stdin=silent, stdout=silent, stderr=silent
    )


_COUNT = """
import sys, time, ray
deadline = time.monotonic() + float(sys.argv[3])
while True:
    try:
        ray.init(address=sys.argv[1], logging_level="ERROR")
        if sum(node["Alive"] for node in ray.nodes()) == int(sys.argv[2]):
            break
        ray.shutdown()
    except (ConnectionError, RuntimeError):
        pass
    if time.monotonic() > deadline:
        sys.exit("the nodes did not come up")
    time.sleep(0.5)
"""


def _wait(two: Machines, address: str, *, nodes: int) -> None:
    two.on(0, sys.executable, "-c", _COUNT, address, str(nodes), str(START_S))
