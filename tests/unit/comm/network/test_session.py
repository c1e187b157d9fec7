"""What a channel server owes a client: once performed, kept until received, undone when nobody receives it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlplace.comm.network.server import Answer, Session


class Owed:
    """Stands for a reservation or a taking; writes down how it ended."""

    items: tuple[Any, ...] = ()

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def fill(self, item: Any) -> None:
        self._log.append(f"{self._name} filled")

    def withdraw(self) -> None:
        self._log.append(f"{self._name} withdrawn")

    def restore(self) -> None:
        self._log.append(f"{self._name} restored")


@pytest.fixture
def log() -> list[str]:
    return []


def answered(session: Session, log: list[str], *serials: int) -> None:
    for serial in serials:
        session.end(serial, Answer(envelope=b"%d" % serial, taking=Owed(str(serial), log)))


def test_an_answer_is_kept_until_the_client_has_it(log: list[str]) -> None:
    session = Session(b"c")
    answered(session, log, 1, 2)
    session.done([1])
    kept = session.answer(2)
    assert (session.answer(1), kept and kept.envelope) == (None, b"2")
    session.withdraw(1)  # it had arrived
    assert log == []


def test_after_a_gap_only_what_the_client_still_wants_is_kept(log: list[str]) -> None:
    session = Session(b"c")
    answered(session, log, 1, 2, 3)
    session.keep_only({2, 9})
    assert [s for s in (1, 2, 3) if session.answer(s)] == [2]
    assert log == [], "what is not wanted any more has arrived"


def test_what_is_withdrawn_goes_back(log: list[str]) -> None:
    session = Session(b"c")
    answered(session, log, 1)
    session.hold(2, Owed("2", log))
    session.withdraw(1)
    session.withdraw(2)
    session.withdraw(2)
    session.withdraw(5)
    assert log == ["1 restored", "2 withdrawn"]
    assert session.take_hold(2) is None


def test_everything_goes_back_in_the_order_that_keeps_the_line(log: list[str]) -> None:
    session = Session(b"c")
    answered(session, log, 1, 2, 3)
    session.withdraw_all()
    assert log == ["3 restored", "2 restored", "1 restored"]


def test_a_withdrawn_request_is_cancelled() -> None:
    async def run() -> None:
        session = Session(b"c")
        task = asyncio.create_task(asyncio.Event().wait())
        session.begin(4, task)  # type: ignore[arg-type]
        assert session.performs(4)
        session.withdraw(4)
        assert not session.performs(4)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
