"""Confines a process by means of the Linux kernel, so that the process reaches nothing outside of its folder.

There are four layers, each used where the system allows it:

- namespaces: no other process is visible, and the folder is a small disk in memory;
- Landlock: files outside of the folder and of the Python installation cannot be opened;
- seccomp: no processes, threads, sockets and signals;
- limits of time, memory and files.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable

# Everything that `confine` can put in force
LAYERS = ("namespaces", "landlock", "limits", "seccomp")
# Bytes of each file, and of all files together
FILE_BYTES = 16 << 20
DISK_BYTES = 64 << 20
_FILES = 4096
_NOBODY = 65534
_OPEN_FILES = 64

# prctl(2)
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_GET_SECCOMP = 21
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
# capset(2): linux/capability.h
_CAPABILITIES_V3 = 0x20080522
# unshare(2) and mount(2)
_NEWNS = 0x00020000
_NEWIPC = 0x08000000
_NEWUSER = 0x10000000
_NEWPID = 0x20000000
_MS_NOSUID_NODEV = 2 | 4
_MS_PRIVATE_ALL = (1 << 18) | (1 << 14)
# landlock(7): the numbers of the calls are equal on all processors
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_LANDLOCK_READ = (1 << 0) | (1 << 2) | (1 << 3)
_LANDLOCK_ON_FILES = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14)
# Bits of file access that each version of Landlock knows, from version 1 on
_LANDLOCK_BITS = (13, 14, 15, 15, 16)
# seccomp(2): machine -> architecture, and number of each denied call
_X86, _ARM = "x86_64", "aarch64"
_ARCHITECTURE = {_X86: 0xC000003E, _ARM: 0xC00000B7}
_NO_PROCESS = {
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "clone3": (435, 435),
}
_DENIED = {
    # other programs and other processes
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # leaving the session, the parent or the user
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "prctl": (157, 167),
    "setuid": (105, 146),
    "setreuid": (113, 145),
    "setresuid": (117, 147),
    "setfsuid": (122, 151),
    "setgid": (106, 144),
    "setregid": (114, 143),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "capset": (126, 91),
    "unshare": (272, 97),
    "setns": (308, 268),
    "personality": (135, 92),
    # network, and memory that no limit counts
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # file systems
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    # parts of the kernel that a program of exercises does not need
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
# (call numbers, index of the argument, values of the argument that are denied; None: all but 0)
_DENIED_WITH = (
    ((302, 261), 0, None),  # prlimit64 of another process
    ((72, 25), 1, (8, 10, 15)),  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX
    ((16, 29), 1, (0x8901, 0x8902)),  # ioctl: FIOSETOWN, SIOCSPGRP
)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide_memory() -> None:
    """Forbid other processes of the same user to read the memory and the open files of this process."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def confine(folder: str, memory_bytes: int, cpu_s: float) -> list[str]:
    """Confine this process and return the layers that are in force. The layers cannot be lifted again.

    The process must have one thread only. It may be replaced by a child: then the parent waits for the child, and ends
    with its exit status. `folder`: absolute path of the only folder that can be written; it becomes the working folder.
    `memory_bytes`: most bytes of memory. `cpu_s`: most seconds of processor time.
    """
    layers: list[str] = []
    os.chdir(folder)
    if sys.platform == "linux":
        die_with_parent()
        # Root has no limit of processes in a namespace of its own, so something else must have one
        if (os.geteuid() != 0 or _can_filter()) and _in_namespaces(folder):
            layers.append("namespaces")
        _drop_root()
        _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if _landlocked(folder):
            layers.append("landlock")
    _limit(memory_bytes, cpu_s)
    layers.append("limits")
    if sys.platform == "linux" and _can_filter() and _filtered():
        layers.append("seccomp")
    return layers


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _limit(memory_bytes: int, cpu_s: float) -> None:
    """Limit this process in memory, processor time, files and processes."""
    seconds = int(cpu_s) + 1
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_NPROC, 1),  # no further process or thread
    ):
        resource.setrlimit(what, (most, most))


def _in_namespaces(folder: str) -> bool:
    """Continue as the first process of new namespaces, with a small disk in memory as `folder`.

    Return False, with nothing changed, where the system does not allow it.
    """
    libc = _libc()
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_NEWUSER | _NEWNS | _NEWPID | _NEWIPC) != 0:
        return False
    # One user and one group exist inside: those of this process
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_NOBODY} {user} 1"),
        ("gid_map", f"{_NOBODY} {group} 1"),
    ):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    # The new process namespace begins with the next child
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    # Where a disk cannot be mounted, the folder stays a folder of the outer disk
    libc.mount(b"none", b"/", None, _MS_PRIVATE_ALL, None)
    options = f"size={DISK_BYTES},nr_inodes={_FILES},mode=700"
    libc.mount(b"tmpfs", folder.encode(), b"tmpfs", _MS_NOSUID_NODEV, options.encode())
    os.chdir(folder)
    return True


def _drop_root() -> None:
    """Drop all capabilities. A process of root changes its real user, since root is exempt from the limit of processes.

    The effective user stays, so that an interpreter in root's folders can still be read.
    """
    if os.geteuid() == 0:
        os.setresuid(_NOBODY, 0, 0)
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    nothing = bytes(24)
    if _libc().capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _landlocked(folder: str) -> bool:
    """Allow writing in `folder` alone, and reading in `folder` and in the Python installation alone.

    Return False where the kernel has no Landlock.
    """
    libc = _libc()
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    every = (1 << _LANDLOCK_BITS[min(version, len(_LANDLOCK_BITS)) - 1]) - 1
    # Files; from version 4 on TCP; from version 6 on abstract sockets and signals
    attributes = struct.pack("=Q", every)
    if version >= 4:
        attributes += struct.pack("=Q", 3)
    if version >= 6:
        attributes += struct.pack("=Q", 3)
    rules = libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        return False
    devices = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
    allowed = [(path, _LANDLOCK_READ) for path in _readable()]
    allowed += [(path, (1 << 1) | (1 << 2)) for path in devices]
    allowed.append((folder, every))
    for path, access in allowed:
        _allow(libc, rules, path, access & every)
    done = libc.syscall(_LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return bool(done)


def _allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    """Add a path with the allowed access to Landlock rules. A path that does not exist is left out."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        access &= _LANDLOCK_ON_FILES
    libc.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", access, opened), 0)
    os.close(opened)


def _readable() -> Iterable[str]:
    """Return the paths that a Python program needs to read: the system's libraries and the Python installation."""
    system = ("/usr", "/lib", "/lib64", "/bin", "/opt")
    settings = (
        "/etc/ld.so.cache",
        "/etc/localtime",
        "/etc/mime.types",
        "/etc/timezone",
    )
    installed = (
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        os.path.dirname(__file__),
    )
    paths = [path for path in sys.path if os.path.isabs(path)]
    return dict.fromkeys([*system, *settings, *installed, *paths])


def _can_filter() -> bool:
    """Return whether the numbers of system calls on this processor are known, and the kernel has filters of calls."""
    known = platform.machine() in _ARCHITECTURE
    return known and _libc().prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def _filtered() -> bool:
    """Refuse the system calls of this module's tables from now on. Return False if the kernel does not do so."""
    machine = platform.machine()
    column = 0 if machine == _X86 else 1
    program = _program(_ARCHITECTURE[machine], column)
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of instructions, and a pointer to them
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    return bool(_libc().prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0)


def _program(architecture: int, column: int) -> bytes:
    """Return the filter program, in instructions of the classic Berkeley Packet Filter.

    `column`: column of the tables that has the numbers of the system calls on this processor.
    """
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    allow = 0x7FFF0000
    refuse, again = 0x00050000 | errno.EPERM, 0x00050000 | errno.EAGAIN

    def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("=HBBI", code, then, otherwise, value)

    # Another architecture, or x86's other table of calls: refuse all
    steps = [
        step(load, 4),
        step(equal, architecture, 1),
        step(end, refuse),
        step(load, 0),
    ]
    if column == 0:
        steps += [step(at_least, 0x40000000, 0, 1), step(end, refuse)]
    # Denied calls
    for table, result in ((_NO_PROCESS, again), (_DENIED, refuse)):
        for numbers in table.values():
            number = numbers[column]
            if number is not None:
                steps += [step(equal, number, 0, 1), step(end, result)]
    # Calls that are denied with some arguments; the low half of an argument is compared
    for pair, argument, values in _DENIED_WITH:
        body = [step(load, 16 + 8 * argument)]
        if values is None:
            body += [step(equal, 0, 1), step(end, refuse)]
        for value in values or ():
            body += [step(equal, value, 0, 1), step(end, refuse)]
        body.append(step(end, allow))
        steps += [step(equal, pair[column], 0, len(body)), *body]
    steps.append(step(end, allow))
    return b"".join(steps)
