"""Find workers that no longer answer while a method runs: stopped processes, and deadlocks that hold the interpreter.

::

    every heartbeat_s / LOOKS:   busy worker ── where()? ──▶ answered: asked again at the next look
                                                └ not for LOOKS looks: its call fails, as if its process had died
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from rlplace.workers.launch.group import WorkerGroup, WorkerHandle
from rlplace.workers.launch.host import Failure

LOOKS = 6  # looks within heartbeat_s
_END_S = 5.0  # longest wait for the thread to end; no look blocks


class _Question:
    """A question to a worker: which method does it run? `answer`: the future answer."""

    def __init__(self, answer: Future[str]) -> None:
        self.answer = answer
        # Looks without an answer. Looks are counted instead of seconds: a driver that was stopped has not looked.
        self.looks = 0
        self.asked = time.strftime("%H:%M:%S")


class Heartbeat:
    """A thread that asks the busy workers of `groups` what they do, and fails the calls of workers that do not answer.

    A worker has `heartbeat_s` seconds to answer, and at most one open question. Workers in `setup` are not asked,
    because imports and engines block the interpreter for a long time; `ray.start_timeout_s` limits `setup`. The thread
    runs inside the `with` block of this object.
    """

    def __init__(self, groups: Sequence[WorkerGroup], heartbeat_s: float) -> None:
        self._groups = groups
        self._heartbeat_s = heartbeat_s
        self._open: dict[WorkerHandle, _Question] = {}
        # The last answer of each worker
        self._places: dict[WorkerHandle, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="heartbeat", daemon=True
        )

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(_END_S)

    def _watch(self) -> None:
        while not self._over.wait(self._heartbeat_s / LOOKS):
            self.look()

    def look(self) -> None:
        """Fail the calls of workers whose answers are overdue, and ask each busy worker that has no open question."""
        busy = {
            group.handles[rank]: (group, call)
            for group in self._groups
            for rank, call in group.busy().items()
        }
        # Drop questions to workers that are idle, ended or replaced.
        self._open = {
            handle: question
            for handle, question in self._open.items()
            if handle in busy
        }
        self._places = {
            handle: place for handle, place in self._places.items() if handle in busy
        }
        for handle, (group, call) in busy.items():
            question = self._open.get(handle)
            if question is None or question.answer.done():
                if question is not None and question.answer.exception() is None:
                    self._places[handle] = question.answer.result()
                self._open[handle] = _Question(handle.where())
                continue
            question.looks += 1
            if question.looks >= LOOKS:
                group.fail(call, self._overdue(handle, question))

    def _overdue(self, handle: WorkerHandle, question: _Question) -> Failure:
        place = (
            f"; before, it was in {self._places[handle]}"
            if self._places.get(handle)
            else ""
        )
        return Failure(
            what=f"has not answered for {self._heartbeat_s:g} s, since {question.asked}{place}"
        )
