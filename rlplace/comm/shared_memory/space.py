"""Room in a folder of shared memory: taken at once and whole, and known to suffice before a job starts."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rlplace.errors import ClusterError, Problem
from rlplace.units import show_bytes

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def allocate(path: Path, size_bytes: int) -> None:
    """Makes the file, for this user alone, with every block taken: using it cannot fail later for want of room.

    OSError (ENOSPC) when there is none; nothing of the file stays then.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """What this user may still take in the file system of `folder`."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def check_space(folder: Path, needed_bytes: int, *, key: str = "cluster") -> None:
    """ClusterError before anything starts, unless `needed_bytes` are free; `key` is the config key that asks for it."""
    if free_bytes(folder) < needed_bytes:
        raise too_small(folder, needed_bytes, key=key)


def too_small(folder: Path, needed_bytes: int, *, key: str = "cluster") -> ClusterError:
    free, mib = free_bytes(folder), -(-needed_bytes // (1 << 20))
    return ClusterError(
        Problem(
            code="shm-too-small",
            key=key,
            what=f"{show_bytes(needed_bytes)} of shared memory are needed on this node, {show_bytes(free)} are free",
            got=str(folder),
            why="items between processes of one node lie in shared memory, up to the capacity of their channel",
            fix=f"docker run --shm-size={mib}m (Kubernetes: an emptyDir with medium: Memory at {folder})",
        )
    )
