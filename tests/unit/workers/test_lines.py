"""Requests and answers over a socket, with the worker's end in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlplace.workers.launch.host import Done, Failure, Outcome, Request
from rlplace.workers.ray_launch.lines import Line, Lines, Service

MUCH = b"x" * (8 << 20)  # far more than a socket holds
GONE = Failure(what="the worker process died")


class Side:
    """A line to a worker that runs `run`, which may be held back."""

    def __init__(self, folder: Path) -> None:
        self.service = Service(folder)
        self.lines = Lines()
        self.line: Line = self.lines.open(self.service.path)
        self.run: Callable[[Sequence[Request]], list[Outcome]] = lambda requests: [Done(r[1]) for r in requests]
        self.thread = threading.Thread(target=lambda: self.service.answer(self._run), daemon=True)

    def _run(self, requests: Sequence[Request]) -> list[Outcome]:
        return self.run(requests)

    def ask(self, *arguments: Any, method: str = "echo") -> Future[Any]:
        answer: Future[Any] = Future()
        self.line.send(answer.set_result, [(method, arguments, {})])
        return answer


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    made = Side(tmp_path)
    yield made
    made.lines.close()
    if made.thread.ident is not None:
        made.thread.join(10)
        assert not made.thread.is_alive(), "it ends with its driver"


def values(answer: Future[Any]) -> list[Any]:
    return [done.value for done in answer.result(10)]


def test_answers_come_in_the_order_of_requests(side: Side) -> None:
    asked = [side.ask(number) for number in range(100)]
    side.thread.start()
    assert [values(answer) for answer in asked] == [[(number,)] for number in range(100)]
    assert not side.service.path.exists(), "nobody else can connect"


def test_much_is_sent_without_waiting_for_a_worker_that_is_busy(side: Side) -> None:
    asked = [side.ask(MUCH, number) for number in range(3)]  # nobody reads
    side.thread.start()
    assert [values(answer)[0][1] for answer in asked] == [0, 1, 2]


def test_what_cannot_be_pickled_fails_where_it_is(side: Side) -> None:
    side.thread.start()
    with pytest.raises(TypeError, match="cannot pickle"):
        side.ask(threading.Lock())
    side.run = lambda requests: [Done(threading.Lock())]
    failure = side.ask(1).result(10)
    assert failure.traceback is not None, "the worker has not died"
    assert "cannot pickle" in failure.what
    side.run = lambda requests: [Done(2)]
    assert values(side.ask(1)) == [2]


def test_a_death_counts_after_the_answers_that_are_there(side: Side) -> None:
    begun = threading.Event()

    def run(requests: Sequence[Request]) -> list[Outcome]:
        if requests[0][1] == (1,):
            begun.set()
            threading.Event().wait(0.2)
        return [Done(requests[0][1][0])]

    side.run = run
    answered, late = side.ask(0), side.ask(1)
    side.thread.start()
    assert begun.wait(10)
    side.line.fail(GONE)
    assert values(answered) == [0]
    assert late.result(10) is GONE
    assert side.ask(2).result(10) is GONE


def test_a_worker_that_was_closed_takes_no_more(side: Side) -> None:
    side.thread.start()
    assert values(side.ask(method="close")) == [()]
    side.thread.join(10)
    assert not side.thread.is_alive()
    after = side.ask(3)
    assert not after.done()
    side.line.fail(GONE)
    assert after.result(10) is GONE


def test_a_driver_that_is_gone_ends_the_worker(side: Side) -> None:
    side.thread.start()
    assert values(side.ask(1)) == [(1,)]
    side.lines.close()
    side.lines.close()
    side.thread.join(10)
    assert not side.thread.is_alive()
