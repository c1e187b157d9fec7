"""The file of a channel: made whole or not at all, and mapped by every process that uses the channel."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
from pathlib import Path

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared.layout import (
    E_NEXT,
    FREE_ENTRY,
    FREE_WAITER,
    MAGIC,
    MAGIC_NUMBER,
    SPEC_AT,
    SPEC_BYTES,
    W_NEXT,
    WAITER_WORDS,
    Layout,
)
from rlplace.errors import OutputError


class ChannelMemory:
    """One mapping of a channel's file: the same bytes as integers, as reals and as bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # whoever locks it closes it
        self._mapped = mmap.mmap(self.descriptor, 0)
        self.data = memoryview(self._mapped)
        self.words = self.data.cast("q")
        self.reals = self.data.cast("d")
        assert self.words[MAGIC] == MAGIC_NUMBER, f"{path} is no channel of this version"
        at, size = self.words[SPEC_AT], self.words[SPEC_BYTES]
        self.spec: ChannelSpec = pickle.loads(self.data[at : at + size])
        self.layout = Layout.of(self.spec)

    def detach(self) -> None:
        """Unmaps. Any later access is a ValueError."""
        for view in (self.words, self.reals, self.data):
            view.release()
        self._mapped.close()


def make(path: Path, spec: ChannelSpec) -> None:
    """A channel that is open and empty. OutputError when the memory is full: later no access can fail for that."""
    layout, text = Layout.of(spec), pickle.dumps(spec, 5)
    size = layout.words * 8 + (len(text) + 7) // 8 * 8
    new = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            with mmap.mmap(descriptor, size) as mapped:
                _fill(mapped, layout, text)
        finally:
            os.close(descriptor)
        os.link(new, path)  # unlike rename, refuses to replace another channel of this name
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutputError.of(path, error) from error
        raise
    finally:
        new.unlink(missing_ok=True)


def _fill(mapped: mmap.mmap, layout: Layout, spec: bytes) -> None:
    at = layout.words * 8
    mapped[at : at + len(spec)] = spec
    with memoryview(mapped) as data, data.cast("q") as words:
        words[SPEC_AT], words[SPEC_BYTES] = at, len(spec)
        words[FREE_ENTRY] = _chain(words, layout.entries, layout.entry_words, layout.entry_count, E_NEXT)
        words[FREE_WAITER] = _chain(words, layout.waiters, WAITER_WORDS, layout.waiter_count, W_NEXT)
        words[MAGIC] = MAGIC_NUMBER


def _chain(words: memoryview, first: int, size: int, count: int, link: int) -> int:
    """Links all records of a table into a list; its head."""
    for i in range(count - 1):
        words[first + i * size + link] = first + (i + 1) * size
    return first
