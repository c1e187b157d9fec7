"""The number of cores that this process may use, by its CPU affinity (`taskset`) and the quotas of its cgroups.

Also how long the machine's processors have worked, and for which processes.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

_NICE = 19
_SLICE_S = 0.02  # of processor time, between two pauses


def use_at_most(share: float) -> None:
    """Let this process use at most a share of a core, and only what other processes leave. Call it in the main thread.

    After each slice of processor time, the main thread sleeps. `share`: above 0; from 1 on, the process never sleeps.
    """
    os.nice(_NICE)
    if share >= 1.0:
        return
    pause_s = _SLICE_S * (1.0 / share - 1.0)
    signal.signal(signal.SIGPROF, lambda *_: time.sleep(pause_s))
    signal.setitimer(signal.ITIMER_PROF, _SLICE_S, _SLICE_S)
    # At its end, Python has no handler any more
    atexit.register(signal.setitimer, signal.ITIMER_PROF, 0.0)


def usable_cores(system: Path = Path("/")) -> int:
    """Return the number of cores that this process may keep busy, rounded down, and at least 1.

    The number is limited by the CPU affinity, which is read each time, and by the quotas of cgroups, which are read
    once. `system`: folder with the folders proc and sys; tests pass another one than `/`.
    """
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), _least_quota(system))))


@functools.cache
def _least_quota(system: Path) -> float:
    return min((quota for quota in _quotas(system) if quota > 0), default=math.inf)


def _quotas(system: Path) -> Iterator[float]:
    """Yield the processor quotas, in cores, of this process's cgroups (version 1 or 2) and of their parent cgroups.

    `system`: folder with the folders proc and sys.
    """
    for line in _text(system / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:  # version 2
            root = system / "sys/fs/cgroup"
            read = _of_version_2
        elif "cpu" in controllers.split(","):
            root = system / "sys/fs/cgroup" / controllers
            read = _of_version_1
            root = root if root.is_dir() else system / "sys/fs/cgroup/cpu"
        else:
            continue
        # A limit of a folder holds for all folders below. In a container, the path may be the host's,
        # and only the root exists
        group = root / path.lstrip("/")
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(root):
                break
            yield from read(folder)


def _of_version_2(folder: Path) -> Iterator[float]:
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if quota.isdecimal() and period.isdecimal():  # "max" is no number
        yield int(quota) / int(period)


def _of_version_1(folder: Path) -> Iterator[float]:
    quota, period = (
        _text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    )
    if quota.isdecimal() and period.isdecimal():  # -1 is no limit
        yield int(quota) / int(period)


def _text(file: Path) -> str:
    """Return the text of a file; "" if the file cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def machine_worked_s(system: Path = Path("/")) -> float | None:
    """Return for how many seconds, in sum, the machine's processors have worked since its start.

    Return None if the value is not known, or if this process may not use all processors: then other work need not slow
    down this process.
    `system`: folder with the folder proc.
    """
    head, _, numbers = _text(system / "proc/stat").partition("\n")[0].partition(" ")
    ticks = [int(number) for number in numbers.split() if number.isdecimal()]
    if head != "cpu" or len(ticks) < 8 or usable_cores(system) != os.cpu_count():
        return None
    user, nice, kernel, _idle, _waiting, interrupts, soft, stolen = ticks[:8]
    worked = user + nice + kernel + interrupts + soft + stolen
    return worked / os.sysconf("SC_CLK_TCK")


def worked_s(processes: Iterable[int], system: Path = Path("/")) -> float:
    """Return the processor seconds of processes and of all that they have started, also of those that have ended.

    `processes`: process ids. `system`: folder with the folder proc.
    """
    # Parent -> children
    children = defaultdict[int, list[int]](list)
    ticks: dict[int, int] = {}
    for file in (system / "proc").glob("[0-9]*/stat"):
        # The name of the program stands in brackets, and may have any characters.
        fields = _text(file).rpartition(")")[2].split()
        if len(fields) < 15:
            continue
        process = int(file.parent.name)
        children[int(fields[1])].append(process)
        ticks[process] = sum(int(field) for field in fields[11:15])
    found = set[int]()
    left = [process for process in processes if process in ticks]
    while left:
        process = left.pop()
        if process not in found:
            found.add(process)
            left += children[process]
    return sum(ticks[process] for process in found) / os.sysconf("SC_CLK_TCK")
