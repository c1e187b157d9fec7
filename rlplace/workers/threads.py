"""The number of torch threads in a worker."""

from __future__ import annotations

import os
import sys

VARIABLE = "OMP_NUM_THREADS"


def threads() -> int:
    """Return the first number of OMP_NUM_THREADS, which `cluster.env_vars` can set; by default 1, as a rank has one
    core.
    """
    # Further numbers are for nested parallel regions.
    first = os.environ.get(VARIABLE, "1").partition(",")[0].strip()
    if first.isdecimal():
        return max(1, int(first))
    return 1


def limit_threads() -> None:
    """Give torch the number of `threads()` in the calling thread, if this process has imported torch already.

    Without a limit, each worker that is a thread starts as many threads of its own as there are cores, and these wait
    for each other busily. torch reads OMP_NUM_THREADS once, when it is imported, and keeps the number by thread.
    """
    torch = sys.modules.get("torch")
    # Another thread may still be importing it, with the variable as it is now.
    limit = getattr(torch, "set_num_threads", None)
    if limit is not None:
        limit(threads())
