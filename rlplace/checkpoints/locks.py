"""Lock files by `flock`, also where the file system has no such locks."""

from __future__ import annotations

import errno
import fcntl
from typing import IO

# Errors of a file system without flock: Lustre without `-o flock`, some FUSE and NFS mounts
_WITHOUT = frozenset(
    {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
)


def lock_file(file: IO[str]) -> OSError | None:
    """Lock an open file for this process, without waiting. The lock ends when the file is closed.

    Return the system's error if the file system has no flock, so that the file is not locked; else None. Raises
    BlockingIOError if another process has locked the file, and other errors as OSError.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _WITHOUT:
            return error
        raise
    return None
