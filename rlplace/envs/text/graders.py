"""Runs reward functions over finished episodes: shipped ones here, all others in processes with limits.

::

    submit(case) ──▶ waiting ──▶ a free process: function by function ──▶ done() ──▶ (case, rewards)
                                      └ a function that hangs: the process is killed, RewardError names the sample

Run as a module, with the number of its end of a pipe, this is such a process.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing.connection
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rlplace.config.schema import OnPoison
from rlplace.envs.text.code_runner import kill_session
from rlplace.envs.text.failures import NO_USE, Failures
from rlplace.envs.text.rewards import Case, Reward, number_of, reward_failed
from rlplace.errors import RewardError

Graded = tuple[Case, dict[str, float]]  # each reward function's own number, by its name
_START_S = 120.0  # longest that a process may take to import the user's functions
_ENDING_S = 1.0  # longest that a process may take to end whose pipe is closed
_SHOWN = 2_000  # characters of an error or of a value that is no number
_PATIENCE = 2  # times the deadline: the parent that keeps it may have been killed


class InlineGrader:
    """Grades quick shipped functions at once, in the caller's thread."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        on_poison: OnPoison = "stop",
        failures: Failures | None = None,
    ) -> None:
        self._functions = [(reward, reward.function()) for reward in rewards]
        self._on_poison = on_poison
        self._failures = failures or Failures()
        self._done: list[Graded] = []

    def submit(self, case: Case) -> None:
        """Grade, or start grading; blocks no longer than a shipped function takes."""
        try:
            values = self._grade(case)
        except RewardError as error:
            self._failures.again(error, NO_USE)
            values = {reward.name: math.nan for reward, _ in self._functions}
        self._done.append((case, values))

    def _grade(self, case: Case) -> dict[str, float]:
        values: dict[str, float] = {}
        for reward, function in self._functions:
            try:
                value = function(case.transcript)
            except ValueError as error:
                # A fact that the task does not give, an argument out of range
                raise reward_failed(
                    reward, case, "reward-raised", "refused", str(error)
                ) from error
            values[reward.name] = number_of(reward, case, value, self._on_poison)
        return values

    def done(self, *, wait: bool) -> list[Graded]:
        """Return what is newly graded; with `wait`, block for one in flight. RewardError: the first that failed."""
        done = self._done
        self._done = []
        return done

    def close(self) -> None:
        """Drop what is graded."""
        self._done = []


class _GraderProcess:
    """One process, and the case that it works on."""

    def __init__(
        self, rewards: Sequence[Reward], memory_bytes: int, timeout_s: float
    ) -> None:
        self.pipe, other = multiprocessing.connection.Pipe()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rlplace.envs.text.graders",
                    str(other.fileno()),
                ],
                env={**os.environ, "PYTHONPATH": paths},
                pass_fds=(other.fileno(),),
                start_new_session=True,  # so that what it starts can be killed with it
            )
        finally:
            other.close()
        self.pipe.send((memory_bytes, timeout_s, list(rewards)))
        self.case: Case | None = None
        self.tries = 0  # of this case before
        self.values: dict[str, float] = {}
        self.ready = False
        self.deadline = time.monotonic() + _START_S

    def close(self) -> None:
        kill_session(self.popen)
        self.pipe.close()


class ProcessGrader:
    """Grades in `processes` processes, which it owns; each starts with the first case that finds none free."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        timeout_s: float,
        memory_bytes: int,
        processes: int,
        on_poison: OnPoison = "stop",
        failures: Failures | None = None,
    ) -> None:
        self._rewards = rewards
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._most = processes
        self._on_poison = on_poison
        self._failures = failures or Failures()
        self._waiting: deque[tuple[Case, int]] = deque()  # and how often it was tried
        self._processes: list[_GraderProcess] = []

    def submit(self, case: Case) -> None:
        self._waiting.append((case, 0))
        self._assign()

    def done(self, *, wait: bool) -> list[Graded]:
        """As InlineGrader's."""
        done: list[Graded] = []
        while busy := [worker for worker in self._processes if worker.case is not None]:
            until = min(worker.deadline for worker in busy)
            pause = max(0.0, until - time.monotonic()) if wait and not done else 0.0
            heard: Sequence[object] = multiprocessing.connection.wait(
                [worker.pipe for worker in busy], pause
            )
            for worker in busy:
                if worker.pipe in heard:
                    done += self._hear(worker)
                elif worker.deadline <= time.monotonic():
                    limit_s = self._timeout_s if worker.ready else _START_S
                    what = f"did not end within {limit_s:g} s"
                    done += self._failed(
                        worker,
                        self._ended(
                            worker, "reward-timeout", what, "its process was killed"
                        ),
                    )
            if not heard and (done or not wait):
                break
        return done

    def _assign(self) -> None:
        while self._waiting:
            for dead in [
                w
                for w in self._processes
                if w.case is None and w.popen.poll() is not None
            ]:
                dead.close()  # it was killed while it had nothing to do: no function is to blame
                self._processes.remove(dead)
            worker = next(
                (worker for worker in self._processes if worker.case is None), None
            )
            if worker is None:
                if len(self._processes) == self._most:
                    return
                self._processes.append(
                    worker := _GraderProcess(
                        self._rewards, self._memory_bytes, self._timeout_s
                    )
                )
            (worker.case, worker.tries), worker.values = self._waiting.popleft(), {}
            if worker.ready:
                self._show(worker)

    def _show(self, worker: _GraderProcess) -> None:
        """Send the transcript; the process waits for it, so a long one does not block either."""
        assert worker.case is not None
        worker.deadline = time.monotonic() + self._timeout_s
        # It has died, as is heard next
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.pipe.send(worker.case.transcript)

    def _hear(self, worker: _GraderProcess) -> list[Graded]:
        """Take one message: the process is ready, or one function's result."""
        assert worker.case is not None
        case = worker.case
        reward = self._rewards[len(worker.values)]
        try:
            failure, value = worker.pipe.recv()
        except (EOFError, OSError):  # at the end of a message, or within one
            return self._failed(worker, self._died(worker))
        if not worker.ready:
            worker.ready = True
            self._show(worker)
            return []
        worker.deadline = time.monotonic() + self._timeout_s
        if failure is not None:  # which ends the case there
            return self._failed(
                worker, reward_failed(reward, case, "reward-raised", "raised", failure)
            )
        try:
            worker.values[reward.name] = number_of(reward, case, value, self._on_poison)
        except RewardError as error:
            worker.close()  # it goes on with the next function
            self._processes.remove(worker)
            return self._failed(worker, error)
        if len(worker.values) < len(self._rewards):
            return []
        values = worker.values
        worker.case = None
        self._assign()
        return [(case, values)]

    def _failed(self, worker: _GraderProcess, error: RewardError) -> list[Graded]:
        """Try the case once more, or leave it out; raise the error where it is to stop the run."""
        case, worker.case = worker.case, None
        assert case is not None
        again = self._failures.again(error, worker.tries)
        if again:
            self._waiting.append((case, worker.tries + 1))
        self._assign()
        if again:
            return []
        return [(case, {reward.name: math.nan for reward in self._rewards})]

    def _ended(
        self, worker: _GraderProcess, code: str, what: str, why: str
    ) -> RewardError:
        """End a process; return the error that names what it was doing: it goes through the functions in order."""
        assert worker.case is not None
        worker.close()
        self._processes.remove(worker)
        return reward_failed(
            self._rewards[len(worker.values)], worker.case, code, what, why
        )

    def _died(self, worker: _GraderProcess) -> RewardError:
        # It ends by itself, unless it only closed its pipe
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.popen.wait(_ENDING_S)
        worker.close()  # now its exit code is known
        why = f"its process ended with {worker.popen.returncode}; it may take {self._memory_bytes:,} bytes"
        return self._ended(worker, "reward-died", "died", why)

    def close(self) -> None:
        """Drop all cases and end the processes; a case that is submitted later starts others."""
        self._waiting.clear()
        for worker in self._processes:
            worker.close()
        self._processes = []


Grader = InlineGrader | ProcessGrader


def grader_of(
    rewards: Sequence[Reward],
    *,
    timeout_s: float,
    memory_bytes: int = 4 << 30,
    processes: int = 1,
    on_poison: OnPoison = "stop",
    failures: Failures | None = None,
) -> Grader:
    """Return a grader in this thread for quick shipped functions, in processes if there is any other."""
    if all(reward.trusted for reward in rewards):
        return InlineGrader(rewards, on_poison, failures)
    return ProcessGrader(
        rewards,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
        processes=processes,
        on_poison=on_poison,
        failures=failures,
    )


# ── in a process apart ───────────────────────────────────────────────────────────────────────────────────────────────


def main(pipe: Connection) -> None:
    memory_bytes, timeout_s, rewards = pipe.recv()
    functions = [(reward, reward.function()) for reward in rewards]
    # Data, not address space: libraries map far more than they use.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    pipe.send((None, "ready"))
    while True:
        try:
            transcript = pipe.recv()
        except EOFError:
            return  # the grader is closed
        grade(pipe, functions, transcript, timeout_s)


def grade(
    pipe: Connection,
    functions: Sequence[tuple[Reward, Callable[..., Any]]],
    transcript: object,
    timeout_s: float,
) -> None:
    """Send (error, None) or (None, number) for each function; stop after the first that raised."""
    for _, function in functions:
        # Unhandled, its signal ends even code in C
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE * timeout_s)
        try:
            value = function(transcript)
        except BaseException as error:  # noqa: BLE001  # any error of a user's function, and its exit, names the sample
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"\n{last.filename}:{last.lineno}, in {last.name}: {last.line}"
            pipe.send(
                (
                    _short("".join(traceback.format_exception_only(error)).strip())
                    + where,
                    None,
                )
            )
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send((None, _number(value)))


def _number(value: Any) -> float | str:
    """Return a number, else what it is as text: reading it must not need the user's libraries."""
    try:
        return float(value)
    except Exception:  # noqa: BLE001  # whatever the type of the user's value raises
        pass
    try:
        return _short(repr(value))
    except Exception as error:  # noqa: BLE001  # and int has one of more than 4,300 digits
        return f"a {type(value).__name__}, whose repr() raises {type(error).__name__}"


def _short(text: str) -> str:
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]} ... ({len(text)} characters)"


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
