"""How what goes wrong in a worker travels to the driver."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.local import LocalChannel
from rlplace.errors import ChannelTimeout, NotResident, Problem
from rlplace.placement.slots import Slot
from rlplace.workers.devices import EmulatedDevice, MemoryAccount
from rlplace.workers.host import Birth, Failure, WorkerHost
from rlplace.workers.worker import Rendezvous, Worker


class Locked(Exception):
    def __init__(self, lock: object) -> None:
        super().__init__("locked")
        self.lock = lock


class TwoArguments(Exception):
    """Pickles, but cannot be made again from its message alone."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def travelled(error: BaseException) -> Failure:
    try:
        raise error
    except type(error) as raised:
        copy: Failure = pickle.loads(pickle.dumps(Failure.of(raised)))
        return copy


def test_an_exception_keeps_its_class_when_it_can() -> None:
    failure = travelled(KeyError("weights"))
    assert failure.what == "KeyError: 'weights'"
    assert isinstance(failure.cause, KeyError)
    assert "in travelled" in failure.traceback
    ours = NotResident(Problem(code="not-resident", key="actor rank 0", what="is off"))
    carried = travelled(ours)
    assert isinstance(carried.cause, NotResident)
    assert carried.cause.code == "not-resident"
    assert carried.what == str(ours), "our own errors need no class name in front"


def test_an_exception_that_cannot_travel_keeps_its_text() -> None:
    for error, text in ((Locked(threading.Lock()), "Locked: locked"), (TwoArguments(1, 2), "TwoArguments: 1 and 2")):
        failure = travelled(error)
        assert failure.cause is None
        assert failure.what == text
        assert text in failure.traceback


def test_a_host_without_a_worker_answers_with_the_reason() -> None:
    host = WorkerHost()
    assert host.where() == ""
    host.refuse(ImportError("no module called simulator"))
    for outcome in (host.call("setup", (), {}), host.call("run", (), {})):
        assert isinstance(outcome, Failure)
        assert outcome.what == "ImportError: no module called simulator"


class Impatient(Worker):
    def take(self) -> object:
        return self.context.channels["actions"].get(timeout_s=0.01)


def test_a_channel_that_was_waited_for_in_vain_says_who_waits_for_whom_everywhere() -> None:
    channels = {name: LocalChannel(ChannelSpec(name=name, capacity_items=1)) for name in ("actions", "observations")}
    slot = Slot(
        component="env", rank=0, node=0, local_rank=0, local_world_size=1, accelerators=(0,), local_accelerators=(0,)
    )
    birth = Birth(
        worker=Impatient,
        config=None,
        slot=slot,
        world_size=1,
        device=EmulatedDevice(MemoryAccount([0]), slot),
        channels=channels,
        seed=0,
    )
    host = WorkerHost()
    host.build(birth, Rendezvous(host="", port=0))
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
