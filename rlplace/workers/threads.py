"""The number of torch threads in a worker."""

from __future__ import annotations

import os
import sys

VARIABLE = "OMP_NUM_THREADS"


def threads() -> int:
    """Return how many threads torch may use in a worker: the first number of the variable OMP_NUM_THREADS.

    Return 1 if the variable is missing or does not begin with a number. `cluster.env_vars` of a config can set it.
    """
    # Further numbers are for nested parallel regions.
    first = os.environ.get(VARIABLE, "1").partition(",")[0].strip()
    if first.isdecimal():
        return max(1, int(first))
    return 1


def limit_threads() -> None:
    """Limit torch in the calling thread to `threads()` threads. Do nothing if this process has not imported torch.

    Without the limit, each worker that is a thread would start one torch thread per core, and all these threads would
    take processor time while they wait for each other. torch reads OMP_NUM_THREADS only at its import, and has one
    limit per thread.
    """
    torch = sys.modules.get("torch")
    # Another thread may still be importing it, with the variable as it is now.
    limit = getattr(torch, "set_num_threads", None)
    if limit is not None:
        limit(threads())
