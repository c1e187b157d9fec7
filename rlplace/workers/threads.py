"""The number of torch threads in a worker."""

from __future__ import annotations

import os


def threads() -> int:
    """Return the first number of OMP_NUM_THREADS, which `cluster.env_vars` can set; by default 1, as a rank has one
    core.
    """
    # Further numbers are for nested parallel regions.
    first = os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0].strip()
    if first.isdecimal():
        return max(1, int(first))
    return 1
