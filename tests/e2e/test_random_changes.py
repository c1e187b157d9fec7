"""benchmarks/random_changes.py: two random sequences of changes, with workers that are killed in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(
    0, str(Path(__file__).parents[2] / "benchmarks")
)  # as when it is run as a script

import random_changes

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def test_random_changes_with_kills_lose_nothing(tmp_path: Path) -> None:
    (found,) = random_changes.measure([range(2)], tmp_path, 400.0)
    assert found.wrong == ()
    assert found.made + found.kept > 0
    assert found.refused > 0
    assert found.kills
