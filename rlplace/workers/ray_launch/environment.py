"""What Ray reads from the environment: some of it when it is imported, some when it starts its processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

# Messages of Ray that say again, at length, what our own errors say, or that fear many small workers.
_QUIET = "worker died or was killed|PYTHON worker processes have been started"

_ALWAYS = {
    "RAY_worker_niceness": "0",  # Ray's default of 15 starves workers on a busy machine
    "OMP_NUM_THREADS": "1",  # parallelism is by processes
    "RAY_USAGE_STATS_ENABLED": "0",  # a run tells nobody about itself
    "RAY_DEDUP_LOGS_SKIP_REGEX": _QUIET,
}
# A Ray that is started here for one run listens on the loopback address: Ray's own switch, whatever its name says.
_STARTED_HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@contextlib.contextmanager
def ray_environment(address: str | None) -> Iterator[None]:
    """Settings for importing and starting Ray (`address` None) or joining one; the user's own settings win."""
    wanted = _ALWAYS if address else _ALWAYS | _STARTED_HERE
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
