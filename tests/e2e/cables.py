"""Two network namespaces joined by a cable of a chosen bandwidth and delay, which can be cut and mended.

::

    namespace 0 [cable] ══ veth, shaped by tc ═══════ [cable] namespace 1     without a delay, or by netem
    namespace 0 [cable] ── TUN ── process ── TUN ──── [cable] namespace 1     with one where the kernel has no netem

Needs the right to make namespaces (root, or a container that allows it) and iproute2.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests.e2e import delayed_cable
from tests.e2e.delayed_cable import DEVICE, MTU

ADDRESSES = ("10.203.7.1", "10.203.7.2")


class Refused(Exception):
    """This machine lets nobody lay such a cable; the text says why."""


def refusal() -> str | None:
    """Why there are no namespaces on this machine, or None."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs the programs ip and tc"
    name = f"rlp{secrets.token_hex(3)}"
    made = _run("ip", "netns", "add", name)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


class Cable:
    """Laid, with both ends up. `laid` makes it and takes it away."""

    def __init__(
        self, namespaces: Sequence[str], mbit_per_s: int, delay_ms: float
    ) -> None:
        self.namespaces = tuple(namespaces)
        self.mbit_per_s = mbit_per_s
        self.delay_ms = delay_ms  # each way
        self.made_by = ""  # for a report

    def join(self) -> None:
        for namespace in self.namespaces:
            _check("ip", "-n", namespace, "link", "set", DEVICE, "up")

    def cut(self) -> None:
        _check("ip", "-n", self.namespaces[0], "link", "set", DEVICE, "down")


@contextlib.contextmanager
def laid(mbit_per_s: int, delay_ms: float = 0.0) -> Iterator[Cable]:
    """Both hold each way. Raises Refused."""
    why = refusal()
    if why is not None:
        raise Refused(why)
    name = f"rlp{secrets.token_hex(3)}"
    cable = Cable((f"{name}a", f"{name}b"), mbit_per_s, delay_ms)
    with contextlib.ExitStack() as stack:
        for namespace in cable.namespaces:
            _check("ip", "netns", "add", namespace)
            stack.callback(_run, "ip", "netns", "del", namespace)
        if not _shaped(cable):
            stack.enter_context(_carried(cable))
        for namespace, address in zip(cable.namespaces, ADDRESSES, strict=True):
            _check("ip", "-n", namespace, "link", "set", "lo", "up")
            _check("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", DEVICE)
        cable.join()
        yield cable


def _shaped(cable: Cable) -> bool:
    """By the kernel; False, with nothing left, where it cannot delay packets. Raises Refused."""
    first, second = cable.namespaces
    _check(
        "ip",
        "link",
        "add",
        DEVICE,
        "netns",
        first,
        "type",
        "veth",
        "peer",
        "name",
        DEVICE,
        "netns",
        second,
    )
    rate = f"{cable.mbit_per_s}mbit"
    shape = ["tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
    if cable.delay_ms:
        shape = [
            "netem",
            "delay",
            f"{cable.delay_ms}ms",
            "rate",
            rate,
            "limit",
            "20000",
        ]
    for namespace in cable.namespaces:
        made = _run(
            "tc", "-n", namespace, "qdisc", "add", "dev", DEVICE, "root", *shape
        )
        if made.returncode and not cable.delay_ms:
            raise Refused(f"the kernel limits no bandwidth: {made.stderr.strip()}")
        if made.returncode:
            _check("ip", "-n", first, "link", "del", DEVICE)
            return False
    cable.made_by = shape[0]
    return True


@contextlib.contextmanager
def _carried(cable: Cable) -> Iterator[None]:
    """By a process of ours. Raises Refused."""
    command = [
        sys.executable,
        delayed_cable.__file__,
        *cable.namespaces,
        str(cable.mbit_per_s),
        str(cable.delay_ms),
    ]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    with subprocess.Popen(command, text=True, **pipes) as relay:
        try:
            assert relay.stdout is not None
            assert relay.stderr is not None
            if relay.stdout.readline() != "laid\n":
                raise Refused(
                    f"the kernel has neither netem nor TUN devices: {relay.stderr.read().strip()}"
                )
            for namespace in cable.namespaces:
                _check("ip", "-n", namespace, "link", "set", DEVICE, "mtu", str(MTU))
            cable.made_by = "TUN devices"
            yield
        finally:
            relay.kill()


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _check(*command: str) -> None:
    done = _run(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
