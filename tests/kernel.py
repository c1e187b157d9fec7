"""What the kernel of this machine permits, asked without the code under test: a skip must not hide a fault of it."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys

_LANDLOCK_CREATE_RULESET = 444
_VERSION = 1


@functools.cache
def lacks_namespaces() -> bool:
    """Return whether a process may not make namespaces of its own, with a file system in memory."""
    if shutil.which("unshare") is None:
        return True
    command = ["unshare", "--map-root-user", "--user", "--mount", "--net", "--pid"]
    command += ["--ipc", "--uts", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


@functools.cache
def lacking_layers() -> set[str]:
    """Return the layers around an answer's code that the kernel does not offer, by the names in `confine.LAYERS`."""
    if sys.platform != "linux":
        return {"namespaces", "landlock", "seccomp"}
    lacking = set()
    if lacks_namespaces():
        lacking.add("namespaces")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _VERSION) < 1:
        lacking.add("landlock")
    if not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        lacking.add("seccomp")
    return lacking
