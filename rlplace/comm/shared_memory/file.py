"""The file of a channel: made whole or not at all, and mapped by every process that uses the channel."""

from __future__ import annotations

import mmap
import os
import pickle
from pathlib import Path

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory import space
from rlplace.comm.table import MAGIC, MAGIC_NUMBER, NEWEST_VERSION, NO_VERSION, SPEC_AT, SPEC_BYTES, Layout


class ChannelFile:
    """One mapping of a channel's file: a table in shared memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.mapped = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self.data = memoryview(self.mapped)
        self.words = self.data.cast("q")
        self.reals = self.data.cast("d")
        assert self.words[MAGIC] == MAGIC_NUMBER, f"{path} is no channel of this version"
        at, size = self.words[SPEC_AT], self.words[SPEC_BYTES]
        self.spec: ChannelSpec = pickle.loads(self.data[at : at + size])
        self.layout = Layout.of(self.spec)

    def detach(self) -> None:
        """Unmap. Any later access is a ValueError."""
        for view in (self.words, self.reals, self.data):
            view.release()
        self.mapped.close()


def make(path: Path, spec: ChannelSpec) -> None:
    """A channel that is open and empty. ClusterError when the memory is full: later no access can fail for that."""
    layout, text = Layout.of(spec), pickle.dumps(spec, 5)
    size = layout.words * 8 + (len(text) + 7) // 8 * 8
    new = path.with_name(path.name + ".new")
    try:
        space.allocate(new, size)
        with open(new, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
            mapped[layout.words * 8 : layout.words * 8 + len(text)] = text
            with memoryview(mapped) as data, data.cast("q") as words:
                words[SPEC_AT], words[SPEC_BYTES] = layout.words * 8, len(text)
                words[NEWEST_VERSION] = NO_VERSION
                words[MAGIC] = MAGIC_NUMBER
        os.link(new, path)  # unlike rename, refuses to replace another channel of this name
    except OSError as error:
        if error.errno in space.FULL:
            raise space.too_small(path.parent, size, key="cluster.comm.shm_folder") from error
        raise
    finally:
        new.unlink(missing_ok=True)
