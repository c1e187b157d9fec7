"""The ledger against language models at work: what a rank really holds at its fullest moment of every stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memory_peaks import language_model, lm_cases, lm_readings

MOST = 1.05  # times what is measured
TABLES = 1 << 10  # bytes of rotary embeddings, which belong to no weight
# One of each kind of worker, on one rank and on two; the rest takes minutes.
DEFAULT = ("float32, one micro-batch", "low-rank factors", "Adam on the host", "critic", "cut between two ranks")
CASES = [case if case in DEFAULT else pytest.param(case, marks=pytest.mark.slow) for case in lm_cases(Path())]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_model(tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("case", CASES)
def test_what_is_held_is_foreseen_and_little_more(model: Path, case: str) -> None:
    for readings in lm_readings(lm_cases(model)[case]):
        assert {reading.stage for reading in readings} >= {"learn"}
        for reading in readings:
            within = reading.measured - TABLES <= reading.predicted <= MOST * reading.measured
            assert within, f"{reading.stage}: {reading.predicted} predicted, {reading.measured} measured"
