"""Two machines for a test: network namespaces joined by a cable of a chosen bandwidth, with a Ray node in each."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

RAY = Path(sys.executable).parent / "ray"
START_S = 60.0


def refusal() -> str | None:
    """Why this machine lets nobody make namespaces, or None."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs the programs ip and tc"
    name = f"rlp{os.getpid()}"
    made = _ip("netns", "add", name)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


class Machines:
    """Machine 0 is Ray's head. `inside(n)` is what a command begins with to run on machine n."""

    def __init__(self) -> None:
        self.names = [f"rlp{os.getpid()}-{n}" for n in range(2)]
        self.addresses = ["10.203.77.1", "10.203.77.2"]

    def inside(self, machine: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[machine], "env", "RAY_AUTH_MODE=disabled"]  # nobody else is there

    def on(self, machine: int, *command: str) -> str:
        done = subprocess.run([*self.inside(machine), *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def received_bytes(self, machine: int) -> int:
        """Over the cable, since it was laid."""
        return int(self.on(machine, "cat", "/sys/class/net/cable/statistics/rx_bytes"))


@contextlib.contextmanager
def machines(rate: str) -> Iterator[Machines]:
    """`rate`: of the cable, each way, in the words of tc: "1gbit"."""
    two = Machines()
    try:
        for name in two.names:
            assert _ip("netns", "add", name).returncode == 0
        first, second = two.names
        laid = _ip(
            "link", "add", "name", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second
        )
        assert laid.returncode == 0, laid.stderr
        for n, address in enumerate(two.addresses):
            two.on(n, "ip", "link", "set", "lo", "up")
            two.on(n, "ip", "addr", "add", f"{address}/24", "dev", "cable")
            two.on(n, "ip", "link", "set", "cable", "up")
            two.on(
                n, "tc", "qdisc", "add", "dev", "cable", "root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms"
            )
        yield two
    finally:
        for name in two.names:
            _ip("netns", "del", name)


@contextlib.contextmanager
def ray_nodes(two: Machines) -> Iterator[str]:
    """A Ray of two nodes; its address. Ends both and everything they started."""
    address = f"{two.addresses[0]}:6379"
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(_start(two, 0, ["--head", "--port=6379", "--include-dashboard=false"]))
        _wait(two, address, nodes=1)
        started.append(_start(two, 1, [f"--address={address}"]))
        _wait(two, address, nodes=2)
        yield address
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(two: Machines, machine: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [str(RAY), "start", "--block", "--num-cpus=1", f"--node-ip-address={two.addresses[machine]}"]
    command += ["--disable-usage-stats", "--object-store-memory=100000000", *options]
    silent = subprocess.DEVNULL
    return subprocess.Popen([*two.inside(machine), *command], stdin=silent, stdout=silent, stderr=silent)


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
