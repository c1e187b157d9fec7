"""The folder in shared memory with everything of one job on one node. It is removed when its owner ends.

::

    /dev/shm/rlplace-1000-k3v9x2a1/       mode 0700; two jobs never share one
        owner                             locked by the owner as long as it lives; the kernel unlocks it when it dies
        spill ──▶ /tmp/rlplace-1000-...   a folder on disk for what does not fit, made when it is needed
        segments/psm_0f3a ...             empty files: names in /dev/shm that libraries have taken for the job
        *.channel, arena, ...             files of the packages that use the folder
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rlplace.codes import problem
from rlplace.errors import ClusterError
from rlplace.units import show_bytes

SHARED_MEMORY = Path("/dev/shm")
SPILL = "spill"
SEGMENTS = "segments"
# Shared memory of vLLM's processes: multiprocessing's (memory, semaphores), and that of sums on a CPU
_TAKEN = re.compile(
    r" (?:/dev/shm/)((?:psm_|sem\.mp-|vllm_dist_)[^/\n ]*)$", re.MULTILINE
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OWNER = "owner"
LONGEST_SOCKET = 107  # bytes of a socket's path on Linux
_SOCKET = "12345678/calls-12345678"  # path of a worker's socket, behind the prefix of a job folder's name
_KEY = "cluster.comm.shm_folder"


class JobFolder:
    """A job folder in shared memory, as its owner has it. `close` removes the folder.

    Only the owner has this object; other processes get the path of the folder. `lock`: descriptor of the locked file
    that marks the folder as owned.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock
        self._process = os.getpid()

    @classmethod
    def create(cls, parent: Path | None = None) -> JobFolder:
        """Remove job folders of dead owners from `parent`, and make and return a new job folder in it.

        `parent`: None means /dev/shm. Raise ClusterError if `parent` is missing or not writable, or if its path is too
        long for sockets in the job folder.
        """
        parent = parent or SHARED_MEMORY
        longest = LONGEST_SOCKET - len(f"/{_prefix()}{_SOCKET}")
        # Workers' sockets lie in the folder
        if len(os.fsencode(parent)) > longest:
            raise ClusterError(
                problem(
                    "long-folder",
                    _KEY,
                    str(parent),
                    error="shared-memory",
                    longest_socket=LONGEST_SOCKET,
                    name=_KEY,
                    shared_memory=SHARED_MEMORY,
                    longest=longest,
                )
            )
        try:
            # Folders of dead owners first, which may have filled the memory
            sweep(parent)
            lock = None
            # The sweep of another process may remove a folder before its owner has locked it
            while lock is None:
                # A new folder, whose lock marks it as owned
                path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=parent))
                lock = _lock_of(path)
                if lock is not None and not (path / _OWNER).exists():
                    os.close(lock)
                    lock = None
            (path / SPILL).symlink_to(Path(tempfile.gettempdir()) / path.name)
        except OSError as error:
            raise ClusterError(
                problem(
                    "shm-folder",
                    _KEY,
                    str(parent),
                    error="not-made",
                    reason=error.strerror or error,
                    name=_KEY,
                    shared_memory=SHARED_MEMORY,
                )
            ) from error
        return cls(path, lock)

    def close(self) -> None:
        """Remove the folder with its content. Idempotent.

        Memory that a process still maps is freed when this process ends.
        """
        if self._lock is None:
            return
        # A forked child must not end its parent's job
        if os.getpid() == self._process:
            _remove(self.path)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> JobFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def spill_of(folder: Path) -> Path | None:
    """Return the path of the folder on disk that belongs to a job folder; make the folder on disk if it does not exist.

    Return None if it cannot be made or belongs to another user.
    """
    link = folder / SPILL
    try:
        os.mkdir(os.readlink(link), 0o700)
    except FileExistsError:
        pass
    except OSError:
        return None
    # Any user may make folders in /tmp
    if link.stat().st_uid == os.getuid():
        return link
    return None


def claim(folder: Path, pids: Iterable[int]) -> None:
    """Register the files in /dev/shm that libraries have made in some processes. `pids`: the processes.

    The files are removed together with the job folder `folder`. If the processes are killed, the libraries do not
    remove their files themselves.
    """
    for pid in pids:
        # It has ended
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps")
            text = maps.read_text(encoding="utf-8", errors="replace")
            for name in _TAKEN.findall(text):
                (folder / SEGMENTS).mkdir(mode=0o700, exist_ok=True)
                (folder / SEGMENTS / name).touch()


def sweep(parent: Path) -> None:
    """Remove the job folders of this user in `parent` whose owners are dead."""
    for path in parent.glob(f"{_prefix()}*"):
        lock = _lock_of(path)
        if lock is not None:
            _remove(path)
            os.close(lock)


def _lock_of(path: Path) -> int | None:
    """Acquire the lock of a job folder and return its file descriptor.

    Return None if the owner of the folder lives, or if `path` is not a folder of this user.
    """
    try:
        # Any user may put folders of any name there
        if path.is_symlink() or path.stat().st_uid != os.getuid():
            return None
        lock = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (
        FileNotFoundError,
        NotADirectoryError,
    ):  # another process removes it at this moment
        return None
    try:
        # A lock that is held means that the owner lives
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _remove(path: Path) -> None:
    """Remove a job folder, its folder on disk, and the registered shared memory of libraries."""
    link = path / SPILL
    # Never made, or on a disk that is gone
    with contextlib.suppress(OSError):
        # Only a folder of the same name, so that a changed link removes nothing else
        spill = link.readlink()
        if spill.name == path.name and not spill.is_symlink():
            shutil.rmtree(spill, ignore_errors=True)
    for segment in (path / SEGMENTS).glob("*"):
        (SHARED_MEMORY / segment.name).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _prefix() -> str:
    """Return the prefix of the names of this user's job folders."""
    return f"rlplace-{os.getuid()}-"


def allocate(path: Path, size_bytes: int) -> None:
    """Create a file of `size_bytes` bytes, with all blocks allocated and access for this user only.

    If this is not possible, remove the file and raise OSError, such as ENOSPC.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Now, since a write to unallocated memory that is full ends the process
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still allocate in the file system of `folder`."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise ClusterError unless `needed_bytes` are free in the file system of `folder`."""
    if free_bytes(folder) < needed_bytes:
        raise too_small(folder, needed_bytes)


def too_small(folder: Path, needed_bytes: int) -> ClusterError:
    """Return the error for a file system of `folder` with less than `needed_bytes` free."""
    free = free_bytes(folder)
    mib = -(-needed_bytes // (1 << 20))
    return ClusterError(
        problem(
            "shm-too-small",
            _KEY,
            str(folder),
            needed=show_bytes(needed_bytes),
            free=show_bytes(free),
            mib=mib,
            folder=folder,
        )
    )
