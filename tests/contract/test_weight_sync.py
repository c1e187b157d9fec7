"""What a weight sync promises by every transport: every bit, the right version, or nothing at all."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import signal
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.comm.network import (
    ChannelServer,
    Connection,
    JobKeys,
    JobPassword,
    Keys,
    RemoteChannel,
    StreamTaker,
    stream,
)
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.weights import host_sync
from rlplace.comm.weights.buffer import DoubleBuffer, OwnCopy
from rlplace.comm.weights.host_sync import CopyReceiver, WeightSender
from rlplace.comm.weights.shards import Layout, assemble
from rlplace.errors import ChannelTimeout, WeightSyncError
from rlplace.placement.flow import BUCKET_BYTES, Delivery, Transport
from rlplace.placement.memory.formulas import stream_buckets
from tests.contract.weight_ends import (
    PATIENCE_S,
    Weights,
    assert_equal_to_the_bit,
    held_by,
    shards_of,
)
from tests.worker_ranks import fork_server


def channel_of(**fields: Any) -> LocalChannel:
    return LocalChannel(
        ChannelSpec(
            **{
                "name": "weights",
                "capacity_items": 10_000,
                "timeout_s": PATIENCE_S,
                **fields,
            }
        )
    )


def weights(seed: int = 0) -> Weights:
    torch.manual_seed(seed)
    table = torch.randn(17, 9).bfloat16()
    return {
        "embed": table,
        "head": table,  # tied: it travels once and arrives under both names
        "half": torch.randn(5).half(),
        "linear.weight": torch.randn(8, 4).T,
        "linear.bias": torch.nn.Parameter(
            torch.tensor([float("nan"), -0.0, float("inf")])
        ),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "steps": torch.tensor([2**62], dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "large": torch.randn(300, 200),
        "empty": torch.empty(0, 7),
        "fp8": torch.randn(6).to(torch.float8_e4m3fn),
    }


class Far:
    """A channel of this node as an actor rank of another node has it."""

    def __init__(self, folder: Path, keys: Keys, **fields: Any) -> None:
        spec = ChannelSpec(
            name="weights", capacity_items=2, timeout_s=PATIENCE_S, **fields
        )
        self.near, self.keys, self.folder = (
            SharedChannel.create(folder, spec),
            keys,
            folder,
        )
        self._server = ChannelServer(host="127.0.0.1", keys=keys)
        self._server.add("weights", self.near)
        self.endpoint = self._server.start()
        self._connections: list[Connection] = []

    def end(self) -> RemoteChannel:
        self._connections.append(Connection(self.endpoint, self.keys))
        return RemoteChannel(self._connections[-1], self.near.spec)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._server.close()
        self.near.destroy()
        self.near.detach()


class Ends:
    """All ranks of a sync in this process, over one channel. Each sender has a thread: a stream waits for readers."""

    def __init__(
        self,
        ranks: int,
        deliveries: Sequence[Delivery],
        folder: Path | None,
        far: Far | None,
        **rules: Any,
    ) -> None:
        self.ranks, self.far = ranks, far
        self.channel: Channel = far.near if far else channel_of()
        rules |= {"deliveries": deliveries, "folder": folder}
        sending = [far.end() if far else self.channel for _ in range(ranks)]
        named = [end.named(f"actor rank {rank}") for rank, end in enumerate(sending)]
        self.senders = [
            WeightSender(end, rank=rank, **rules) for rank, end in enumerate(named)
        ]
        self._threads = [ThreadPoolExecutor(1) for _ in range(ranks)]
        readers = [reader for delivery in deliveries for reader in delivery.readers]
        self.receivers = {
            r: CopyReceiver(self.channel.named(f"rollout rank {r}"), r, folder=folder)
            for r in readers
        }

    def push(
        self,
        version: int,
        tensors: Weights,
        *,
        partial: bool = False,
        dtype: str | None = None,
    ) -> list[Future[dict[str, int]]]:
        """Begin to push; what is not streamed is there on return."""
        pushes = []
        for rank, (thread, sender) in enumerate(
            zip(self._threads, self.senders, strict=True)
        ):
            shards = held_by(rank, self.ranks, tensors)
            shards = tuple(
                dataclasses.replace(shard, dtype=dtype or shard.dtype)
                for shard in shards
            )
            pushes.append(thread.submit(sender.push, version, shards, partial=partial))
        if self.far is None:
            for push in pushes:
                push.result(PATIENCE_S)
        return pushes

    def close(self) -> None:
        for receiver in self.receivers.values():
            receiver.close()
        for thread in self._threads:
            thread.shutdown()

    def pull(self, version: int) -> dict[int, Weights]:
        """What each rank has loaded; leads first, as they write for the others."""
        loaded = {}
        for rank, receiver in self.receivers.items():
            with receiver.pull(version) as received:
                assert received.version == version
                loaded[rank] = {
                    name: tensor.clone() for name, tensor in received.tensors.items()
                }
        return loaded


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    ranks: int
    deliveries: tuple[Delivery, ...]
    shared: bool  # memory
    keys: type[Keys] | None = None  # of the network between the ranks


CASES = {
    "own memory, 1 to 1": Case(
        ranks=1, deliveries=(Delivery(readers=(0,)),), shared=False
    ),
    "own memory, 3 to 2": Case(
        ranks=3,
        deliveries=(Delivery(readers=(0,)), Delivery(readers=(1,))),
        shared=False,
    ),
    "one node, 1 to 1": Case(
        ranks=1, deliveries=(Delivery(readers=(0,), near=(0,)),), shared=True
    ),
    "one node, 3 to 2": Case(
        ranks=3, deliveries=(Delivery(readers=(0, 1), near=(0, 1, 2)),), shared=True
    ),
    "one node, 2 to 4": Case(
        ranks=2, deliveries=(Delivery(readers=(0, 1, 2, 3), near=(0, 1)),), shared=True
    ),
    "another node, 3 to 2": Case(
        ranks=3, deliveries=(Delivery(readers=(4, 7)),), shared=True
    ),
    "half of them near, 4 to 3": Case(
        ranks=4, deliveries=(Delivery(readers=(0, 1, 2), near=(1, 3)),), shared=True
    ),
}
FAR = Case(ranks=3, deliveries=(Delivery(readers=(4, 7)),), shared=True)
CASES |= {
    f"streams, {keys.__name__}": dataclasses.replace(FAR, keys=keys)
    for keys in (JobKeys, JobPassword)
}
OpenEnds = Callable[..., Ends]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def open_ends(tmp_path: Path) -> Iterator[OpenEnds]:
    with contextlib.ExitStack() as opened:

        def make(case: Case, **rules: Any) -> Ends:
            far = None
            if case.keys is not None:
                far = Far(tmp_path, case.keys.create())
                opened.callback(far.close)
            folder = tmp_path if case.shared else None
            ends = Ends(
                case.ranks,
                case.deliveries,
                folder,
                far,
                **{"bucket_bytes": 999, **rules},
            )
            opened.callback(ends.close)
            return ends

        yield make


def total(pushes: Iterable[Future[dict[str, int]]]) -> int:
    """Bytes that were sent."""
    return sum(sum(push.result(PATIENCE_S).values()) for push in pushes)


# ── what arrives ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bucket_bytes", [7, 16 << 20])
def test_every_dtype_arrives_equal_to_the_bit(
    case: Case, bucket_bytes: int, open_ends: OpenEnds
) -> None:
    sent = {
        name: tensor
        for name, tensor in weights().items()
        if bucket_bytes > 7 or name != "large"
    }
    ends = open_ends(case, bucket_bytes=bucket_bytes)
    pushes = ends.push(1, sent)
    for loaded in ends.pull(1).values():
        assert_equal_to_the_bit(loaded, sent)
    size_bytes = sum(t.nbytes for t in {id(t): t for t in sent.values()}.values())
    assert total(pushes) == size_bytes * len(case.deliveries)
    assert ends.channel.stats().depth_items == 0


def test_version_after_version_arrives(case: Case, open_ends: OpenEnds) -> None:
    ends = open_ends(case, verify_every=2)
    lead, *_ = ends.receivers.values()
    for version, sent in (
        (1, weights(1)),
        (2, weights(2)),
        (5, {}),
        (6, weights(6)),
        (40, weights(40)),
    ):
        assert not lead.announced()
        ends.push(version, sent)
        until = time.monotonic() + PATIENCE_S
        while not lead.announced():
            assert time.monotonic() < until
        assert lead.announced(), "asking takes nothing away"
        for loaded in ends.pull(version).values():
            assert_equal_to_the_bit(loaded, sent)


def test_the_sender_converts_to_the_type_that_travels(
    case: Case, open_ends: OpenEnds
) -> None:
    master = torch.randn(40, 30)
    ends = open_ends(case)
    pushes = ends.push(1, {"w": master}, dtype="bfloat16")
    for loaded in ends.pull(1).values():
        assert torch.equal(loaded["w"], master.bfloat16())
    assert total(pushes) == master.numel() * 2 * len(case.deliveries)


def test_some_of_the_weights_may_follow_all_of_them(
    case: Case, open_ends: OpenEnds
) -> None:
    ends = open_ends(case)
    ends.push(1, weights(1))
    ends.pull(1)
    some = {"half": weights(2)["half"], "scale": weights(2)["scale"]}
    ends.push(2, some, partial=True)
    for receiver in ends.receivers.values():
        with receiver.pull(2) as received:
            assert received.partial
            assert_equal_to_the_bit(received.tensors, some)


def test_bytes_are_counted_by_transport(open_ends: OpenEnds) -> None:
    ends = open_ends(CASES["half of them near, 4 to 3"])
    reports = [push.result() for push in ends.push(1, {"w": torch.zeros(8, 10)})]
    assert reports == [{Transport.NETWORK: 80}, {Transport.SAME_NODE: 80}] * 2
    ends.pull(1)
    (push,) = open_ends(CASES["own memory, 1 to 1"]).push(1, {"w": torch.zeros(8, 10)})
    assert push.result() == {Transport.SAME_PROCESS: 320}


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────


def test_another_version_is_an_error_that_names_both_and_the_next_pull_is_clean(
    case: Case, open_ends: OpenEnds
) -> None:
    ends = open_ends(case)
    for version in (7, 8):
        ends.push(version, weights(version))
    for receiver in ends.receivers.values():
        with pytest.raises(WeightSyncError) as caught:
            receiver.pull(8)
        assert caught.value.code == "version-mismatch"
        assert "version 7 arrived, version 8 was asked for" in str(caught.value)
    for loaded in ends.pull(8).values():
        assert_equal_to_the_bit(loaded, weights(8))


def test_a_lead_that_waits_for_credit_takes_in_what_is_streamed_to_it_already(
    tmp_path: Path,
) -> None:
    deliveries, small = [Delivery(readers=(0, 1))], channel_of(capacity_items=2)
    sender = WeightSender(
        small, deliveries=deliveries, folder=tmp_path, bucket_bytes=30_000
    )
    lead, other = (
        CopyReceiver(small, 0, folder=tmp_path),
        CopyReceiver(small, 1, folder=tmp_path),
    )
    with ThreadPoolExecutor(1) as thread:
        pushes = [
            thread.submit(sender.push, version, shards_of(weights(version)))
            for version in (1, 2)
        ]
        for version in (1, 2):
            for receiver in (lead, other):
                with receiver.pull(version) as received:
                    assert_equal_to_the_bit(received.tensors, weights(version))
        assert [push.exception(PATIENCE_S) for push in pushes] == [None, None]


@pytest.mark.parametrize("again", [1, 2])
def test_versions_only_go_up_and_what_readers_hold_stays(
    case: Case, again: int, open_ends: OpenEnds
) -> None:
    ends = open_ends(case)
    ends.push(2, weights(2))
    held = [receiver.pull(2) for receiver in ends.receivers.values()]
    with pytest.raises(
        WeightSyncError,
        match=f"actor rank 0: version {again} was pushed after version 2",
    ) as caught:
        total(ends.push(again, weights(again + 10)))
    assert caught.value.code == "version-mismatch"
    for received in held:
        assert_equal_to_the_bit(received.tensors, weights(2))
        received.release()


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_version_that_comes_after_its_deadline_is_dropped(
    case: Case, open_ends: OpenEnds
) -> None:
    ends = open_ends(case)
    for receiver in ends.receivers.values():
        with pytest.raises((WeightSyncError, ChannelTimeout)):
            receiver.pull(1, timeout_s=0.0)
    for version in (1, 2):
        ends.push(version, weights(version))
    for loaded in ends.pull(2).values():
        assert_equal_to_the_bit(loaded, weights(2))


def test_damaged_shared_memory_is_noticed_where_sums_are_taken(
    open_ends: OpenEnds, tmp_path: Path
) -> None:
    ends = open_ends(CASES["one node, 3 to 2"], verify_every=1)
    ends.push(4, weights())
    (file,) = tmp_path.glob("*.buffer")
    spoil(file, 4)
    for receiver in ends.receivers.values():
        with pytest.raises(WeightSyncError) as caught:
            receiver.pull(4)
        assert caught.value.code == "checksum-mismatch"
        assert "what actor rank 2 wrote of version 4 is damaged" in str(caught.value)
        assert (
            "without version 4 now: rollout ranks 0, 1; the weights in use are unchanged"
            in str(caught.value)
        )


def spoil(file: Path, version: int) -> None:
    """Flips a bit in the last row of "large", which the last of three ranks wrote."""
    buffer = DoubleBuffer(file)
    layout, whole = buffer.spec.layout, buffer.contents(version)
    assert whole is not None
    number = next(i for i, spec in enumerate(layout.tensors) if "large" in spec.names)
    at = layout.offsets[number] + layout.tensors[number].size_bytes - 1
    with open(file, "r+b") as opened:
        opened.seek(opened.read().index(whole.tobytes()) + at)
        opened.write(bytes([whole[at] ^ 4]))


@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_a_copy_for_another_node_is_never_in_memory_beside_what_is_on_its_way(
    tmp_path: Path, delta: float
) -> None:
    """Two buckets in the channel, one that is filled, one that is taken; to send changes, the last version is kept."""
    size, bucket = 8 << 20, 128 << 10
    channel, sent = (
        channel_of(capacity_items=2),
        shards_of({"w": torch.randn(size // 4)}),
    )
    deliveries = [Delivery(readers=(0,))]
    sender = WeightSender(
        channel,
        deliveries=deliveries,
        folder=tmp_path,
        bucket_bytes=bucket,
        delta_share=delta,
    )
    receiver = CopyReceiver(channel, 0, folder=tmp_path)  # the copy itself is in a file
    tracemalloc.start()  # once: what was kept of one version is there in the next
    with ThreadPoolExecutor(1) as pushing:
        for version in range(3):
            tracemalloc.reset_peak()
            push = pushing.submit(sender.push, version, sent)
            with receiver.pull(version):
                push.result(PATIENCE_S)
            held, most = tracemalloc.get_traced_memory()
            assert most < 5 * bucket + (size if delta else 0)
            assert held < bucket + (size if delta else 0)
    tracemalloc.stop()


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_between_nodes_at_most_two_buckets_are_there_beside_the_copy_and_none_in_the_channel(
    open_ends: OpenEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in numpy's memory: those that senders fill, and one that its reader has put together of frames.

    ZeroMQ lets go of what it has sent by a thread of its own, which may come late: each bucket is asked for
    once those before it are gone. If one of them stays, the test fails.
    """
    bucket, due = 2 << 20, list[int]()
    asking = StreamTaker.ask

    def ask(taker: StreamTaker) -> None:
        until = time.monotonic() + PATIENCE_S
        while tracemalloc.get_traced_memory()[0] >= bucket:
            assert time.monotonic() < until, "a bucket that was sent is still there"
            time.sleep(0.001)
        asking(taker)
        due.append(sum(each.due for each in ends.receivers[4]._takers.values()))

    monkeypatch.setattr(StreamTaker, "ask", ask)
    sent = {"w": torch.randn(16 << 20 >> 2)}
    ends = open_ends(CASES["streams, JobKeys"], bucket_bytes=bucket)
    tracemalloc.start()
    pushes = ends.push(1, sent)
    ends.receivers[4].pull(1).release()
    total(pushes)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(due) == 2
    assert most < 4 * bucket
    assert ends.channel.stats().bytes < bucket / 8


class OwnMemory:
    """The most that this process held of its own beyond what it had, looked at every half millisecond."""

    def __enter__(self) -> OwnMemory:
        self._before = self._most = self._now()
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look)
        self._looking.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.0005):
            self._most = max(self._most, self._now())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()
        self.grown = self._most - self._before

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) << 10


def push_and_measure(
    fars: Sequence[tuple[str, Keys]], folder: Path, size: int, results: Any
) -> None:
    """Actor rank 0 in a process of its own."""
    sent = held_by(0, 1, {"w": torch.ones(size // 4)})
    for endpoint, keys in fars:
        channel = RemoteChannel(
            Connection(endpoint, keys), ChannelSpec(name="weights", capacity_items=2)
        )
        sender = WeightSender(
            channel.named("actor rank 0"),
            deliveries=(Delivery(readers=(4,)),),
            folder=folder,
        )
        with OwnMemory() as memory:
            sender.push(1, sent)
        results.put(memory.grown)


@pytest.mark.slow  # it samples memory: beside other work, a copy that is gone a moment later is seen
def test_each_end_of_a_stream_holds_what_the_ledger_counts(tmp_path: Path) -> None:
    """Of two processes, sockets included; the copy itself is in a file."""
    size, fars = 6 * BUCKET_BYTES, list[Far]()
    with contextlib.ExitStack() as opened:
        for kind in (JobKeys, JobPassword):
            (tmp_path / kind.__name__).mkdir()
            fars.append(Far(tmp_path / kind.__name__, kind.create()))
            opened.callback(fars[-1].close)
        spawning = multiprocessing.get_context("spawn")
        results = spawning.Queue()
        arguments = (
            [(far.endpoint, far.keys) for far in fars],
            tmp_path,
            size,
            results,
        )
        actor = spawning.Process(target=push_and_measure, args=arguments)
        actor.start()
        for far in fars:
            folder = far.folder
            receiver = CopyReceiver(far.near.named("rollout rank 4"), 4, folder=folder)
            with OwnMemory() as memory:
                receiver.pull(1).release()
            encrypted = isinstance(far.keys, JobKeys)
            assert memory.grown < 1.1 * stream_buckets(
                size, sent=False, encrypted=encrypted
            )
            assert results.get(timeout=PATIENCE_S) < 1.1 * stream_buckets(
                size, sent=True
            )
            receiver.close()
        actor.join(PATIENCE_S)
        assert actor.exitcode == 0


def push_and_die(endpoint: str, keys: Keys, folder: Path) -> None:
    """Actor rank 1 in a process of its own, which is killed while it makes a bucket."""
    channel = RemoteChannel(
        Connection(endpoint, keys), ChannelSpec(name="weights", capacity_items=2)
    )
    rules: dict[str, Any] = {
        "deliveries": FAR.deliveries,
        "folder": folder,
        "bucket_bytes": 999,
    }
    written, write = itertools.count(), host_sync.write_piece

    def write_or_die(*piece: Any) -> None:
        if next(written) > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*piece)

    host_sync.write_piece = write_or_die
    sender = WeightSender(channel.named("actor rank 1"), rank=1, **rules)
    sender.push(2, held_by(1, FAR.ranks, weights(2)))


def test_a_sender_that_dies_is_named_at_once_and_the_old_version_stays(
    open_ends: OpenEnds, tmp_path: Path
) -> None:
    ends = open_ends(CASES["streams, JobKeys"])
    ends.push(1, weights(1))
    lead, other = (receiver.pull(1) for receiver in ends.receivers.values())
    other.release()
    assert ends.far is not None
    arguments = (ends.far.endpoint, ends.far.keys, tmp_path)
    actor = fork_server().Process(target=push_and_die, args=arguments)
    actor.start()
    with ThreadPoolExecutor() as threads:
        for rank in (0, 2):
            threads.submit(
                ends.senders[rank].push, 2, held_by(rank, FAR.ranks, weights(2))
            )
        with pytest.raises(WeightSyncError) as caught:
            ends.receivers[4].pull(2)
        assert "version 2 was not written by actor rank 1" in str(caught.value)
        assert "no connection to tcp://127.0.0.1:" in str(caught.value)
        assert (
            "without version 2 now: rollout ranks 4, 7; the weights in use are unchanged"
            in str(caught.value)
        )
        assert_equal_to_the_bit(lead.tensors, weights(1))
        lead.release()
        for receiver in ends.receivers.values():  # as the run does before it goes on
            receiver.begin_again()
    actor.join(PATIENCE_S)
    assert actor.exitcode == -signal.SIGKILL


def test_a_sender_that_is_gone_after_its_push_was_given_up_stops_no_later_pull(
    open_ends: OpenEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = open_ends(CASES["streams, JobKeys"])
    written, write = itertools.count(), host_sync.write_piece

    def write_or_fail(*piece: Any) -> None:
        if next(written) > 20:
            raise ArithmeticError("no more of it")
        write(*piece)

    monkeypatch.setattr(host_sync, "write_piece", write_or_fail)
    with ThreadPoolExecutor() as threads:
        failing = threads.submit(
            ends.senders[0].push, 1, held_by(0, FAR.ranks, weights(1))
        )
        with pytest.raises(
            WeightSyncError, match="version 1 was not written by actor ranks 0, 1, 2"
        ):
            ends.receivers[4].pull(1, timeout_s=1.0)
        with pytest.raises(ArithmeticError):
            failing.result(PATIENCE_S)
    monkeypatch.setattr(host_sync, "write_piece", write)
    monkeypatch.setattr(stream, "LOST_S", 0.1)
    with pytest.raises(
        WeightSyncError, match="version 2 was not written by actor ranks 0, 1, 2"
    ):
        ends.receivers[4].pull(2, timeout_s=1.0)
    assert not ends.receivers[4]._takers


def test_a_reader_that_does_not_come_is_named(open_ends: OpenEnds) -> None:
    ends = open_ends(CASES["streams, JobPassword"])
    sender = ends.senders[0]
    sender._channel.spec = dataclasses.replace(sender._channel.spec, timeout_s=0.5)
    with pytest.raises(ChannelTimeout) as caught:
        sender.push(1, held_by(0, FAR.ranks, weights(1)))
    assert (
        "weights version 1: actor rank 0 streams it to rollout rank 4, which takes no more of it"
        in str(caught.value)
    )
    assert "it asked for nothing for 0.5 s" in str(caught.value)


def messages() -> list[Any]:
    """One push of version 5 as it travels between nodes."""
    channel = channel_of()
    WeightSender(channel, deliveries=[Delivery(readers=(0,))], bucket_bytes=4096).push(
        5, shards_of(weights())
    )
    return [channel.get(key="0") for _ in range(channel.stats().depth_items)]


def flip_a_bit(sent: list[Any]) -> Iterable[Any]:
    data = sent[1].data.copy()
    data[3] ^= 4
    return [sent[0], dataclasses.replace(sent[1], data=data), *sent[2:]]


def shorten(sent: list[Any]) -> Iterable[Any]:
    return [
        *sent[:-1],
        dataclasses.replace(sent[-1], data=sent[-1].data[:0], checksum=0),
    ]


DAMAGED = "what actor rank 0 wrote of version 5 is damaged"


@pytest.mark.parametrize(
    ("damage", "code", "what"),
    [
        (flip_a_bit, "checksum-mismatch", DAMAGED),
        (shorten, "checksum-mismatch", DAMAGED),
        (
            lambda m: [m[0], m[2], m[1], *m[3:]],
            "incomplete-weights",
            "expected bucket 0 of version 5",
        ),
        (
            lambda m: [m[0], dataclasses.replace(m[1], version=4)],
            "incomplete-weights",
            "got bucket 0 of version 4",
        ),
        (
            lambda m: m[1:],
            "incomplete-weights",
            "expected a push, got bucket 0 of version 5",
        ),
        (lambda m: ["noise"], "incomplete-weights", "got a str"),
    ],
)
def test_damage_on_the_way_is_noticed_and_the_next_version_arrives(
    damage: Callable[[list[Any]], Iterable[Any]], code: str, what: str
) -> None:
    channel = channel_of()
    for message in damage(messages()):
        channel.put(message, key="0")
    receiver = CopyReceiver(channel, 0)
    with pytest.raises(WeightSyncError) as caught:
        receiver.pull(5)
    assert caught.value.code == code
    assert what in str(caught.value)
    assert "the weights in use are unchanged" in str(caught.value)
    WeightSender(channel, deliveries=[Delivery(readers=(0,))]).push(
        6, shards_of(weights(6))
    )
    assert_equal_to_the_bit(receiver.pull(6).tensors, weights(6))


def test_a_push_that_stops_half_way_times_out_and_the_next_one_arrives() -> None:
    channel, sent = channel_of(), messages()
    receiver = CopyReceiver(channel, 0)
    for message in sent[:2]:
        channel.put(message, key="0")
    with pytest.raises(
        WeightSyncError, match="version 5 was not written by actor rank 0"
    ):
        receiver.pull(5, timeout_s=0.01)
    for message in sent[2:]:  # the rest comes late
        channel.put(message, key="0")
    WeightSender(channel, deliveries=[Delivery(readers=(0,))]).push(
        6, shards_of(weights(6))
    )
    assert_equal_to_the_bit(receiver.pull(6).tensors, weights(6))


# ── changes only ─────────────────────────────────────────────────────────────────────────────────────────────────────


def sizes_in_delta_mode(ends: Ends) -> list[int]:
    """Bytes of four versions: all, a little changed twice, all changed."""
    now, sizes = weights(), []
    for version in range(4):
        pushes = ends.push(version, now)
        for loaded in ends.pull(version).values():
            assert_equal_to_the_bit(loaded, now)
        sizes.append(total(pushes))
        little = {
            **now,
            "large": now["large"].index_fill(1, torch.tensor([version]), 3.0),
        }
        now = little if version < 2 else weights(9)
    return sizes


@pytest.mark.parametrize("way", ["another node, 3 to 2", "streams, JobKeys"])
def test_between_nodes_only_what_changed_travels_where_it_is_little(
    way: str, open_ends: OpenEnds
) -> None:
    first, *little, last = sizes_in_delta_mode(
        open_ends(CASES[way], bucket_bytes=1 << 20, delta_share=0.5)
    )
    assert max(little) < first / 20
    assert last > first * 0.9
    own = open_ends(CASES["own memory, 3 to 2"], delta_share=0.5)
    assert len(set(sizes_in_delta_mode(own))) == 1, (
        "a reader owns what it got: there is no version to change"
    )


def turn_away(
    ends: Ends, pushes: Sequence[Future[dict[str, int]]], *, reader: int
) -> None:
    """End the streams that are announced after their reader has given up.

    Without this, each of their senders waits for the first request until its deadline.
    """
    until = time.monotonic() + PATIENCE_S
    while not all(push.done() for push in pushes):
        assert time.monotonic() < until
        with contextlib.suppress(ChannelTimeout):
            header = ends.channel.get(key=str(reader), timeout_s=0.1)
            header.stream.connect().close()


@pytest.mark.parametrize("way", ["another node, 3 to 2", "streams, JobPassword"])
def test_changes_to_a_version_that_is_not_here_are_refused(
    way: str, open_ends: OpenEnds, tmp_path: Path
) -> None:
    ends = open_ends(CASES[way], delta_share=0.5)
    pushes = ends.push(1, weights())
    ends.pull(1)
    total(pushes)
    for file in tmp_path.glob("*.buffer"):
        file.unlink()
    stranger = CopyReceiver(ends.channel, 4, folder=tmp_path)
    pushes = ends.push(2, weights())
    with pytest.raises(
        WeightSyncError,
        match="version 2 came as changes to version 1, which is not here",
    ) as caught:
        stranger.pull(2)
    stranger.close()  # ends the streams that have begun
    turn_away(ends, pushes, reader=4)
    assert caught.value.code == "incomplete-weights"


def test_a_copy_of_its_own_ends_with_its_reader() -> None:
    (shard,) = shards_of({"weight": torch.ones(3)})
    memory = OwnCopy(
        assemble(Layout.of([shard.spec]), [shard.blocks], Delivery(readers=(0,)))
    )
    memory.begin(0, 7, deadline_s=0.0)
    memory.finish(0, 7, 0)
    whole = memory.read(0, 7)
    kept = weakref.ref(whole)
    del whole
    assert kept() is None
