"""Models that whole runs train and score with, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_lm import tiny_model
from tests.tiny_reward import digit_scorer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_scorer(tmp_path_factory.mktemp("models") / "tiny_reward")


@pytest.fixture(scope="session")
def models(model: Path, scorer: Path) -> tuple[str, ...]:
    """Overrides of rlhf_tiny."""
    return (f"actor.model.path={model}", f"reward.model.path={scorer}")
