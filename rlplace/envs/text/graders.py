"""Runs reward functions on finished episodes.

Quick shipped functions run in this process, all other functions in grader processes with limits. Some shipped functions
are quick only with short answers: they run in this process for short answers, and in a grader process for long ones::

    submit(case) ──▶ waiting ──▶ a free process: function by function ──▶ done() ──▶ (case, rewards)
                                      └ a function that hangs: the process is killed, RewardError names the sample

Functions over lists get all samples of a prompt in one call, so that they can compare them. They wait for `whole`::

    submit(case) ──┬──▶ functions of one answer, at once ──────────────────────────────┬──▶ done() ──▶ (case, rewards)
                   └──▶ kept ── whole(group) ──▶ functions over lists, of the group ───┘

Such a process runs this file as a module. Its argument is the file descriptor of a pipe.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import multiprocessing.connection
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rlplace.config.blocks.engine import OnPoison
from rlplace.envs.text.code.runner import kill_session
from rlplace.envs.text.contract import Transcript
from rlplace.envs.text.failures import NO_USE, Failures
from rlplace.envs.text.math_library import PYTHON_NUMBERS
from rlplace.envs.text.rewards import Case, Reward, number_of, reward_failed
from rlplace.errors import RewardError
from rlplace.units import with_length

# Each reward function's number, by its name; without the functions that do not apply to the episode
Graded = tuple[Case, dict[str, float]]
# Seconds that a process may take to import the user's functions
_START_S = 120.0
# Seconds that a process with a closed pipe may take to end
_ENDING_S = 1.0
# Characters shown of an error, or of a value that is not a number
_SHOWN = 2_000
# Exceptions that are certainly errors of the function. Other exceptions, also those of derived classes, may have causes
# on this machine, such as a service that cannot be reached
_OWN_ERRORS = frozenset(
    {
        AttributeError,
        IndexError,
        KeyError,
        LookupError,
        NameError,
        NotImplementedError,
        TypeError,
        UnboundLocalError,
        ValueError,
        ZeroDivisionError,
        json.JSONDecodeError,
        re.error,
    }
)
# A process ends itself after so many deadlines, in case its parent was killed
_PATIENCE = 2


class InlineGrader:
    """A grader for quick shipped functions. It runs them in the caller's thread."""

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

    def is_quick(self, transcript: Transcript) -> bool:
        """Return whether all functions are quick with the answer of an episode."""
        return all(reward.quick(transcript) for reward, _ in self._functions)

    def submit(self, case: Case) -> None:
        """Grade the episode of `case`. Blocks until the functions have returned."""
        try:
            values = self._grade(case)
        except RewardError as error:
            self._failures.again(error, NO_USE)
            values = {reward.name: math.nan for reward, _ in self._functions}
        self._done.append((case, values))

    def _grade(self, case: Case) -> dict[str, float]:
        """Return reward function -> its value for an episode. Raises RewardError if a function fails."""
        values: dict[str, float] = {}
        for reward, function in self._functions:
            try:
                value = function(case.transcript)
            except ValueError as error:
                # The task does not give a fact, or an argument is out of range
                raise reward_failed(
                    reward, case, "reward-raised", error="refused", reason=str(error)
                ) from error
            values[reward.name] = number_of(reward, case, value, self._on_poison)
        return values

    @property
    def by_group(self) -> bool:
        """Whether a function waits for all episodes of a group: no shipped function does."""
        return False

    def whole(self, group: int) -> None:
        """Do nothing: shipped functions grade each answer by itself."""

    def done(self, *, wait: bool) -> list[Graded]:
        """Return (case, rewards) for each episode that was graded since the last call. `rewards`: name -> value.

        `wait` has no effect, since `submit` grades at once.
        """
        done = self._done
        self._done = []
        return done

    def close(self) -> None:
        """Drop all results that were not yet returned."""
        self._done = []


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """Episodes for one grader process, which calls some of the reward functions for them.

    `cases`: one episode, or several of a group. `rewards`: indices of the reward functions. `tries`: how often the work
    was repeated.
    """

    cases: tuple[Case, ...]
    rewards: tuple[int, ...]
    tries: int = 0


class _GraderProcess:
    """A process that runs reward functions, and its present work."""

    def __init__(
        self, rewards: Sequence[Reward], memory_bytes: int, timeout_s: float
    ) -> None:
        self.pipe, other = multiprocessing.connection.Pipe()
        # The process imports from the same places as this one
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        variables = {**os.environ, "PYTHONPATH": paths}
        if any(reward.written == "math_verify" for reward in rewards):
            variables |= PYTHON_NUMBERS
        try:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rlplace.envs.text.graders",
                    str(other.fileno()),
                ],
                env=variables,
                pass_fds=(other.fileno(),),
                # Everything that it starts is in its session, and is killed with it
                start_new_session=True,
            )
        finally:
            other.close()
        _limit(self.pipe, timeout_s)
        self.pipe.send((memory_bytes, timeout_s, list(rewards)))
        # The present work, and the number of its functions that have ended
        self.work: _Work | None = None
        self.ended = 0
        # Whether the functions are imported; and when to give up waiting
        self.ready = False
        self.deadline = time.monotonic() + _START_S

    def close(self) -> None:
        """Kill the process."""
        kill_session(self.popen)
        self.pipe.close()


def _limit(pipe: Connection, seconds: float) -> None:
    """Set a time limit for `pipe`: sending or receiving a message raises BlockingIOError after `seconds`."""
    # Of the kernel's struct timeval: seconds and microseconds. Zero would be no limit
    microseconds = max(1, int(seconds % 1 * 1e6))
    limit = struct.pack("ll", int(seconds), microseconds)
    with socket.socket(fileno=os.dup(pipe.fileno())) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


class ProcessGrader:
    """A grader that runs reward functions in at most `processes` processes, which it owns.

    It starts a further process when work waits and no process is free.
    """

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
        # Indices of the functions over lists, and of the functions of one answer
        lists = [index for index, reward in enumerate(rewards) if reward.takes_lists]
        self._of_groups = tuple(lists)
        self._of_answers = tuple(i for i in range(len(rewards)) if i not in lists)
        # Whether each function may return None, where it does not apply
        self._may_not_apply = [reward.may_not_apply for reward in rewards]
        # Cases of groups that are not whole yet, for functions over lists
        self._kept: dict[int, list[Case]] = {}
        # Values so far of cases in work, by index of the function; None: the function does not apply
        self._values: dict[tuple[int, int], dict[int, float | None]] = {}
        self._waiting: deque[_Work] = deque()
        self._processes: list[_GraderProcess] = []

    @property
    def by_group(self) -> bool:
        """Whether a function waits for all episodes of a group."""
        return bool(self._of_groups)

    def submit(self, case: Case) -> None:
        """Queue an episode that is to be graded. If a process is free, the functions of one answer begin at once.

        Functions over lists begin when `whole` says that all episodes of the group are here.
        """
        self._values[case.group, case.sample] = {}
        if self._of_groups:
            self._kept.setdefault(case.group, []).append(case)
        if self._of_answers:
            self._waiting.append(_Work((case,), self._of_answers))
        self._assign()

    def whole(self, group: int) -> None:
        """Queue the submitted episodes of `group` for the functions over lists: no other episode of it will come."""
        cases = self._kept.pop(group, [])
        if not cases:
            return
        # The order in which the episodes ended is not the same in each run
        cases.sort(key=lambda case: case.sample)
        self._waiting.append(_Work(tuple(cases), self._of_groups))
        self._assign()

    def done(self, *, wait: bool) -> list[Graded]:
        """Return (case, rewards) for each episode that was graded since the last call. `rewards`: name -> value.

        `wait`: whether to wait until at least one episode is graded, if any is being graded. Raises RewardError if a
        failure has to stop the run.
        """
        done: list[Graded] = []
        while busy := [worker for worker in self._processes if worker.work is not None]:
            # Wait for a message, no longer than the next deadline
            until = min(worker.deadline for worker in busy)
            pause = max(0.0, until - time.monotonic()) if wait and not done else 0.0
            heard: Sequence[object] = multiprocessing.connection.wait(
                [worker.pipe for worker in busy], pause
            )
            for worker in busy:
                if worker.pipe in heard:
                    done += self._hear(worker)
                elif worker.deadline <= time.monotonic():
                    limit_s = self._limit_s(worker) if worker.ready else _START_S
                    error = self._ended(worker, "reward-timeout", limit_s=limit_s)
                    done += self._failed(worker, error)
            if not heard and (done or not wait):
                break
        return done

    def _limit_s(self, worker: _GraderProcess) -> float:
        """Return the longest time of one call for the worker's work: that of one episode, for each of its episodes."""
        assert worker.work is not None
        return self._timeout_s * len(worker.work.cases)

    def _assign(self) -> None:
        """Give waiting work to free processes. Start a process if none is free and the limit is not reached."""
        while self._waiting:
            # Remove processes that died while they had no work: no function is to blame
            for worker in list(self._processes):
                if worker.work is None and worker.popen.poll() is not None:
                    worker.close()
                    self._processes.remove(worker)
            # Take a free process, or start one
            free = [worker for worker in self._processes if worker.work is None]
            if free:
                worker = free[0]
            elif len(self._processes) == self._most:
                return
            else:
                worker = _GraderProcess(
                    self._rewards, self._memory_bytes, self._timeout_s
                )
                self._processes.append(worker)
            worker.work = self._waiting.popleft()
            worker.ended = 0
            if worker.ready:
                self._show(worker)

    def _show(self, worker: _GraderProcess) -> None:
        """Send the transcripts of the worker's work to the worker's process.

        The process waits for the transcripts, so sending does not block, even if they are long. If the process stands
        still, this method returns at the deadline.
        """
        work = worker.work
        assert work is not None
        worker.deadline = time.monotonic() + self._limit_s(worker)
        transcripts = [case.transcript for case in work.cases]
        # `done` handles a process that has died or stands still
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError, BlockingIOError
        ):
            worker.pipe.send((work.rewards, transcripts, work.cases[0].seed))

    def _hear(self, worker: _GraderProcess) -> list[Graded]:
        """Handle one message of a process. Return the cases that are now graded by all functions.

        The message says that the process has imported the functions, or that one function has ended.
        """
        work = worker.work
        assert work is not None
        try:
            failure, values = worker.pipe.recv()
        except (EOFError, OSError):  # the pipe ended, perhaps within a message
            return self._failed(worker, self._died(worker))
        # First message: the functions are imported
        if not worker.ready:
            worker.ready = True
            self._show(worker)
            return []
        worker.deadline = time.monotonic() + self._limit_s(worker)
        index = work.rewards[worker.ended]
        reward = self._rewards[index]
        # A function that raised ends the work
        if failure is not None:
            text, own = failure
            raised = reward_failed(
                reward,
                work.cases[0],
                "reward-raised",
                error="raised",
                samples=len(work.cases),
                reason=text,
            )
            raised.own = own
            return self._failed(worker, raised)
        try:
            numbers = [
                self._number_of(index, case, value)
                for case, value in zip(work.cases, values, strict=True)
            ]
        except RewardError as error:
            # The process already runs the next function
            worker.close()
            self._processes.remove(worker)
            return self._failed(worker, error)
        for case, number in zip(work.cases, numbers, strict=True):
            self._values[case.group, case.sample][index] = number
        # More functions to come, or the work is done
        worker.ended += 1
        if worker.ended < len(work.rewards):
            return []
        worker.work = None
        self._assign()
        return self._graded(work.cases)

    def _number_of(self, index: int, case: Case, value: object) -> float | None:
        """Return a value of the function `index` as a float; None if the function does not apply to the episode.

        Raises RewardError as `number_of` does.
        """
        if value is None and self._may_not_apply[index]:
            return None
        return number_of(self._rewards[index], case, value, self._on_poison)

    def _graded(self, cases: Sequence[Case]) -> list[Graded]:
        """Return (case, rewards) for those of `cases` that all functions have graded, and forget their values."""
        graded: list[Graded] = []
        for case in cases:
            place = (case.group, case.sample)
            values = self._values[place]
            if len(values) == len(self._rewards):
                del self._values[place]
                rewards = {
                    reward.name: number
                    for index, reward in enumerate(self._rewards)
                    if (number := values[index]) is not None
                }
                graded.append((case, rewards))
        return graded

    def _failed(self, worker: _GraderProcess, error: RewardError) -> list[Graded]:
        """Handle a failure of the worker's work: queue it again, or give its cases nan for the rewards of the work.

        A case with nan is left out of training. Return the cases that are now graded by all functions. Raises `error`
        if the failure has to stop the run.
        """
        work = worker.work
        worker.work = None
        assert work is not None
        again = self._failures.again(error, work.tries, episodes=len(work.cases))
        if again:
            self._waiting.append(dataclasses.replace(work, tries=work.tries + 1))
        self._assign()
        if again:
            return []
        for case in work.cases:
            values = self._values[case.group, case.sample]
            values |= dict.fromkeys(work.rewards, math.nan)
        return self._graded(work.cases)

    def _ended(self, worker: _GraderProcess, code: str, **facts: Any) -> RewardError:
        """Kill the worker's process, and return the error of the reward function that it was running.

        `code`: code of the error. `facts`: values for its texts.
        """
        work = worker.work
        assert work is not None
        worker.close()
        self._processes.remove(worker)
        return reward_failed(
            self._rewards[work.rewards[worker.ended]],
            work.cases[0],
            code,
            samples=len(work.cases),
            **facts,
        )

    def _died(self, worker: _GraderProcess) -> RewardError:
        """Return the error of the reward function that was running when the worker's process died."""
        # Wait for its exit code; it may only have closed the pipe
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.popen.wait(_ENDING_S)
        # Now its exit code is known
        worker.close()
        return self._ended(
            worker,
            "reward-died",
            exit_code=worker.popen.returncode,
            memory=self._memory_bytes,
        )

    def close(self) -> None:
        """Drop all cases and end all processes. If a case is submitted later, a new process is started."""
        self._waiting.clear()
        self._kept.clear()
        self._values.clear()
        for worker in self._processes:
            worker.close()
        self._processes = []


class SplitGrader:
    """A grader for shipped functions, some of which are quick only with short answers.

    Episodes with short answers are graded in the caller's thread, all others in grader processes. So a long answer does
    not block the caller.
    """

    def __init__(self, here: InlineGrader, apart: ProcessGrader) -> None:
        """Use two graders of the same functions.

        `here`: grader for episodes with short answers. `apart`: grader for all others.
        """
        self._here = here
        self._apart = apart

    def submit(self, case: Case) -> None:
        """Grade the episode of `case` at once if its answer is short; otherwise queue it for a grader process."""
        if self._here.is_quick(case.transcript):
            self._here.submit(case)
        else:
            self._apart.submit(case)

    @property
    def by_group(self) -> bool:
        """Whether a function waits for all episodes of a group: no shipped function does."""
        return False

    def whole(self, group: int) -> None:
        """Do nothing: shipped functions grade each answer by itself."""

    def done(self, *, wait: bool) -> list[Graded]:
        """Return (case, rewards) for each episode that was graded since the last call. `rewards`: name -> value.

        `wait`: whether to wait until at least one episode is graded, if any is being graded. Raises RewardError if a
        failure has to stop the run.
        """
        here = self._here.done(wait=False)
        return here + self._apart.done(wait=wait and not here)

    def close(self) -> None:
        """Drop all cases and end all processes. If a case is submitted later, a new process is started."""
        self._here.close()
        self._apart.close()


Grader = InlineGrader | ProcessGrader | SplitGrader


def grader_of(
    rewards: Sequence[Reward],
    *,
    timeout_s: float,
    memory_bytes: int = 4 << 30,
    processes: int = 1,
    on_poison: OnPoison = "stop",
    failures: Failures | None = None,
) -> Grader:
    """Return a grader for these rewards.

    It is an InlineGrader if all functions are shipped and always quick, a SplitGrader if some of them are quick with
    short answers only, else a ProcessGrader.

    `timeout_s`: longest time of one function for one episode. `memory_bytes`: limit of each process. `processes`: the
    most processes. `on_poison`: what to do if a reward is not finite: "stop" or "skip". `failures`: decides what to do
    about failures; None: the first failure stops the run.
    """
    if all(reward.always_quick for reward in rewards):
        return InlineGrader(rewards, on_poison, failures)
    # Both graders count their failures together.
    failures = failures or Failures()
    apart = ProcessGrader(
        rewards,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
        processes=processes,
        on_poison=on_poison,
        failures=failures,
    )
    if all(reward.trusted for reward in rewards):
        return SplitGrader(InlineGrader(rewards, on_poison, failures), apart)
    return apart


# ── in a grading process ──────────────────────────────────────────────────────────────────────────────────────────────


def main(pipe: Connection) -> None:
    """Run a grading process: import the functions, then grade the transcripts from `pipe` until it is closed."""
    memory_bytes, timeout_s, rewards = pipe.recv()
    functions = [reward.function_of_several() for reward in rewards]
    # Limit data, not address space: libraries map far more than they use
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    pipe.send((None, "ready"))
    while True:
        try:
            asked, transcripts, seed = pipe.recv()
        except EOFError:
            # The grader was closed
            return
        grade(
            pipe,
            [functions[index] for index in asked],
            transcripts,
            timeout_s,
            seed=seed,
        )


def grade(
    pipe: Connection,
    functions: Sequence[Callable[[Sequence[Transcript]], Sequence[Any]]],
    transcripts: Sequence[Transcript],
    timeout_s: float,
    *,
    seed: str = "",
) -> None:
    """Run each function on the transcripts, and send its results through `pipe`.

    A message is (None, values), or ((error text, own), None) if the function raised; `own`: as in RewardError. After an
    error, the later functions are not run. `timeout_s`: longest time for one transcript. If a function takes much
    longer, a signal ends this process. `seed`: text from which the global random numbers in each function follow; "":
    they are not seeded.
    """
    patience_s = _PATIENCE * timeout_s * len(transcripts)
    for number, function in enumerate(functions):
        if seed:
            _seed_numbers(f"{seed}/{number}")
        # Without a handler this signal ends the process, even in C code
        signal.setitimer(signal.ITIMER_REAL, patience_s)
        try:
            # A function that changes facts changes only its own copy
            values = function(
                [
                    dataclasses.replace(told, facts=copy.deepcopy(told.facts))
                    for told in transcripts
                ]
            )
        except BaseException as error:  # noqa: BLE001  # any error of a user's function, and its exit, names the sample
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"\n{last.filename}:{last.lineno}, in {last.name}: {last.line}"
            message = "".join(traceback.format_exception_only(error)).strip()
            text = with_length(message, _SHOWN) + where
            pipe.send(((text, type(error) in _OWN_ERRORS), None))
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send((None, [_number(value) for value in values]))


def _seed_numbers(text: str) -> None:
    """Seed the global random numbers of Python, and of NumPy and torch if this process has imported them."""
    random.seed(text)
    number = random.getrandbits(32)
    random.seed(text)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def _number(value: Any) -> float | str | None:
    """Return a value as a float if possible, else as text; None stays None.

    The value itself is not sent, because unpickling it may need the user's libraries.
    """
    if value is None:
        return None
    try:
        return float(value)
    except Exception:  # noqa: BLE001  # the type of a user's value may raise anything
        pass
    try:
        return with_length(repr(value), _SHOWN)
    except Exception as error:  # noqa: BLE001  # repr may raise too, as of an int with more than 4,300 digits
        return f"a {type(value).__name__}, whose repr() raises {type(error).__name__}"


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
