"""Tiny models on disk, made once, and a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.workers.training.ranks import Ranks
from tests.tiny_lm import Kind, tiny_model
from tests.worker_ranks import context_of, listen, rendezvous_at


@pytest.fixture(scope="session", params=["qwen3", "llama"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Qwen3 with a head of its own, Llama with a tied one."""
    kind: Kind = request.param
    return tiny_model(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """One rank; a process has one default process group."""
    joined = Ranks(
        context_of("actor", 0, 1, rendezvous_at(listen()), {}), timeout_s=60.0
    )
    yield joined
    joined.close()
