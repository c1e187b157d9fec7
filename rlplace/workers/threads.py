"""The number of torch threads in a worker."""

from __future__ import annotations

import os
import sys

VARIABLE = "OMP_NUM_THREADS"


def threads() -> int:
    """Return the number of torch threads for a worker: the first number of the variable OMP_NUM_THREADS.

    Return 1 if the variable is missing or has another form. `cluster.env_vars` of a config can set the variable.
    """
    # Further numbers are for nested parallel regions.
    first = os.environ.get(VARIABLE, "1").partition(",")[0].strip()
    if first.isdecimal():
        return max(1, int(first))
    return 1


def limit_threads() -> None:
    """Limit torch in the calling thread to `threads()` threads, if this process has imported torch already.

    Without a limit, each worker that is a thread starts one torch thread per core, and these threads wait for each
    other busily. torch reads OMP_NUM_THREADS once, at its import, and keeps one limit for each thread.
    """
    torch = sys.modules.get("torch")
    # Another thread may still be importing it, with the variable as it is now.
    limit = getattr(torch, "set_num_threads", None)
    if limit is not None:
        limit(threads())
