"""Requests and answers over a socket, with the worker's end in a thread of this process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlplace.workers.launch.host import Done, Failure, Outcome, Request
from rlplace.workers.ray_launch.connections import Connection, Connections, Service

MUCH = b"x" * (8 << 20)  # far more than a socket holds
GONE = Failure(what="the worker process died")


class Side:
    """A connection to a worker that runs `run`, which may be held back."""

    def __init__(self, folder: Path) -> None:
        self.service = Service(folder)
        self.all = Connections()
        self.connection: Connection = self.all.open(self.service.path)
        self.run: Callable[[Sequence[Request]], list[Outcome]] = lambda requests: [
            Done(r[1]) for r in requests
        ]
        self.thread = threading.Thread(
            target=lambda: self.service.answer(self._run), daemon=True
        )

    def _run(self, requests: Sequence[Request]) -> list[Outcome]:
        return self.run(requests)

    def ask(self, *arguments: Any, method: str = "echo") -> Future[Any]:
        answer: Future[Any] = Future()
        self.connection.send(answer.set_result, [(method, arguments, {})])
        return answer


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    made = Side(tmp_path)
    yield made
    made.all.close()
    if made.thread.ident is not None:
        made.thread.join(10)
        assert not made.thread.is_alive(), "it ends with its driver"


def values(answer: Future[Any]) -> list[Any]:
    return [done.value for done in answer.result(10)]


def test_answers_come_in_the_order_of_requests(side: Side) -> None:
    asked = [side.ask(number) for number in range(100)]
    side.thread.start()
    assert [values(answer) for answer in asked] == [
        [(number,)] for number in range(100)
    ]
    assert not side.service.path.exists(), "nobody else can connect"


def test_much_is_sent_without_waiting_for_a_worker_that_is_busy(side: Side) -> None:
    asked = [side.ask(MUCH, number) for number in range(3)]  # nobody reads
    side.thread.start()
    assert [values(answer)[0][1] for answer in asked] == [0, 1, 2]


def test_what_cannot_be_pickled_fails_where_it_is(side: Side) -> None:
    side.thread.start()
    with pytest.raises(TypeError, match="cannot pickle"):
        side.ask(threading.Lock())
    side.run = lambda requests: [Done(1), Done(threading.Lock()), Done(3)]
    first, failure = side.ask().result(10)
    assert first.value == 1
    assert failure.traceback is not None, "the worker has not died"
    assert "cannot pickle" in failure.what
    side.run = lambda requests: [Done(2)]
    assert values(side.ask(1)) == [2]


def test_a_death_counts_after_the_answers_that_are_there(side: Side) -> None:
    begun, told = threading.Event(), threading.Event()

    def run(requests: Sequence[Request]) -> list[Outcome]:
        if requests[0][1] == (1,):
            begun.set()
            assert told.wait(10)
        return [Done(requests[0][1][0])]

    side.run = run
    answered, late = side.ask(0), side.ask(1)
    side.thread.start()
    assert begun.wait(10)
    side.connection.fail(GONE)
    assert values(answered) == [0]
    assert late.result(10) is GONE
    told.set()
    assert side.ask(2).result(10) is GONE


def test_an_answer_that_cannot_be_taken_fails_its_connection_alone(
    side: Side, tmp_path: Path
) -> None:
    def refuse(answer: object) -> None:
        raise ValueError("nobody wants it")

    other = Service(tmp_path)
    connection = side.all.open(other.path)
    thread = threading.Thread(
        target=lambda: other.answer(lambda requests: [Done(4)]), daemon=True
    )
    thread.start()
    side.thread.start()
    side.connection.send(refuse, [("echo", (), {})])
    late = side.ask(1).result(10)
    assert "nobody wants it" in late.what
    answer: Future[Any] = Future()
    connection.send(answer.set_result, [("echo", (), {})])
    assert values(answer) == [4]


def test_a_sender_that_is_interrupted_breaks_no_message(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(deque[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            if len(interrupts) < 2:
                interrupts.append(item)
                raise KeyboardInterrupt

    interrupts: list[Any] = []
    monkeypatch.setattr(side.all, "_posted", Interrupting())
    side.thread.start()
    for number in range(2):
        with pytest.raises(KeyboardInterrupt):
            side.ask(number)
    assert values(side.ask(2)) == [(2,)], (
        "those before it are sent, too, and answered in order"
    )


def test_a_worker_that_was_closed_takes_no_more(side: Side) -> None:
    side.thread.start()
    assert values(side.ask(method="close")) == [()]
    side.thread.join(10)
    assert not side.thread.is_alive()
    after = side.ask(3)
    assert not after.done()
    side.connection.fail(GONE)
    assert after.result(10) is GONE


def test_a_driver_that_is_gone_ends_the_worker(side: Side) -> None:
    side.thread.start()
    assert values(side.ask(1)) == [(1,)]
    side.all.close()
    side.all.close()
    side.thread.join(10)
    assert not side.thread.is_alive()
