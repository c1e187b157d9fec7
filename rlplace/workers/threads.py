"""How many threads torch has in a worker."""

from __future__ import annotations

import os


def threads() -> int:
    """Return OMP_NUM_THREADS, which `cluster.env_vars` can set; 1 if it is not set, since a rank has one core."""
    # The others are of nested regions
    first = os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0].strip()
    if first.isdecimal():
        return max(1, int(first))
    return 1
