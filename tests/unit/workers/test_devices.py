"""Memory of accelerators: what fits, what is refused and with which text."""

from __future__ import annotations

import dataclasses
import fcntl
import multiprocessing
import os
import pickle
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlplace.errors import AcceleratorOutOfMemory, ClusterError
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch import cluster, devices
from rlplace.workers.launch.cluster import InlineLauncher
from rlplace.workers.launch.devices import (
    AccountOfRuns,
    CudaDevice,
    Device,
    EmulatedDevice,
    MemoryAccount,
    ProcessClaims,
    SharedAccount,
)
from rlplace.workers.launch.group import GroupSpec
from rlplace.workers.worker import Rendezvous, Worker
from tests.open_calls import slot_of


def device(
    account: MemoryAccount, component: str, *accelerators: int
) -> EmulatedDevice:
    slot = dataclasses.replace(
        slot_of(component), accelerators=accelerators, local_accelerators=accelerators
    )
    return EmulatedDevice(account, slot)


def test_labels_are_replaced_and_released() -> None:
    actor = device(MemoryAccount([100, 100]), "actor", 0, 1)
    actor.acquire(60, "weights")
    actor.acquire(30, "gradients")
    assert actor.held_bytes() == 90, "on each accelerator, not over all"
    actor.acquire(70, "weights")
    assert actor.held_bytes() == 100
    actor.release("weights")
    actor.release("weights")
    assert actor.held_bytes() == 30
    assert actor.torch_name == "cpu"


def test_a_refusal_changes_nothing_and_names_the_residents_by_size() -> None:
    account = MemoryAccount([1000, 100])
    rollout, actor = device(account, "rollout", 1), device(account, "actor", 0, 1)
    rollout.acquire(50, "kv cache")
    rollout.acquire(10, "weights")
    actor.acquire(20, "weights")
    with pytest.raises(AcceleratorOutOfMemory) as refused:
        actor.acquire(30, "gradients")
    assert refused.value.code == "accelerator-out-of-memory"
    assert str(refused.value).splitlines()[1:] == [
        "    got: gradients needs 30 bytes",
        "    why: accelerator 1 has 100 bytes, 20 bytes free; resident are",
        "         rollout rank 0: kv cache 50 bytes",
        "         actor rank 0: weights 20 bytes",
        "         rollout rank 0: weights 10 bytes",
        "    fix: rollout.enable_offload: true        (or cluster.accelerator.memory: 110)",
    ]
    assert actor.held_bytes() == 20, (
        "also not on accelerator 0, where it would have fitted"
    )
    account.release_all("rollout rank 0")
    actor.acquire(30, "gradients")
    assert (actor.held_bytes(), rollout.held_bytes()) == (50, 0)


def test_alone_the_fix_is_more_memory() -> None:
    with pytest.raises(AcceleratorOutOfMemory) as refused:
        device(MemoryAccount([10]), "actor", 0).acquire(11, "weights")
    assert refused.value.problem.fix == "cluster.accelerator.memory: 11"
    assert "nothing is resident" in (refused.value.problem.why or "")
    copy = pickle.loads(pickle.dumps(refused.value))
    assert isinstance(copy, AcceleratorOutOfMemory)
    assert copy.problem == refused.value.problem


def test_processes_share_an_account(tmp_path: Path) -> None:
    """Ten of them take and give back beside each other; one is killed while it has the account."""
    account = SharedAccount([1000, 1000], tmp_path / "accelerators")
    device(account, "env", 1).acquire(600, "pool")
    busy = [
        multiprocessing.Process(target=take_and_give, args=(account, n))
        for n in range(1, 10)
    ]
    killed = multiprocessing.Process(target=die_with, args=(account,))
    for process in (*busy, killed):
        process.start()
    for process in (*busy, killed):
        process.join(60)
    assert [process.exitcode for process in busy] == [0] * 9
    assert killed.exitcode == -signal.SIGKILL
    assert [account.held_bytes(f"{n} rank 0") for n in range(10)] == [0] + [7] * 9
    with pytest.raises(AcceleratorOutOfMemory, match="env rank 0: pool 600 bytes"):
        device(pickle.loads(pickle.dumps(account)), "actor", 1).acquire(401, "weights")


def test_what_a_killed_process_had_not_finished_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, offsets = SharedAccount([1000], tmp_path / "accelerators"), list[int]()
    actor, write = device(account, "actor", 0), os.pwrite
    actor.acquire(7, "weights")

    def killed_before_the_head(file: int, text: bytes, offset: int) -> int:
        offsets.append(offset)
        if not offset:
            raise KeyboardInterrupt
        return write(file, text, offset)

    monkeypatch.setattr(os, "pwrite", killed_before_the_head)
    with pytest.raises(KeyboardInterrupt):
        device(account, "env", 0).acquire(500, "pool")
    monkeypatch.undo()
    assert len(offsets) == 2
    assert (actor.held_bytes(), account.held_bytes("env rank 0")) == (7, 0)
    device(account, "env", 0).acquire(600, "pool")
    assert (actor.held_bytes(), account.held_bytes("env rank 0")) == (7, 600)


def test_what_is_not_held_is_given_back_without_a_look(tmp_path: Path) -> None:
    actor = device(SharedAccount([1000], tmp_path / "accelerators"), "actor", 0)
    actor.acquire(0, "working memory")
    actor.release("working memory")
    assert not list(tmp_path.iterdir())
    actor.acquire(5, "weights")
    actor.acquire(0, "weights")
    assert actor.held_bytes() == 0


def test_runs_on_the_same_accelerators_have_one_limit(tmp_path: Path) -> None:
    of = [AccountOfRuns(folder=tmp_path / "all", run=run) for run in ("pole", "hop")]
    pole, hop = (device(each.open([100]), "actor", 0) for each in of)
    pole.acquire(60, "weights")
    with pytest.raises(
        AcceleratorOutOfMemory, match="actor rank 0 of pole: weights 60"
    ):
        hop.acquire(50, "weights")
    hop.acquire(40, "weights")
    assert (pole.held_bytes(), hop.held_bytes()) == (60, 40)
    # A killed run leaves its bytes in the account
    of[0].open().release_run()
    assert (pole.held_bytes(), hop.held_bytes()) == (0, 40)
    hop.worker_ended()
    assert hop.held_bytes() == 0


def die_with(account: SharedAccount) -> None:
    with account._opened([0]) as held:
        held[0] = {("0 rank 0", "weights"): 999}
        os.kill(os.getpid(), signal.SIGKILL)


def take_and_give(account: SharedAccount, number: int) -> None:
    own = device(account, str(number), 0)
    for _ in range(100):
        own.acquire(7, "weights")
        own.acquire(number, "work")
        own.release("work")


def test_a_process_that_stands_still_with_the_account_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_ACCOUNT_S", 0.1)
    account = SharedAccount([10], tmp_path / "accelerators")
    with account._opened([0]), pytest.raises(ClusterError) as late:
        account.held_bytes("actor rank 0")
    assert late.value.code == "account-held"


@pytest.mark.parametrize(
    ("seen", "wrong"),
    [
        (["1a", "2b"], None),
        (["of a MIG slice", "2b"], None),
        (["1a", "3c"], "GPU-3c"),
        (["2b", "1a"], "GPU-2b"),
    ],
)
def test_the_gpus_that_cuda_shows_are_compared_with_the_plan(
    seen: list[str], wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=seen[index - 4]),
    )
    slot = dataclasses.replace(
        slot_of("rollout"), accelerators=(12, 13), local_accelerators=(4, 5)
    )
    gpus = CudaDevice(4, slot, uuids=("GPU-1a", "GPU-2b", "GPU-3c"))
    if wrong is None:
        gpus.verify()
        return
    with pytest.raises(ClusterError) as refused:
        gpus.verify()
    assert refused.value.code == "worker-misplaced"
    assert refused.value.problem.got == wrong


def test_a_gpu_is_touched_by_who_has_memory_there_and_gets_cached_memory_back_with_every_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To ask a GPU for what is free makes a context on it, of half a GiB; who has one gives its cache back."""
    begun, returned = [False], list[str]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 30)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: returned.append("cache"))
    gpu = CudaDevice()
    monkeypatch.setattr(
        gpu, "measure_here", lambda: pytest.fail("nothing is to be measured")
    )
    gpu.measure = gpu.measure_here
    gpu.acquire(0, "simulator")
    gpu.release("simulator")
    assert (gpu.held_bytes(), gpu.measured_bytes(7), returned) == (0, 7, [])
    begun[0], used = True, CudaDevice()
    used.acquire(90, "weights")
    assert (used.held_bytes(), used.measured_bytes(7), used.measured_bytes(70)) == (
        30,
        30,
        70,
    )
    used.release("weights")
    assert returned == ["cache"]


def test_threads_of_one_process_are_told_apart_by_what_they_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA and torch count the memory of the process: 70 bytes are reserved by both workers together."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 70)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    claims = ProcessClaims()
    actor, rollout = (
        CudaDevice(0, slot_of(component)) for component in ("actor", "rollout")
    )
    actor.share_process(claims)
    rollout.share_process(claims)
    actor.acquire(60, "weights")
    rollout.acquire(40, "engine weights")
    assert (actor.held_bytes(), rollout.held_bytes()) == (60, 40)
    assert (actor.measured_bytes(55), rollout.measured_bytes(35)) == (55, 35)
    with pytest.raises(AcceleratorOutOfMemory) as caught:
        rollout.acquire(41, "engine weights")
    assert caught.value.lacking_bytes == 1
    assert "actor rank 0: weights 60 bytes" in caught.value.problem.why
    actor.release("weights")
    rollout.acquire(100, "engine weights")
    assert (actor.held_bytes(), rollout.held_bytes()) == (0, 100)
    rollout.worker_ended()
    actor.acquire(100, "weights")  # nothing of a worker that has ended is in the way
    assert (actor.held_bytes(), rollout.held_bytes()) == (100, 0)


def test_a_gpu_goes_to_another_process_without_the_claims_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    here = CudaDevice()
    here.acquire(100, "weights")
    pickle.loads(pickle.dumps(here)).acquire(100, "engine weights")


def test_engines_that_share_a_gpu_are_built_one_after_the_other(tmp_path: Path) -> None:
    """While it is built, vLLM measures the whole GPU. Emulated ones keep accounts, and build at the same time."""

    def on(*accelerators: int) -> CudaDevice:
        return CudaDevice(
            0, dataclasses.replace(slot_of("rollout"), accelerators=accelerators)
        )

    def is_free(number: int) -> bool:
        with (tmp_path / f"alone-{number}").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with on(2, 3).alone(tmp_path), on(4).alone(tmp_path), on(4).alone(None):
        assert [is_free(number) for number in range(5)] == [
            True,
            True,
            False,
            False,
            False,
        ]
    assert all(is_free(number) for number in range(5))
    emulated = device(MemoryAccount([100]), "rollout", 0)
    with emulated.alone(tmp_path), emulated.alone(tmp_path):
        pass


class Told(Device):
    """Notes what its process has told it."""

    def __init__(self) -> None:
        self.claims: list[ProcessClaims] = []

    def share_process(self, claims: ProcessClaims) -> None:
        self.claims.append(claims)


def test_workers_that_are_threads_of_the_driver_share_its_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices_made = [Told(), Told()]
    waiting = iter(devices_made)
    monkeypatch.setattr(cluster, "make_device", lambda *_, **__: next(waiting))
    launcher = InlineLauncher(Topology.uniform(1, 1, "cuda", 100))
    for name in ("env", "rollout"):
        spec = GroupSpec(
            name=name, worker=Worker, slots=(slot_of(name),), config=None, channels={}
        )
        launcher._make(spec, slot_of(name)).end()
    ((first,), (second,)) = (device.claims for device in devices_made)
    assert first is second


@pytest.mark.parametrize(("workers", "told"), [(1, 0), (2, 1)])
def test_workers_of_one_ray_process_share_its_claims(
    workers: int, told: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`process: shared`; a worker alone in its process is measured by CUDA."""
    actors = pytest.importorskip("rlplace.workers.ray_launch.actors")
    monkeypatch.setattr(actors.private, "show_name", lambda name: None)
    monkeypatch.setattr(actors.gc, "disable", lambda: None)
    made = [Told() for _ in range(workers)]
    host = actors.RayHost({}, [None] * workers)
    for number, gpu in enumerate(made):
        host.make(
            number,
            b"no pickle",
            slot_of("env", number),
            gpu,
            tmp_path,
            Rendezvous(host="", port=0),
        )
    assert [len(gpu.claims) for gpu in made] == [told] * workers
    assert len({id(claims) for gpu in made for claims in gpu.claims}) == told
