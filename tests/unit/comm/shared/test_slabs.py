"""Slabs: written once, lent to one taker at a time, used again, and gone when nobody needs them, whoever dies."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlplace.comm import codec
from rlplace.comm.lease import SlabLease
from rlplace.comm.shared import space
from rlplace.comm.shared.folder import JobFolder
from rlplace.comm.shared.slab_files import Mappings
from rlplace.comm.shared.slabs import SMALLEST, SlabPool, SlabReader, SlabRef, reclaim, slab_size
from rlplace.errors import ClusterError, OutputError

PEER = """
import json, sys
from pathlib import Path
from rlplace.comm.shared.slabs import SlabPool, SlabReader, SlabRef
folder = Path(sys.argv[1])
pool, reader = SlabPool(folder), SlabReader(folder)
{work}
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with JobFolder.create(tmp_path) as made:
        yield made.path


@pytest.fixture
def pool(folder: Path) -> Iterator[SlabPool]:
    made = SlabPool(folder)
    yield made
    made.close()


@pytest.fixture
def reader(folder: Path) -> SlabReader:
    return SlabReader(folder)


def taken(reader: SlabReader, ref: SlabRef) -> list[bytes]:
    reader.stamp(ref)
    return [bytes(b) for b in reader.copy(ref)]


def slabs(folder: Path) -> list[str]:
    return sorted(p.name for place in (folder, folder / "spill") for p in place.glob("*.slab*"))


def killed(folder: Path, work: str, *arguments: str) -> str:
    """What a process that did `work` in the folder printed before it was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", PEER.format(work=work), str(folder), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as peer:
        assert peer.stdout is not None
        said = peer.stdout.readline().strip()
        peer.send_signal(signal.SIGKILL)
        peer.wait()
    return said


def limited(folder: Path, budget: int) -> Callable[[Path, int], None]:
    """Room for `budget` bytes of slabs in the folder itself, as much as there is elsewhere."""

    def allocate(path: Path, size_bytes: int) -> None:
        used = sum(p.stat().st_size for p in folder.glob("*.slab"))
        if path.parent == folder and used + size_bytes > budget:
            raise OSError(errno.ENOSPC, "full")
        space.allocate(path, size_bytes)

    return allocate


# ── writing, taking, using again ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lengths", [(5,), (0,), (64, 1, 0, 100_000), (SMALLEST,), (3 * SMALLEST + 1, 7)])
def test_what_was_written_comes_out(pool: SlabPool, reader: SlabReader, lengths: tuple[int, ...]) -> None:
    buffers = [bytes([i + 1]) * n for i, n in enumerate(lengths)]
    ref = pool.write(buffers)
    assert ref.lengths == lengths
    assert taken(reader, ref) == buffers


def test_opened_buffers_are_aligned_and_alias_the_slab(pool: SlabPool, reader: SlabReader) -> None:
    ref = pool.write([b"abc", b"defg"])
    reader.stamp(ref)
    one, two = reader.open(ref)
    assert (two.ctypes.data - one.ctypes.data) % 64 == 0
    one[:] = 0
    assert bytes(reader.open(ref)[0]) == b"\0\0\0"
    assert bytes(two) == b"defg"


def test_a_copy_is_the_takers_own(pool: SlabPool, reader: SlabReader) -> None:
    ref = pool.write([b"mine"])
    reader.stamp(ref)
    (copy,) = reader.copy(ref)
    assert pool.write([b"next"]).number == ref.number
    assert bytes(copy) == b"mine"
    copy[:] = 0


@pytest.mark.parametrize("value", [np.arange(50), torch.arange(50), torch.ones(50, dtype=torch.bfloat16)])
def test_a_leased_slab_is_not_used_again_while_an_array_lies_in_it(
    pool: SlabPool, reader: SlabReader, value: Any
) -> None:
    ref = pool.write(codec.encode({"value": value}).pieces)
    reader.stamp(ref)
    kept = SlabLease(reader.open(ref), codec.unpack, lambda: reader.release(ref)).item["value"][1:]
    assert pool.write([b"other"]).number != ref.number
    assert kept.tolist() == value[1:].tolist()
    del kept
    assert pool.write([b"other"]).number == ref.number


def test_a_slab_that_came_back_is_used_again_and_one_that_is_lent_is_not(pool: SlabPool, reader: SlabReader) -> None:
    first, second = pool.write([b"1"]), pool.write([b"2"])
    assert first.number != second.number
    reader.stamp(first)
    third = pool.write([b"3"])
    assert third.number not in (first.number, second.number)
    reader.release(first)
    assert pool.write([b"4"]).number == first.number
    assert taken(reader, second) == [b"2"]
    assert taken(reader, third) == [b"3"]


def test_a_much_larger_slab_is_not_used_for_little(pool: SlabPool, reader: SlabReader) -> None:
    large = pool.write([bytes(10 * SMALLEST)])
    reader.release(large)
    assert pool.write([b"x"]).number != large.number
    assert pool.write([bytes(6 * SMALLEST)]).number == large.number


def test_sizes_waste_at_most_an_eighth() -> None:
    assert [slab_size(n) for n in (0, 1, SMALLEST, SMALLEST + 1)] == [SMALLEST, SMALLEST, SMALLEST, 2 * SMALLEST]
    for needed in (10**6, 2**24, 2**24 + 100, 10**9 + 1):
        assert needed <= slab_size(needed) <= max(needed + SMALLEST, needed * 9 / 8)


def test_more_slabs_than_stay_mapped_are_all_readable(pool: SlabPool, folder: Path) -> None:
    refs = [pool.write([bytes([i])]) for i in range(5)]
    mapped = Mappings(folder, limit=2)
    for _ in range(2):
        assert [mapped.of(ref.owner, ref.number)[0] for ref in refs] == list(range(5))


def test_a_closed_pool_leaves_only_what_is_lent_and_that_goes_when_released(folder: Path) -> None:
    pool, reader = SlabPool(folder), SlabReader(folder)
    kept, free = pool.write([b"kept"]), pool.write([b"free"])
    reader.release(free)
    pool.close()
    pool.close()
    assert len(slabs(folder)) == 2  # the slab and the table
    assert taken(reader, kept) == [b"kept"]
    assert slabs(folder) == []


def test_a_new_pool_of_the_same_process_leaves_alone_what_a_closed_one_has_lent(folder: Path) -> None:
    pool, reader = SlabPool(folder), SlabReader(folder)
    old = pool.write([b"old"])
    pool.close()
    new = pool.write([b"new"])
    assert taken(reader, new) == [b"new"]
    assert taken(reader, old) == [b"old"]
    assert len(slabs(folder)) == 2  # the new table and the new slab, free
    pool.close()
    assert slabs(folder) == []


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_killed_holder_held_is_used_again(folder: Path, pool: SlabPool) -> None:
    ref = pool.write([b"x"])
    in_line = pool.write([b"y"])
    work = "ref = SlabRef(int(sys.argv[2]), int(sys.argv[3]), (1,)); reader.stamp(ref); held = reader.open(ref)"
    assert killed(folder, work, str(ref.owner), str(ref.number)) == "done"
    again = pool.write([b"z"])
    assert again.number == ref.number
    assert again.number != in_line.number


def test_what_a_killed_owner_had_lent_is_readable_and_goes_then(folder: Path, reader: SlabReader) -> None:
    work = (
        "free, held, sent = (pool.write([b]) for b in (b'0', b'not yet in a channel', b'still here')); "
        "reader.release(free); reader.lend(sent); (folder / 'sent').write_text(json.dumps(sent))"
    )
    assert killed(folder, work) == "done"
    owner, number, lengths = json.loads((folder / "sent").read_text())
    sent = SlabRef(owner, number, tuple(lengths))
    reclaim(folder)
    assert len(slabs(folder)) == 2  # what was free or still its owner's went, what lies in a channel stays
    assert taken(reader, sent) == [b"still here"]
    assert slabs(folder) == []


def test_a_forked_child_takes_nothing_from_its_parent(pool: SlabPool, reader: SlabReader, folder: Path) -> None:
    held, free = pool.write([b"held"]), pool.write([b"free"])
    reader.stamp(held)
    reader.release(free)
    lease = SlabLease(reader.open(held), lambda buffers: buffers[0], lambda: reader.release(held))
    child = os.fork()
    if child == 0:
        try:
            lease.release()
            pool.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert pool.write([b"next"]).number == free.number
    assert bytes(lease.item) == b"held"
    assert len(list(folder.glob("*.slab"))) == 2
    lease.release()


# ── no room ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_full_memory_first_takes_idle_slabs_of_other_sizes(folder: Path, reader: SlabReader) -> None:
    pool = SlabPool(folder, allocate=limited(folder, 10 * SMALLEST))
    reader.release(pool.write([bytes(8 * SMALLEST)]))
    small = [pool.write([bytes(SMALLEST)]) for _ in range(4)]
    assert sum(p.stat().st_size for p in folder.glob("*.slab")) == 4 * SMALLEST
    assert list((folder / "spill").glob("*")) == []
    for ref in small:
        reader.release(ref)
    pool.close()


def test_full_memory_spills_to_disk_with_one_warning(
    folder: Path, reader: SlabReader, caplog: pytest.LogCaptureFixture
) -> None:
    pool = SlabPool(folder, allocate=limited(folder, SMALLEST))
    with caplog.at_level(logging.WARNING):
        refs = [pool.write([bytes([i]) * SMALLEST]) for i in range(3)]
    assert len(list((folder / "spill").glob("*.slab"))) == 2
    assert [record.getMessage().count("no room for 64 KiB") for record in caplog.records] == [1]
    for i, ref in enumerate(refs):
        assert taken(reader, ref) == [bytes([i]) * SMALLEST]
    pool.close()
    assert slabs(folder) == []


def test_no_room_anywhere_is_an_error_that_leaves_nothing(folder: Path) -> None:
    def full(path: Path, size_bytes: int) -> None:
        if path.suffix == ".slab":
            raise OSError(errno.ENOSPC, "full")
        space.allocate(path, size_bytes)

    pool = SlabPool(folder, allocate=full)
    with pytest.raises(OutputError) as caught:
        pool.write([bytes(100)])
    assert caught.value.code == "shm-full"
    assert "64 KiB" in str(caught.value)
    pool.close()
    assert slabs(folder) == []


def test_too_little_space_is_refused_before_the_start(tmp_path: Path) -> None:
    space.check_space(tmp_path, 1)
    with pytest.raises(ClusterError) as caught:
        space.check_space(tmp_path, 1 << 60, key="runner.queue_size")
    assert caught.value.code == "shm-too-small"
    assert "1048576 TiB" in str(caught.value)


def test_a_real_small_file_system_spills_and_recovers(tmp_path: Path) -> None:
    """A tmpfs of 1 MiB in a mount namespace of its own; nothing but this process sees it."""
    script = f"""
import sys
from pathlib import Path
from rlplace.comm.shared.folder import JobFolder
from rlplace.comm.shared.slabs import SlabPool, SlabReader
with JobFolder.create(Path({str(tmp_path)!r})) as folder:
    pool, reader = SlabPool(folder.path), SlabReader(folder.path)
    refs = [pool.write([bytes([i]) * (400 << 10)]) for i in range(4)]
    inside = len(list(folder.path.glob("*.slab")))
    for i, ref in enumerate(refs):
        reader.stamp(ref)
        assert bytes(reader.copy(ref)[0]) == bytes([i]) * (400 << 10)
    pool.close()
    print(inside, len(list(folder.path.glob("**/*.slab*"))))
"""
    mount = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "$@"'
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode != 0 and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip("this machine lets no process mount a file system of its own")
    assert done.stdout.split() == ["2", "0"], done.stderr
