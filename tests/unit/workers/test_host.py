"""How what goes wrong in a worker travels to the driver."""

from __future__ import annotations

import pickle
import threading

from rlplace.errors import NotResident, Problem
from rlplace.workers.host import Failure, WorkerHost


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
