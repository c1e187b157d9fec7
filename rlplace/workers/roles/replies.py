"""Replies of text environments, computed in threads, several at a time, each with a deadline."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from rlplace.codes import problem
from rlplace.envs.text import NextTurn, Sampled, TextEpisode
from rlplace.errors import RewardError
from rlplace.units import clipped

Place = tuple[int, int]  # (group, sample)
# An answer as a text; and as it was sampled, for episodes with the method `replies`
Answer = tuple[str, Sampled | None]
# Most threads of this process that may still run after their reply was given up
MOST_HUNG = 64


class Reply(NamedTuple):
    place: Place
    # None: the episode is over
    said: str | NextTurn | Sequence[NextTurn] | None = None
    error: Exception | None = None  # the error that was raised instead of a reply


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Asked:
    place: Place
    dialogue: TextEpisode
    # To the turns that were asked at the same time
    answers: Sequence[Answer]

    @property
    def answer(self) -> str:
        return self.answers[-1][0]


class _Thread(threading.Thread):
    """A thread that computes one reply.

    A thread cannot be stopped from outside. If the reply misses its deadline, the thread may run on after its
    iteration.
    """

    given_up = False


class Replies:
    """Computes the replies of text environments in threads.

    `together`: the most replies that are computed at the same time. If it is 0, `ask` computes the reply in the
    caller's thread, without a deadline. `timeout_s`: the deadline of each reply, in seconds.

    A thread that has missed its deadline keeps running. A process may have at most `MOST_HUNG` such threads.
    """

    def __init__(self, *, together: int, timeout_s: float) -> None:
        self._together = together
        self._timeout_s = timeout_s
        self._waiting: deque[_Asked] = deque()
        # Requests in progress, with their deadlines
        self._running: dict[_Asked, float] = {}
        self._threads: dict[_Asked, _Thread] = {}
        self._ended: queue.SimpleQueue[tuple[_Asked, Reply]] = queue.SimpleQueue()

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._running)

    def ask(
        self, place: Place, dialogue: TextEpisode, answers: Sequence[Answer]
    ) -> None:
        """Begin the reply to answers. There is one answer, unless the episode has the method `replies`."""
        asked = _Asked(place, dialogue, answers)
        if self._together:
            self._waiting.append(asked)
            self._start()
        else:
            self._running[asked] = float("inf")
            self._make(asked)

    def done(self, wait_s: float) -> list[Reply]:
        """Return the replies that were finished since the last call.

        `wait_s`: the most seconds to wait for the first reply. A reply that misses its deadline is returned with a
        RewardError in `Reply.error`. Raises RewardError if more than `MOST_HUNG` threads still run after their
        deadlines.
        """
        found: list[Reply] = []
        while self._running:
            wait = (
                0.0
                if found
                else max(
                    0.0, min(wait_s, min(self._running.values()) - time.monotonic())
                )
            )
            try:
                asked, reply = (
                    self._ended.get(timeout=wait) if wait else self._ended.get_nowait()
                )
            except queue.Empty:
                break
            self._threads.pop(asked, None)
            # Otherwise this reply was given up before.
            if self._running.pop(asked, None) is not None:
                found.append(reply)
        now = time.monotonic()
        for asked in [
            asked for asked, deadline in self._running.items() if deadline <= now
        ]:
            self._give_up(asked)
            found.append(Reply(asked.place, error=self._late(asked)))
        self._start()
        return found

    def forget(self) -> None:
        """Drop all requests that are waiting or being computed; `done` will not return their replies.

        Raises RewardError if more than `MOST_HUNG` threads still run whose replies were dropped or late.
        """
        self._waiting.clear()
        for asked in tuple(self._running):
            self._give_up(asked)

    def _give_up(self, asked: _Asked) -> None:
        del self._running[asked]
        # The caller's thread computed it.
        if (thread := self._threads.pop(asked, None)) is None:
            return
        thread.given_up = True
        hung = [
            t.name
            for t in threading.enumerate()
            if isinstance(t, _Thread) and t.given_up
        ]
        if len(hung) > MOST_HUNG:
            raise self._too_many(asked, hung)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._together:
            asked = self._waiting.popleft()
            self._running[asked] = time.monotonic() + self._timeout_s
            name = f"reply for sample {asked.place[1]} of group {asked.place[0]}"
            thread = _Thread(target=self._make, args=(asked,), name=name, daemon=True)
            self._threads[asked] = thread
            thread.start()

    def _make(self, asked: _Asked) -> None:
        try:
            if replies := getattr(asked.dialogue, "replies", None):
                reply = Reply(asked.place, said=replies(asked.answers))
            else:
                said = asked.dialogue.reply(asked.answer)
                if not isinstance(said, str | NextTurn | None):
                    raise TypeError(
                        f"reply() returned a {type(said).__name__}, where a text or None is due"
                    )
                reply = Reply(asked.place, said=said)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever the task raises is reported by the episode
            told = (
                RuntimeError("reply() left the thread by SystemExit")
                if isinstance(error, SystemExit)
                else error
            )
            reply = Reply(asked.place, error=told)
        self._ended.put((asked, reply))

    def _too_many(self, asked: _Asked, hung: list[str]) -> RewardError:
        return RewardError(
            problem(
                "reply-timeout",
                "env.task",
                repr(clipped(asked.answer, 400)),
                error="too-many",
                count=len(hung),
                hung=", ".join(hung[:3]),
                most=MOST_HUNG,
            )
        )

    def _late(self, asked: _Asked) -> RewardError:
        group, sample = asked.place
        return RewardError(
            problem(
                "reply-timeout",
                "env.task",
                repr(clipped(asked.answer, 400)),
                error="late",
                timeout_s=self._timeout_s,
                sample=sample,
                group=group,
            )
        )
