"""The first signal asks where a run can save, the second ends it; a run that does not come to an end is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from rlplace.signals import (
    WARNINGS,
    Signals,
    Stopped,
    blocked_signals,
    deferred,
    deliver_deferred,
)

SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def signals() -> Iterator[Signals]:
    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, *WARNINGS)
    before = {each: signal.getsignal(each) for each in taken}
    listening = Signals()
    listening.listen()
    yield listening
    for each, handler in before.items():
        signal.signal(each, handler)


def _send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the interpreter runs handlers between two instructions


def test_a_signal_stops_at_once_where_there_is_nothing_to_save(
    signals: Signals,
) -> None:
    with pytest.raises(Stopped, match="SIGTERM") as stopped:
        _send(signal.SIGTERM)
    assert stopped.value.exit_code == 143


@pytest.mark.parametrize("number", sorted(WARNINGS))
def test_a_warning_ends_a_run_as_a_signal_to_end_does(
    signals: Signals, number: signal.Signals
) -> None:
    with signals.patient(60.0):
        _send(number)
        assert signals.asked == number
    with pytest.raises(Stopped, match=number.name) as stopped:
        signals.check()
    assert stopped.value.exit_code == 128 + number
    assert stopped.value.by_scheduler == (number in SCHEDULERS)


@pytest.mark.parametrize("first", [signal.SIGINT, *SCHEDULERS])
def test_a_second_signal_of_a_scheduler_leaves_the_first_its_time(
    signals: Signals, first: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with signals.patient(60.0):
        _send(first)
        assert (
            "again: ends now" if first == signal.SIGINT else "Ctrl-C: ends now"
        ) in capfd.readouterr().err
        for number in (*SCHEDULERS, *SCHEDULERS):
            _send(number)
        assert signals.asked == first
        assert not signals.at_once
        with pytest.raises(Stopped, match=first.name):
            _send(signal.SIGINT)
        assert signals.at_once


def test_a_second_signal_of_a_scheduler_leaves_what_is_written_at_the_end(
    signals: Signals,
) -> None:
    with signals.patient(60.0):
        _send(signal.SIGTERM)
    _send(signal.SIGTERM)  # in the middle of the summary


@pytest.mark.parametrize("number", sorted(WARNINGS))
def test_a_warning_that_is_ignored_stays_so(number: signal.Signals) -> None:
    """As `nohup` starts a program."""
    signal.signal(number, signal.SIG_IGN)
    ignoring = Signals()
    ignoring.listen()
    with ignoring.patient(60.0):
        _send(number)
        with deferred():
            _send(number)
    assert ignoring.asked is None
    assert signal.getsignal(number) == signal.SIG_IGN


def test_a_warning_that_a_program_handles_itself_stays_its_own() -> None:
    """Such as submitit, which calls the run in its own process."""
    came = []
    signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    listening = Signals()
    listening.listen()
    _send(signal.SIGUSR2)
    assert came == [signal.SIGUSR2]
    assert listening.asked is None


def test_a_second_run_of_a_process_takes_warnings_too(signals: Signals) -> None:
    second = Signals()
    second.listen()
    with pytest.raises(Stopped):
        _send(signal.SIGUSR1)
    assert second.asked == signal.SIGUSR1
    assert signals.asked is None


def test_warnings_reach_no_process_that_is_started_meanwhile(signals: Signals) -> None:
    with blocked_signals():
        child = subprocess.Popen(["sleep", "60"])
    try:
        for number in WARNINGS:
            child.send_signal(number)
        time.sleep(0.05)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()

    def warned() -> None:
        with blocked_signals():
            _send(signal.SIGUSR1)
            assert signals.asked is None

    with pytest.raises(Stopped, match="SIGUSR1"):
        warned()


def test_the_first_only_asks_and_the_second_stops(
    signals: Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with signals.patient(60.0):
        _send(signal.SIGINT)
        assert signals.asked == signal.SIGINT
        said = capfd.readouterr().err
        assert "SIGINT: ends after this iteration and saves, within 60 s" in said
        assert "one that takes longer than 30 s is dropped; again: ends now" in said
        with pytest.raises(Stopped, match="SIGINT"):
            _send(signal.SIGINT)
        assert signals.at_once
        _send(signal.SIGINT)  # a third does nothing
    with pytest.raises(Stopped):
        signals.check()


def test_signals_wait_while_they_are_deferred(signals: Signals) -> None:
    ended = []

    def defer() -> None:
        with deferred():
            _send(signal.SIGINT)
            _send(signal.SIGTERM)
            ended.append(True)

    with pytest.raises(Stopped, match="SIGINT"):
        defer()
    assert ended
    with deferred():  # what ends now is not interrupted
        _send(signal.SIGTERM)


def test_signals_that_are_deferred_are_delivered_where_asked(signals: Signals) -> None:
    def defer() -> None:
        with deferred():
            deliver_deferred()
            _send(signal.SIGTERM)
            deliver_deferred()
            raise AssertionError("nothing is begun after it")

    with pytest.raises(Stopped, match="SIGTERM"):
        defer()
    deliver_deferred()


def test_a_first_signal_still_only_asks_after_it_was_deferred(signals: Signals) -> None:
    with signals.patient(60.0), deferred():
        _send(signal.SIGINT)
        deliver_deferred()
        assert signals.asked == signal.SIGINT
        _send(signal.SIGINT)
        with pytest.raises(Stopped):
            deliver_deferred()


def test_the_second_signal_ends_a_run_also_where_both_were_deferred(
    signals: Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    def defer() -> None:
        with deferred():
            _send(signal.SIGINT)
            _send(signal.SIGINT)

    with signals.patient(60.0), pytest.raises(Stopped, match="SIGINT"):
        defer()
    assert signals.at_once
    assert capfd.readouterr().err.count("SIGINT: taken after this step\n") == 2


def test_the_end_of_the_grace_waits_for_the_end_of_a_call_of_ray(
    signals: Signals,
) -> None:
    whole = False

    def call_ray() -> None:
        nonlocal whole
        with deferred():
            _send(signal.SIGINT)
            deliver_deferred()
            # The time of the iteration ends meanwhile.
            time.sleep(0.3)
            whole = True
            deliver_deferred()

    with signals.patient(0.4), pytest.raises(Stopped, match="SIGINT"):
        call_ray()
    assert whole
    assert not signals.at_once, "the second half is for saving"


def test_another_thread_leaves_deferred_signals_to_the_main_thread(
    signals: Signals,
) -> None:
    failed = list[Exception]()

    def deliver() -> None:
        try:
            deliver_deferred()
        except ValueError as error:
            failed.append(error)

    def defer() -> None:
        with deferred():
            _send(signal.SIGTERM)
            thread = threading.Thread(target=deliver)
            thread.start()
            thread.join()

    with pytest.raises(Stopped, match="SIGTERM"):
        defer()
    assert not failed


def test_what_fails_after_a_signal_is_due_to_it(signals: Signals) -> None:
    def load() -> None:
        with signals.explaining():
            try:
                _send(signal.SIGINT)
            except Stopped:
                raise ImportError("broken by it") from None

    with pytest.raises(ImportError), signals.explaining():
        raise ImportError("absent")
    with pytest.raises(Stopped, match="SIGINT"):
        load()


def test_half_of_the_grace_is_for_the_iteration(signals: Signals) -> None:
    with signals.patient(0.2):
        _send(signal.SIGINT)
        with pytest.raises(Stopped, match="SIGINT") as stopped:
            time.sleep(30.0)
    assert stopped.value.exit_code == 130
    with pytest.raises(Stopped):  # what is saved meanwhile can be ended, too
        _send(signal.SIGINT)


def test_no_alarm_is_left_behind(signals: Signals) -> None:
    with signals.patient(0.2):
        _send(signal.SIGINT)
    time.sleep(0.3)
    assert signals.asked == signal.SIGINT


IN_TORCH = """
    import sys, threading, torch
    from rlplace.cli.train import program

    def learn():
        weights = torch.randn(300, 300, requires_grad=True)
        while True:
            (weights @ weights).sum().backward()

    threading.Thread(target=learn, name="actor rank 0", daemon=True).start()
    sys.argv = ["train", "--help"]
    program()
"""


def test_a_program_ends_well_while_an_inline_worker_is_in_the_middle_of_torch() -> None:
    command = [sys.executable, "-c", textwrap.dedent(IN_TORCH)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage" in done.stdout.lower()
