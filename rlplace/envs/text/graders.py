"""Runs reward functions over finished episodes: here for shipped ones, in processes with limits for all others.

::

    submit(case) ──▶ waiting ──▶ a free process: function by function ──▶ done() ──▶ (case, rewards)
                                      └ a function that hangs: the process is killed, RewardError names the sample
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from rlplace.envs.text.rewards import Case, Reward, number_of, reward_failed

Graded = tuple[Case, dict[str, float]]  # each reward function's own number, by its name
_START_S = 120.0  # longest that a process may take to import the user's functions


class Grader(Protocol):
    def submit(self, case: Case) -> None:
        """Does not block for longer than a shipped function takes."""
        ...

    def done(self, *, wait: bool) -> list[Graded]:
        """What was graded since asked last; `wait`: blocks until there is something, if anything is under way.

        Raises RewardError for the first function that failed.
        """
        ...

    def close(self) -> None: ...


def grader_of(
    rewards: Sequence[Reward], *, timeout_s: float, memory_bytes: int = 4 << 30, processes: int = 1
) -> Grader:
    """Shipped functions neither hang nor eat memory and run here; with any other, all run in processes."""
    if all(reward.trusted for reward in rewards):
        return InlineGrader(rewards)
    return ProcessGrader(rewards, timeout_s=timeout_s, memory_bytes=memory_bytes, processes=processes)


class InlineGrader:
    """Grades in the caller's thread, at once."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._functions = [(reward, reward.function()) for reward in rewards]
        self._done: list[Graded] = []

    def submit(self, case: Case) -> None:
        values: dict[str, float] = {}
        for reward, function in self._functions:
            try:
                value = function(case.transcript)
            except ValueError as error:  # a fact that the task does not give, an argument out of range
                raise reward_failed(reward, case, "reward-raised", "refused", str(error)) from error
            values[reward.name] = number_of(reward, case, value)
        self._done.append((case, values))

    def done(self, *, wait: bool) -> list[Graded]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        pass


class _Seat:
    """One process, and the case that it has on its hands."""

    def __init__(self, rewards: Sequence[Reward], memory_bytes: int, timeout_s: float) -> None:
        self.pipe, other = multiprocessing.connection.Pipe()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlplace.envs.text.grader_process", str(other.fileno())],
                env={**os.environ, "PYTHONPATH": paths},
                pass_fds=(other.fileno(),),
                start_new_session=True,  # so that what it starts can be killed with it
            )
        finally:
            other.close()
        self.pipe.send((memory_bytes, timeout_s, list(rewards)))
        self.case: Case | None = None
        self.values: dict[str, float] = {}
        self.ready = False
        self.deadline = time.monotonic() + _START_S

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


class ProcessGrader:
    """Grades in `processes` processes, which it owns; each starts with the first case that finds none free."""

    def __init__(self, rewards: Sequence[Reward], *, timeout_s: float, memory_bytes: int, processes: int) -> None:
        self._rewards, self._timeout_s, self._memory_bytes, self._most = rewards, timeout_s, memory_bytes, processes
        self._waiting: deque[Case] = deque()
        self._seats: list[_Seat] = []

    def submit(self, case: Case) -> None:
        self._waiting.append(case)
        self._assign()

    def done(self, *, wait: bool) -> list[Graded]:
        done: list[Graded] = []
        while busy := [seat for seat in self._seats if seat.case is not None]:
            until = min(seat.deadline for seat in busy)
            pause = max(0.0, until - time.monotonic()) if wait and not done else 0.0
            heard: Sequence[object] = multiprocessing.connection.wait([seat.pipe for seat in busy], pause)
            for seat in busy:
                if seat.pipe in heard:
                    done += self._hear(seat)
                elif seat.deadline <= time.monotonic():
                    raise self._late(seat)
            if not heard and (done or not wait):
                break
        return done

    def _assign(self) -> None:
        while self._waiting:
            seat = next((seat for seat in self._seats if seat.case is None), None)
            if seat is None:
                if len(self._seats) == self._most:
                    return
                self._seats.append(seat := _Seat(self._rewards, self._memory_bytes, self._timeout_s))
            seat.case, seat.values = self._waiting.popleft(), {}
            if seat.ready:
                self._show(seat)

    def _show(self, seat: _Seat) -> None:
        """The process is waiting for this, so a long transcript does not block either."""
        assert seat.case is not None
        seat.deadline = time.monotonic() + self._timeout_s
        try:
            seat.pipe.send(seat.case.transcript)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died(seat) from error

    def _hear(self, seat: _Seat) -> list[Graded]:
        """Takes one message: the process is ready, or what one function said."""
        case, reward = self._now(seat)
        try:
            failure, value = seat.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died(seat) from error
        if not seat.ready:
            seat.ready = True
            self._show(seat)
            return []
        seat.deadline = time.monotonic() + self._timeout_s
        if failure is not None:
            raise reward_failed(reward, case, "reward-raised", "raised", failure)
        seat.values[reward.name] = number_of(reward, case, value)
        if len(seat.values) < len(self._rewards):
            return []
        values, seat.case = seat.values, None
        self._assign()
        return [(case, values)]

    def _died(self, seat: _Seat) -> Exception:
        case, reward = self._now(seat)
        seat.close()
        self._seats.remove(seat)
        how = f"its process ended with {seat.process.returncode}; it may take {self._memory_bytes:,} bytes"
        return reward_failed(reward, case, "reward-died", "died", how)

    def _late(self, seat: _Seat) -> Exception:
        case, reward = self._now(seat)
        seat.close()
        self._seats.remove(seat)
        what = f"did not end within {self._timeout_s if seat.ready else _START_S:g} s"
        return reward_failed(reward, case, "reward-timeout", what, "its process was killed")

    def _now(self, seat: _Seat) -> tuple[Case, Reward]:
        """What the process is at: it goes through the functions in their order."""
        assert seat.case is not None
        return seat.case, self._rewards[len(seat.values)]

    def close(self) -> None:
        for seat in self._seats:
            seat.close()
        self._seats = []
