"""What holds for every test: one thread per process, no GPU test without a GPU, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Read when torch and Ray are imported, so set before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  Ray's default of 15 starves workers on a busy machine

# torch asks the name server who connects to a store, and a query that is lost takes 5 s: no test needs its answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import hypothesis
import psutil
import pytest

from tests.absent import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401  hooks of pytest

# Every process started below this one inherits the mark, so that orphans are found too.
MARK = f"RLPLACE_TESTS={uuid.uuid4()}"
ENDING_S = 20.0  # how long a process may take to end by itself
# Started by the standard library and by torch on first use; they live as long as this process, on purpose.
STAYING = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch_shm_manager",
)

# Whoever starts the tests in the background may ignore SIGINT, and so would all processes that they start.
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
HANDLERS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    **dict.fromkeys(ENDING, signal.SIG_DFL),
}

_UNFREEZE = gc.unfreeze

hypothesis.settings.register_profile("shared-machine", deadline=None)
hypothesis.settings.register_profile("short", deadline=None, max_examples=25)


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile(
        "short" if config.option.markexpr == "not slow" else "shared-machine"
    )
    name, _, value = MARK.partition("=")
    os.environ[name] = value


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: the collector looks at none of it, nor copies its pages in each fork."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        # vLLM unfreezes all objects when an engine closes. Each engine start after that would search the whole heap of
        # the tests seven times.
        gc.unfreeze = _keep_frozen


def _keep_frozen() -> None:
    """Take the place of `gc.unfreeze` in the processes of the tests."""


def pytest_unconfigure() -> None:
    """Unfreeze all objects, which libraries report as leaked otherwise."""
    gc.unfreeze = _UNFREEZE
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = []
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        absent.append(("gpu", "no NVIDIA GPU on this machine"))
    if importlib.util.find_spec("vllm") is None:
        absent.append(("vllm", "vLLM is not installed"))
    for item in items:
        for mark, reason in absent:
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    """Fails a test whose direct child processes outlive it; those of wider fixtures (a shared Ray) began before it."""
    before = _children()
    yield
    _end_all(_children() - before, "this test left child processes")


@pytest.fixture(autouse=True)
def can_be_stopped() -> None:
    """Signals are to end the tests, whatever their parent or a run in this process made of them."""
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def no_orphan_left() -> Iterator[None]:
    """Fails the session when any descendant is alive at its end, also one whose parents are gone."""
    yield
    _end_all(_marked(), "the tests left processes")


def _children() -> set[psutil.Process]:
    """Direct children. /proc lists them in microseconds; psutil would read every process of the machine."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(
            FileNotFoundError, ProcessLookupError
        ):  # the thread ended meanwhile
            pids.update(int(pid) for pid in task.read_text().split())
    return {process for pid in pids if (process := _process(pid)) is not None}


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _marked() -> set[psutil.Process]:
    mark, me = MARK.encode(), os.getpid()
    found = set()
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:  # it ended meanwhile or belongs to somebody else
            continue
        if process.pid != me and mark in environment.split(b"\0"):
            found.add(process)
    return found


def _end_all(processes: set[psutil.Process], what: str) -> None:
    """Waits for `processes` to end by themselves; kills those that do not and fails the test."""
    _, alive = psutil.wait_procs(
        [p for p in processes if not _stays(p)], timeout=ENDING_S
    )
    if not alive:
        return
    lines = [f"    {p.pid}: {_command(p)}" for p in alive]
    for process in alive:
        process.kill()
    psutil.wait_procs(alive)
    pytest.fail("\n".join([f"{what}:", *lines]), pytrace=False)


def _stays(process: psutil.Process) -> bool:
    command = _command(process)
    return any(word in command for word in STAYING)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return "(ended)"
