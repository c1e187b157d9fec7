"""How what goes wrong in a worker travels to the driver."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import threading
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.errors import AcceleratorOutOfMemory, ChannelTimeout, NotResident, Problem
from rlplace.placement.language.slots import Slot
from rlplace.workers.launch.devices import EmulatedDevice, MemoryAccount
from rlplace.workers.launch.host import Done, Failure, GroupSpec, WorkerHost
from rlplace.workers.worker import Rendezvous, Worker
from tests.open_calls import slot_of


class Locked(Exception):
    def __init__(self, lock: object) -> None:
        super().__init__("locked")
        self.lock = lock


class TwoArguments(Exception):
    """Pickles, but cannot be made again from its message alone."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.a = a


def travelled(error: BaseException) -> Failure:
    try:
        raise error
    except type(error) as raised:
        copy: Failure = pickle.loads(pickle.dumps(Failure.of(raised)))
        return copy


def test_an_exception_keeps_its_class_when_it_can() -> None:
    failure = travelled(KeyError("weights"))
    assert (failure.what, type(failure.cause)) == ("KeyError: 'weights'", KeyError)
    assert "in travelled" in failure.traceback
    ours = NotResident(Problem(code="not-resident", key="actor rank 0", what="is off"))
    carried = travelled(ours)
    assert isinstance(carried.cause, NotResident)
    assert carried.cause.code == "not-resident"
    assert carried.what == str(ours), "our own errors need no class name in front"


def test_an_exception_whose_constructor_has_other_arguments_keeps_class_and_attributes() -> (
    None
):
    failure = travelled(TwoArguments(1, 2))
    assert failure.what == "TwoArguments: 1 and 2"
    assert isinstance(failure.cause, TwoArguments)
    assert (str(failure.cause), failure.cause.a) == ("1 and 2", 1)


def test_an_exception_that_cannot_travel_keeps_its_text() -> None:
    failure = travelled(Locked(threading.Lock()))
    assert (failure.cause, failure.what) == (None, "Locked: locked")
    assert "Locked: locked" in failure.traceback


def host_of(
    worker: type[Worker],
    slot: Slot | None = None,
    channels: Mapping[str, LocalChannel] | None = None,
) -> WorkerHost:
    host, slot = WorkerHost(), slot or slot_of("env")
    spec = GroupSpec(
        name=slot.component,
        worker=worker,
        config=None,
        slots=(slot,) * 4,
        channels=channels or {},
    )
    host.build(
        spec,
        slot,
        EmulatedDevice(MemoryAccount([0] * 12), slot),
        Rendezvous(host="", port=0),
    )
    return host


class Impatient(Worker):
    def take(self) -> object:
        return self.context.channels["actions"].get(timeout_s=0.01)


def test_a_channel_that_was_waited_for_in_vain_says_who_waits_for_whom_everywhere() -> (
    None
):
    channels = {
        name: LocalChannel(ChannelSpec(name=name, capacity_items=1))
        for name in ("actions", "observations")
    }
    host = host_of(Impatient, channels=channels)
    with ThreadPoolExecutor() as threads:
        threads.submit(channels["observations"].named("rollout rank 0").get)
        while not channels["observations"].stats().waits:
            pass
        failure = host.call("take", (), {})
        channels["observations"].break_("the test is over")
    assert isinstance(failure, Failure)
    assert isinstance(failure.cause, ChannelTimeout)
    assert "channel observations: 0 of 1 items" in failure.traceback
    assert "rollout rank 0: " in failure.traceback


class Large(Worker):
    def learn(self) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.11 GiB of which 512.00 "
            "MiB is free. See documentation for Memory Management"
        )


class Unlucky(Worker):
    def learn(self) -> None:
        raise KeyError("weights")


def test_an_error_travels_while_another_thread_imports_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        sys.modules, "torch", types.ModuleType("torch")
    )  # as it is at first: without its names
    failure = host_of(Unlucky).call("learn", (), {})
    assert isinstance(failure, Failure)
    assert failure.what == "KeyError: 'weights'"


def test_a_full_gpu_is_told_in_the_house_form_with_its_number_over_the_cluster() -> (
    None
):
    slot = dataclasses.replace(
        slot_of("actor", 3), node=1, accelerators=(10, 11), local_accelerators=(2, 3)
    )
    failure = host_of(Large, slot).call("learn", (), {})
    assert isinstance(failure, Failure)
    failure = pickle.loads(pickle.dumps(failure))
    assert isinstance(failure.cause, AcceleratorOutOfMemory)
    assert failure.what.startswith("actor rank 3: accelerator 11 is out of memory")
    assert failure.cause.accelerator == 11
    assert failure.cause.lacking_bytes == 2 << 30
    assert "in learn" in failure.traceback


class WithoutContext(Worker):
    def __init__(self, *_: object) -> None:
        pass

    def learn(self) -> None:
        raise ValueError("its own error")


def test_a_worker_that_skips_the_constructor_of_the_base_keeps_its_own_error() -> None:
    failure = host_of(WithoutContext).call("learn", (), {})
    assert isinstance(failure, Failure)
    assert failure.what == "ValueError: its own error"


class Counting(Worker):
    def count(self) -> int:
        return sum(range(100_000))


def test_a_method_s_seconds_come_with_its_value() -> None:
    outcome = host_of(Counting).call("count", (), {})
    assert isinstance(outcome, Done)
    assert outcome.value == sum(range(100_000))
    assert outcome.record is not None
    assert (outcome.record.method, outcome.record.seconds > 0) == ("count", True)
