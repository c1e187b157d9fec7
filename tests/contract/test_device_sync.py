"""A weight sync past the host: every bit, by all transports at once; all go on or none, and the old version stays."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.comm.weights import device_push, device_sync
from rlplace.comm.weights.rendezvous import StoreAddress
from rlplace.errors import ChannelTimeout, NotResident, Problem, WeightSyncError
from tests.contract.device_sync import (
    Ends,
    Mixture,
    ends_of,
    gpu_consumer,
    lagging,
    serve,
)
from tests.contract.weight_ends import (
    PATIENCE_S,
    Weights,
    assert_equal_to_the_bit,
    held_by,
)
from tests.worker_ranks import fork_server

MIXTURES = {
    "a consumer alone": Mixture(actors=1, hosts=(0,)),
    "two consumers of one owner": Mixture(actors=1, hosts=(0, 0)),
    "free readers": Mixture(actors=2, hosts=(None, None)),
    "consumers of all": Mixture(actors=3, hosts=(0, 1, 2)),
    "some shared, some free": Mixture(actors=3, hosts=(1, 2, None)),
    "by every transport at once": Mixture(
        actors=2, hosts=(1, None), on_host=(2, 3), verify_every=1
    ),
    "an engine that cuts, on owners": Mixture(actors=2, hosts=(0, 1), parts=(2,)),
    "an engine that cuts, free": Mixture(
        actors=2, hosts=(None, None), parts=(2,), verify_every=1
    ),
    "one that cuts, half of it on owners, beside whole ones": Mixture(
        actors=3, hosts=(1, 2, None, 0), parts=(1, 2, 1)
    ),
    "windows into engines that are whole": Mixture(
        actors=2, hosts=(0, None), whole=False, verify_every=1
    ),
    "windows, and readers through the host": Mixture(
        actors=3, hosts=(None, 1, 1), on_host=(3,), whole=False
    ),
    "one window": Mixture(actors=2, hosts=(0, None), parts=(2,), window_bytes=1 << 20),
    "large buckets": Mixture(actors=2, hosts=(None, 0), bucket_bytes=1 << 20),
}

SHORT_S = 1.0  # where a deadline is to pass
LONG_S = 5.0  # of a wait that outlives it


class Weighing(LocalChannel):
    """Waits until so many items are in it."""

    def wait_for(self, items: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.stats().depth_items < items:
            assert time.monotonic() < until
            time.sleep(0.001)


def channel_of() -> Weighing:
    return Weighing(
        ChannelSpec(name="weights", capacity_items=64, timeout_s=PATIENCE_S)
    )


@contextmanager
def short_deadlines(channel: Weighing) -> Iterator[None]:
    """Give the pushes and pulls that begin within the block SHORT_S; all ends of a channel have its one spec."""
    object.__setattr__(channel.spec, "timeout_s", SHORT_S)
    try:
        yield
    finally:
        object.__setattr__(channel.spec, "timeout_s", PATIENCE_S)


def weights(seed: int = 0) -> Weights:
    torch.manual_seed(seed)
    table = torch.randn(6, 5)
    return {
        "embed": torch.randn(17, 9).bfloat16(),
        "bias": torch.tensor([float("nan"), -0.0, float("inf")]),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "mask": torch.tensor([True, False, True]),
        "large": torch.randn(70, 20),
        "empty": torch.empty(0, 7),
        "table": table,
        "tied": table,
    }


def cloned(tensors: Mapping[str, torch.Tensor]) -> Weights:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def sync(ends: Ends, version: int, sent: Weights) -> dict[str, int]:
    """Bytes pushed by what carried them, over all actor ranks."""
    pulls = ends.pull(version, cloned)
    reports = [push.result(PATIENCE_S) for push in ends.push(version, sent)]
    for pull in pulls.values():
        loaded, _ = pull.result(PATIENCE_S)
        assert_equal_to_the_bit(loaded, sent)
    return dict(sum((Counter(moved) for moved in reports), Counter[str]()))


@pytest.fixture(params=["gloo", "lagging"])
def groups(request: pytest.FixtureRequest) -> Iterator[str]:
    """Accelerators that have done what they are given at once, and such that do it later, as GPUs."""
    with lagging() if request.param == "lagging" else nullcontext():
        yield request.param


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
def test_version_after_version_arrives_equal_to_the_bit(
    mixture: Mixture, tmp_path: Path
) -> None:
    with ends_of(mixture, channel_of(), tmp_path) as ends:
        for version, sent in (
            (1, weights(1)),
            (2, {}),
            (3, {"scale": weights(3)["scale"]}),
            (5, weights(5)),
        ):
            sync(ends, version, sent)


def test_pushes_of_the_same_tensors_are_packed_and_cut_once(tmp_path: Path) -> None:
    device_push._unpacked.cache_clear()
    device_push._windows.cache_clear()
    packed: list[object] = []
    with (
        ends_of(MIXTURES["consumers of all"], channel_of(), tmp_path) as ends,
        pytest.MonkeyPatch.context() as counted,
    ):
        dumps = pickle.dumps
        counted.setattr(
            device_sync.pickle,
            "dumps",
            lambda *what: packed.append(what) or dumps(*what),
        )
        sync(ends, 1, weights(1))
        first = (
            len(packed),
            device_push._unpacked.cache_info().misses,
            device_push._windows.cache_info().misses,
        )
        for version in (2, 3):
            sync(ends, version, weights(version))
        sync(ends, 4, {"scale": weights(4)["scale"]})
    assert first[0] == 3  # once for each actor rank; all members are in this process
    counts = (
        len(packed),
        device_push._unpacked.cache_info().misses,
        device_push._windows.cache_info().misses,
    )
    assert all(count <= 2 * once for count, once in zip(counts, first, strict=True))


def test_each_byte_goes_once_into_the_group_and_once_to_each_consumer(
    tmp_path: Path,
) -> None:
    mixture = MIXTURES["by every transport at once"]
    sent = {"w": torch.randn(80, 10), "b": torch.randn(4)}
    size = 804 * 4
    with ends_of(mixture, channel_of(), tmp_path) as ends:
        assert sync(ends, 1, sent) == {
            "gloo": size,
            "shared_tensor": size,
            "same_node": size,
        }
        pulls = ends.pull(2, len)
        ends.push(2, sent)
        assert [pull.result(PATIENCE_S)[1] for pull in pulls.values()] == [
            {"shared_tensor": size},
            {"gloo": size},
            {"same_node": size},
            {"same_node": size},
        ]


def test_a_member_that_does_not_come_is_named_and_the_next_version_arrives(
    tmp_path: Path,
) -> None:
    channel = channel_of()
    with ends_of(MIXTURES["some shared, some free"], channel, tmp_path) as ends:
        sync(ends, 1, weights(1))
        pushes = ends.push(2, weights(2))
        channel.wait_for(3)
        for reader in (0, 2):
            with pytest.raises(
                (ChannelTimeout, WeightSyncError),
                match=r"rollout rank 1.*\n.*in use are unchanged",
            ):
                ends.receivers[reader].pull(2, timeout_s=0.0)
        late = ends.pull(2, cloned, ranks=(1,))[1].exception(PATIENCE_S)
        for error in (late, *map(push_error, pushes)):
            assert "rollout rank 1" in str(error)
            assert "did not come" in str(error)
        sync(ends, 3, weights(3))


def push_error(push: Future[dict[str, int]]) -> BaseException | None:
    error = push.exception(PATIENCE_S)
    assert isinstance(error, ChannelTimeout | WeightSyncError)
    return error


def test_a_reader_that_asks_for_another_version_calls_the_push_off_and_the_next_pull_is_clean(
    tmp_path: Path,
) -> None:
    with ends_of(MIXTURES["some shared, some free"], channel_of(), tmp_path) as ends:
        pushes = ends.push(7, weights(7))
        pulls = ends.pull(7, cloned, ranks=(1, 2)) | ends.pull(8, cloned, ranks=(0,))
        wrong = pulls[0].exception(PATIENCE_S)
        assert isinstance(wrong, WeightSyncError)
        assert wrong.code == "version-mismatch"
        assert "version 7 arrived, version 8 was asked for" in str(wrong)
        for error in (
            *map(push_error, pushes),
            pulls[1].exception(PATIENCE_S),
            pulls[2].exception(PATIENCE_S),
        ):
            assert "rollout rank 0 asked for version 8, not 7" in str(error)
        sync(ends, 8, weights(8))


@pytest.mark.usefixtures("groups")
def test_damage_on_the_way_is_noticed_by_the_rank_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ends_of(
        Mixture(actors=2, hosts=(None, 0), verify_every=1), channel_of(), tmp_path
    ) as ends:
        sync(ends, 1, weights(1))
        member = ends.receivers[0]._member
        spoil_next_broadcast_of(member, monkeypatch, owner=1)
        pushes, pulls = ends.push(2, weights(2)), ends.pull(2, cloned)
        damaged = pulls[0].exception(PATIENCE_S)
        assert isinstance(damaged, WeightSyncError)
        assert damaged.code == "checksum-mismatch"
        assert "what actor rank 1 wrote of version 2 is damaged" in str(damaged)
        assert "without version 2 now: rollout rank" in str(damaged)
        assert_equal_to_the_bit(pulls[1].result(PATIENCE_S)[0], weights(2))
        assert [push.exception(PATIENCE_S) for push in pushes] == [None, None]
        sync(ends, 3, weights(3))


@pytest.mark.usefixtures("groups")
def test_an_engine_that_cuts_and_whose_process_gets_damage_has_no_weights_until_the_next_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ends_of(
        Mixture(actors=2, hosts=(0, None), parts=(2,), verify_every=1),
        channel_of(),
        tmp_path,
    ) as ends:
        sync(ends, 1, weights(1))
        takers = ends.receivers[0]._load.__self__._takers
        spoil_next_broadcast_of(takers[1]._member, monkeypatch, owner=1)
        pushes, pulls = ends.push(2, weights(2)), ends.pull(2, cloned)
        damaged = pulls[0].exception(PATIENCE_S)
        assert isinstance(damaged, WeightSyncError)
        assert str(damaged).startswith(
            "rollout rank 0 part 1: what actor rank 1 wrote of version 2 is damaged"
        )
        emptied = (
            "without version 2 now: rollout rank 0; an engine that had begun to load "
            "has no weights until the next sync"
        )
        assert emptied in str(damaged)
        assert [push.exception(PATIENCE_S) for push in pushes] == [None, None]
        sync(ends, 3, weights(3))


def test_nobody_waits_for_the_processes_of_an_engine_whose_rank_does_not_take_part(
    tmp_path: Path,
) -> None:
    """It wants another version, or its engine cannot begin."""
    with ends_of(
        Mixture(actors=2, hosts=(0, None), parts=(2,)), channel_of(), tmp_path
    ) as ends:
        for version, asked, why in (
            (7, 8, "asked for version 8, not 7"),
            (8, 8, "could not begin"),
        ):
            receiver: Any = ends.receivers[0]
            with pytest.MonkeyPatch.context() as asleep:
                asleep.setattr(receiver, "_load", refuse)
                pushes, pulls = ends.push(version, weights(7)), ends.pull(asked, cloned)
                assert isinstance(
                    pulls[0].exception(PATIENCE_S), WeightSyncError | NotResident
                )
            for error in map(push_error, pushes):
                assert f"the sync did not take place: rollout rank 0 {why}" in str(
                    error
                )
        sync(ends, 9, weights(9))


def refuse(*_: object) -> None:
    asleep = Problem(
        code="not-resident", key="rollout rank 0", what="asleep", why="it is a test"
    )
    raise NotResident(asleep)


def test_a_broadcast_that_never_ends_is_given_up_at_the_deadline_and_the_next_version_arrives(
    tmp_path: Path,
) -> None:
    """As it is where a member dies behind the rendezvous: NCCL goes on waiting for it, without a deadline."""
    channel = (
        channel_of()
    )  # with time for groups to form: connections to torch's store may take 5 s
    with (
        lagging(),
        ends_of(Mixture(actors=2, hosts=(None, 0)), channel, tmp_path) as ends,
    ):
        sync(ends, 1, weights(1))
        lost = ends.senders[1]._device._member
        broadcast = lost.broadcast

        def leaves(bucket: torch.Tensor, owner: int, deadline_s: float) -> None:
            lost.broadcast = broadcast
            raise RuntimeError("its GPU fell off the bus")

        lost.broadcast = leaves
        with short_deadlines(channel):
            pushes, pulls = ends.push(2, weights(2)), ends.pull(2, cloned)
            sender, died, reader = (
                push_error(pushes[0]),
                push_error(pushes[1]),
                pulls[0].exception(PATIENCE_S),
            )
        assert "its GPU fell off the bus" in str(died)
        for error in (sender, reader):
            assert isinstance(error, WeightSyncError)
            assert error.code == "incomplete-weights"
            assert "for a bucket of actor rank 0" in str(error)
            assert (
                "without version 2 now: rollout ranks 0, 1; the weights in use are unchanged"
                in str(error)
            )
        assert "actor rank 0" in str(pulls[1].exception(PATIENCE_S)), (
            "who shares with it"
        )
        sync(ends, 3, weights(3))


def test_a_group_that_does_not_form_is_given_up_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = channel_of()
    blocks, form = threading.Event(), device_sync.device_group

    def hangs(*arguments: Any, **named: Any) -> Any:
        assert blocks.wait(PATIENCE_S)
        return form(*arguments, **named)

    with ends_of(Mixture(actors=1, hosts=(None,)), channel, tmp_path) as ends:
        with monkeypatch.context() as hanging, short_deadlines(channel):
            hanging.setattr(device_sync, "device_group", hangs)
            pushes, pulls = ends.push(1, weights(1)), ends.pull(1, cloned)
            for error in (push_error(pushes[0]), pulls[0].exception(PATIENCE_S)):
                assert (
                    "waited until the deadline for actor rank 0, rollout rank 0 to form a group"
                    in str(error)
                )
        blocks.set()
        sync(ends, 2, weights(2))


def test_who_gives_up_on_a_group_waits_no_longer_for_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL asks the store for what the first rank writes there, and a connection answers one question at a time."""
    channel, gone = (
        Weighing(ChannelSpec(name="weights", capacity_items=64, timeout_s=SHORT_S)),
        threading.Event(),
    )

    def waits(store: Any, **_: Any) -> None:
        with contextlib.suppress(RuntimeError):
            store.wait(["never"], timedelta(seconds=LONG_S))
        gone.set()

    with ends_of(Mixture(actors=1, hosts=(None,)), channel, tmp_path) as ends:
        monkeypatch.setattr(device_sync, "device_group", waits)
        pushes, pulls = ends.push(1, weights(1)), ends.pull(1, cloned)
        for error in (push_error(pushes[0]), pulls[0].exception(PATIENCE_S)):
            assert "to form a group" in str(error)
        assert not gone.is_set()


def test_a_group_of_gpus_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's group of NCCL is told when it is made, which the environment of the process keeps nothing of."""
    told: dict[str, Any] = {}

    class Nccl:
        class Options:
            pass

        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            told.update(
                {
                    name: value
                    for name, value in os.environ.items()
                    if name.startswith("TORCH_NCCL_")
                }
            )
            told["timeout"] = options._timeout.total_seconds()

        def eager_connect_single_device(self, device: torch.device) -> None:
            told["device"] = device

    device = torch.device("cuda:1")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: told.update(thread=device)
    )
    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", Nccl, raising=False)
    device_sync.device_group(object(), rank=0, size=2, device=device, timeout_s=7.0)
    assert told == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "timeout": 7.0,
        "device": device,
        "thread": device,
    }
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def spoil_next_broadcast_of(
    member: Any, monkeypatch: pytest.MonkeyPatch, *, owner: int
) -> None:
    """As `member` gets it."""
    broadcast = member.broadcast

    def spoiled(bucket: torch.Tensor, source: int, deadline_s: float) -> None:
        broadcast(bucket, source, deadline_s)
        if source == owner:
            bucket[3] ^= 4
            monkeypatch.setattr(member, "broadcast", broadcast)

    monkeypatch.setattr(member, "broadcast", spoiled)


class Intruder:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self._mark),)


def test_a_note_from_the_unauthenticated_store_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "it ran"
    with ends_of(MIXTURES["a consumer alone"], channel_of(), tmp_path) as ends:
        sync(ends, 1, weights(1))
        with monkeypatch.context() as store:
            store.setattr(
                device_sync, "share", lambda tensor: pickle.dumps(Intruder(mark))
            )
            (push,), pulls = ends.push(2, weights(2)), ends.pull(2, cloned)
            refused = pulls[0].exception(PATIENCE_S)
        assert isinstance(refused, WeightSyncError)
        assert "the note of actor rank 0 about its memory is damaged" in str(refused)
        assert not mark.exists()
        assert "rollout rank 0 could not open the memory of actor rank 0" in str(
            push_error(push)
        )
        sync(ends, 3, weights(3))


# ── between processes ────────────────────────────────────────────────────────────────────────────────────────────────


DEADLY = Mixture(actors=2, hosts=(1, None), on_host=(2,), bucket_bytes=4096)


def even(version: int) -> Weights:
    return {
        "w": torch.full((6, 1000), float(version)),
        "b": torch.full((7,), version).bfloat16(),
    }


def act(folder: Path, point: StoreAddress, rank: int, mixture: Mixture) -> None:
    """Pushes versions 1 and 2; rank 0 dies in the second, when half of its part is out."""
    torch.set_num_threads(1)
    sender = mixture.sender(
        SharedChannel.attach(folder / "weights.channel"), rank, point, folder
    )
    sender.push(1, held_by(rank, mixture.actors, even(1)))
    if rank == 0:
        _die_after(sender, buckets=4)
    with pytest.raises((ChannelTimeout, WeightSyncError)) as failed:
        sender.push(2, held_by(rank, mixture.actors, even(2)))
    (folder / f"actor-{rank}.txt").write_text(str(failed.value))
    sender.close()


def _die_after(sender: object, *, buckets: int) -> None:
    member = sender._device._member
    broadcast, left = member.broadcast, [buckets]

    def deadly(bucket: torch.Tensor, owner: int, deadline_s: float) -> None:
        broadcast(bucket, owner, deadline_s)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    member.broadcast = deadly


@pytest.mark.parametrize(
    ("whole", "left"),
    [
        (True, "the weights in use are unchanged"),
        (False, "an engine that had begun to load has no weights until the next sync"),
    ],
)
def test_a_death_in_the_middle_is_named_with_what_it_leaves(
    whole: bool, left: str
) -> None:
    """Members that share an accelerator, members that do not, and a reader on the host at once."""
    mixture = dataclasses.replace(DEADLY, whole=whole)
    context = fork_server()
    store, point = serve()
    with JobFolder.create() as folder, ThreadPoolExecutor(3) as threads:
        channel = SharedChannel.create(
            folder.path,
            ChannelSpec(name="weights", capacity_items=8, timeout_s=PATIENCE_S),
        )
        actors = [
            context.Process(target=act, args=(folder.path, point, rank, mixture))
            for rank in range(mixture.actors)
        ]
        for actor in actors:
            actor.start()
        receivers = {
            rank: mixture.receiver(channel, rank, folder.path)
            for rank in mixture.readers
        }
        for received in threads.map(
            lambda receiver: receiver.pull(1), receivers.values()
        ):
            assert torch.equal(received.tensors["w"], even(1)["w"])
            assert torch.equal(received.tensors["b"], even(1)["b"])
            received.release()
        for pull in [threads.submit(receivers[rank].pull, 2) for rank in (0, 1)]:
            error = pull.exception(PATIENCE_S)
            assert isinstance(error, WeightSyncError)
            assert "version 2 broke off" in str(error)
            assert f"without version 2 now: rollout ranks 0, 1; {left}" in str(error)
        for actor in actors:
            actor.join(PATIENCE_S)
        assert [actor.exitcode for actor in actors] == [-signal.SIGKILL, 0]
        assert (
            "actor rank 1: version 2 broke off"
            in (folder.path / "actor-1.txt").read_text()
        )
        for receiver in receivers.values():
            receiver.close()
        channel.destroy()
    del store


@pytest.mark.gpu
def test_a_consumer_on_a_gpu_takes_what_its_owner_shares(tmp_path: Path) -> None:
    """Between processes, as a process cannot open what it shares itself."""
    context = fork_server()
    mixture = Mixture(
        actors=1,
        hosts=(0,),
        bucket_bytes=1 << 20,
        verify_every=1,
        device=torch.device("cuda:0"),
    )
    store, point = serve()
    with (
        JobFolder.create() as folder,
        ProcessPoolExecutor(1, mp_context=context) as pool,
    ):
        channel = SharedChannel.create(
            folder.path,
            ChannelSpec(name="weights", capacity_items=8, timeout_s=PATIENCE_S),
        )
        sender = mixture.sender(channel, 0, point, folder.path)
        sent = {
            "w": torch.randn(3000, 700, device="cuda:0"),
            "b": torch.randn(9, device="cuda:0").bfloat16(),
        }
        for version in (1, 2):
            pulled = pool.submit(gpu_consumer, mixture, folder.path, version)
            assert sender.push(version, held_by(0, 1, sent)) == {
                "cuda_ipc": 3000 * 700 * 4 + 18
            }
            tensors, kind = pulled.result(PATIENCE_S)
            assert kind == "cuda"
            assert_equal_to_the_bit(
                tensors, {name: tensor.cpu() for name, tensor in sent.items()}
            )
            sent["w"].add_(1)
        sender.close()
        channel.destroy()
    del store
