"""Channels in shared memory for tests of this room."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.channel import SharedChannel
from tests.channel_peer import FORK, PATIENCE_S


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one, whatever the name of the user and of the test: sockets are made in job folders."""
    with tempfile.TemporaryDirectory(prefix="job_", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., SharedChannel]:
    return lambda **fields: SharedChannel.create(
        tmp_path,
        ChannelSpec(
            **{"name": "test", "capacity_items": 4, "timeout_s": PATIENCE_S, **fields}
        ),
    )


@pytest.fixture
def start() -> Iterator[Callable[..., BaseProcess]]:
    """Runs a task in a process of its own, which is killed at the end."""
    started: list[BaseProcess] = []

    def begin(task: Callable[..., Any], *arguments: Any) -> BaseProcess:
        started.append(FORK.Process(target=task, args=arguments))
        started[-1].start()
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.join()
