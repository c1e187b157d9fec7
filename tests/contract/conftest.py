"""Models that contract tests read and never write, and workers of one rank that train them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_lm import tiny_model


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def actor_of() -> Iterator[Callable[..., Any]]:
    """Makes a worker of one rank, of the actor or another component; one at a time: each closes the one before.

    A process has one default process group.
    """
    from tests.lm_ranks import LmScenario, make_lm_worker
    from tests.worker_ranks import listen, rendezvous_at

    made: list[Any] = []

    def make(model: Path, **scenario: Any) -> Any:
        for worker in made:
            worker.close()
        made.append(
            make_lm_worker(
                LmScenario(model=model, **scenario), 0, rendezvous_at(listen())
            )
        )
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def critic_of(actor_of: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(actor_of, component="critic")
