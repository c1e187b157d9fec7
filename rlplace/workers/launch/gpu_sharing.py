"""Find out whether two processes of this machine can share GPU memory, as a weight sync that bypasses the host does.

    python -m rlplace.workers.launch.gpu_sharing cuda:0        shares a tensor with a process that it starts

Some containers, sandboxes and drivers refuse sharing, and only a try can tell. The driver process does not import
torch, so the try runs in a process of its own.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping

PROBE_S = 120.0  # two processes import torch and initialize CUDA
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_MODULE = "rlplace.workers.launch.gpu_sharing"
_VALUE = 3.0


def known_obstacle(
    environment: Mapping[str, str] = os.environ, release: str = platform.release()
) -> str | None:
    """Return a reason why processes cannot share GPU memory, or None if these settings give no reason.

    `environment`: environment variables of the processes. `release`: release name of the operating system's kernel.
    """
    for name in _ALLOCATOR:
        if "expandable_segments:true" in environment.get(name, "").lower():
            return f"{name} has expandable_segments, whose memory is shared by a call that many containers refuse"
    if "MIG-" in environment.get("CUDA_VISIBLE_DEVICES", ""):
        return (
            "CUDA_VISIBLE_DEVICES names MIG slices, between which CUDA shares nothing"
        )
    if "microsoft" in release.lower():
        return "this is WSL, where CUDA shares nothing between processes"
    return None


def obstacle(device: str = "cuda:0", deadline_s: float = PROBE_S) -> str | None:
    """Try to share memory of `device` between two processes. Return the reason why this failed, or None if it worked.

    The try takes some seconds, at most `deadline_s`. If `known_obstacle` returns a reason, return it without a try.
    """
    if device.startswith("cuda") and (why := known_obstacle()):
        return why
    tried = subprocess.Popen(
        [sys.executable, "-m", _MODULE, device],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = tried.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        # Kills the process that it started as well.
        os.killpg(tried.pid, signal.SIGKILL)
        tried.communicate()
        return (
            f"two processes were not done with sharing a tensor after {deadline_s:g} s"
        )
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    if tried.returncode == 0:
        return None
    if lines:
        return lines[-1]
    return f"a try ended with {tried.returncode}"


def _share(device: str) -> None:
    import torch

    from rlplace.comm.weights.device_group import share

    tensor = torch.full((4,), _VALUE, device=device)
    note = share(tensor).decode()
    taker = subprocess.run([sys.executable, "-m", _MODULE, device, note], check=False)
    sys.exit(taker.returncode)


def _take(note: str) -> None:
    from rlplace.comm.weights.device_group import open_shared

    found = open_shared(note.encode())
    if found.sum().item() != 4 * _VALUE:
        sys.exit("another process reads something else than what was shared")


if __name__ == "__main__":
    _take(sys.argv[2]) if len(sys.argv) > 2 else _share(sys.argv[1])
