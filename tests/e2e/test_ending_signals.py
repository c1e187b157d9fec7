"""Runs that schedulers warn and end, and terminals that close: the run saves, says so by its exit code, and goes on."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from rlplace.checkpoints.find import find, verify
from tests.e2e.training import (
    INLINE,
    LIMIT_S,
    ROOT,
    SMALL,
    Finished,
    finish,
    placed,
    read_until,
    start,
    train,
)

ENDLESS = (
    *(
        "env.id=CartPole-v1",
        "actor.optimizer.schedule=constant",
        "runner.stop_at_return=null",
    ),
    *("runner.total_iterations=390625", "checkpoint.every=0"),
)
INLINE_JOB = (*INLINE, *placed("0", "0", "1"), *ENDLESS)
RAY_JOB = (*SMALL, *placed("0-1", "0", "1"), *ENDLESS)
REQUEUE = 85


def is_saved(run: Finished) -> None:
    """Check that the last checkpoint is whole, and of the last iteration that was logged."""
    assert run.folder is not None
    checkpoint = find(str(run.folder), Path())
    assert checkpoint is not None
    verify(checkpoint)
    assert checkpoint.iteration == run.summary()["iterations"] == len(run.metrics())
    assert run.summary()["state"] == "stopped"


def ended_by(
    numbers: Sequence[signal.Signals], output: Path, *overrides: str
) -> Finished:
    """Send signals to a run that is at work, 0.2 s from one to the next."""
    process = start("hybrid_ppo", output, *INLINE_JOB, *overrides)
    seen = read_until(process, "    3 ")
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.2)
    return finish(process, output, seen)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (signal.SIGHUP, signal.SIGUSR2)
        ),
    ],
)
def test_a_warning_saves_before_the_run_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    run = ended_by([number], tmp_path, "runner.requeue_exit_code=null")
    assert run.code == 128 + number
    assert f"{number.name}: ends after this iteration and saves" in run.err
    assert f"stopped by {number.name}" in run.err
    is_saved(run)


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((signal.SIGTERM, signal.SIGTERM), marks=pytest.mark.slow),
        pytest.param(
            (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM), marks=pytest.mark.slow
        ),
        pytest.param(
            (signal.SIGINT, signal.SIGTERM), marks=pytest.mark.slow
        ),  # as LSF ends a job
    ],
)
def test_a_scheduler_that_sends_several_signals_costs_no_checkpoint(
    tmp_path: Path, numbers: Sequence[signal.Signals]
) -> None:
    """The iteration of 3 s is under way when the second one comes."""
    slow = (
        "env.total_num_envs=512",
        "algorithm.rollout_steps=64",
        "algorithm.epochs=8",
        "checkpoint.grace_s=200",
    )
    run = ended_by(numbers, tmp_path, *slow)
    assert run.code == 128 + numbers[0]
    is_saved(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGUSR1, REQUEUE),
        pytest.param(signal.SIGTERM, REQUEUE, marks=pytest.mark.slow),
        pytest.param(
            signal.SIGINT, 130, marks=pytest.mark.slow
        ),  # a person wants no other attempt
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_a_scheduler_ends_asks_to_be_queued_again(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = ended_by([number], tmp_path, f"runner.requeue_exit_code={REQUEUE}")
    assert run.code == code
    is_saved(run)
    done = run.summary()["iterations"]
    again = train(
        "hybrid_ppo",
        tmp_path,
        *INLINE_JOB,
        "resume=auto",
        f"runner.total_iterations={done + 1}",
    )
    assert again.code == 0
    assert len(again.metrics()) == done + 1


def test_a_run_without_a_checkpoint_does_not_ask_to_be_queued_again(
    tmp_path: Path,
) -> None:
    process = start(
        "hybrid_ppo", tmp_path, *INLINE_JOB, f"runner.requeue_exit_code={REQUEUE}"
    )
    seen = read_until(process, "starting ")
    process.terminate()
    run = finish(process, tmp_path, seen)
    assert run.code == 128 + signal.SIGTERM


def test_a_run_that_ignores_hang_ups_goes_on(tmp_path: Path) -> None:
    process = start(
        "hybrid_ppo", tmp_path, *INLINE_JOB, inside=("nohup",), stdin=subprocess.DEVNULL
    )
    seen = read_until(process, "    2 ")
    process.send_signal(signal.SIGHUP)
    seen += read_until(process, "    4 ")
    process.terminate()
    run = finish(process, tmp_path, seen)
    assert run.code == 128 + signal.SIGTERM
    assert "SIGHUP" not in run.err
    is_saved(run)


def in_a_terminal(output: Path, *overrides: str) -> tuple[int, int]:
    """Start a run in a terminal of its own; return its process, and the other end of the terminal."""
    words = [
        sys.executable,
        "-u",
        "-m",
        "rlplace.train",
        "--config-name",
        "hybrid_ppo",
        f"runner.output_dir={output}",
    ]
    child, terminal = pty.fork()
    if not child:
        with contextlib.suppress(OSError):
            os.chdir(ROOT)
            os.execv(sys.executable, [*words, *overrides])
        os._exit(127)
    return child, terminal


def read_terminal(terminal: int, until: bytes) -> None:
    seen = b""
    while until not in seen:
        seen += os.read(terminal, 1 << 16)


@pytest.mark.parametrize(
    "job",
    [
        # The signal ends a run of threads as it ends the driver of one on Ray.
        pytest.param(INLINE_JOB, id="inline", marks=pytest.mark.slow),
        pytest.param(RAY_JOB, id="ray", marks=[pytest.mark.ray, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize(
    "display", ["dumb", pytest.param("xterm", marks=pytest.mark.slow)]
)
def test_a_terminal_that_is_gone_costs_nothing_that_was_learned(
    tmp_path: Path, job: Sequence[str], display: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an ssh drops: the kernel sends SIGHUP to all processes of the terminal, and writing to it fails."""
    monkeypatch.setenv("TERM", display)
    child, terminal = in_a_terminal(tmp_path, *job)
    try:
        read_terminal(terminal, b"files: ")
        (file,) = tmp_path.glob("*/*/metrics.jsonl")
        while file.read_text(encoding="utf-8").count("\n") < 3:
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 1 << 16)
        started = psutil.Process(child).children(recursive=True)
    finally:
        os.close(terminal)
    _, status = os.waitpid(child, 0)
    (folder,) = tmp_path.glob("*/*")
    run = Finished(os.waitstatus_to_exitcode(status), "", "", folder)
    assert run.code == 128 + signal.SIGHUP
    is_saved(run)
    _, alive = psutil.wait_procs(started, timeout=20.0)
    assert [process.cmdline() for process in alive] == []


@pytest.mark.slow  # the end of a terminal, above, is a signal to every process too
@pytest.mark.ray
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_every_process_of_a_run_saves(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As Slurm signals a step: Ray's servers and all workers get it too."""
    process = start("hybrid_ppo", tmp_path, *RAY_JOB, start_new_session=True)
    seen = read_until(process, "    3 ")
    started = psutil.Process(process.pid).children(recursive=True)
    for each in [psutil.Process(process.pid), *started]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)
    run = finish(process, tmp_path, seen)
    assert run.code == 128 + number, run.err
    is_saved(run)
    _, alive = psutil.wait_procs(started, timeout=20.0)
    assert [each.cmdline() for each in alive] == []
