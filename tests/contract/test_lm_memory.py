"""The ledger against language models at work: what a rank really holds at its fullest moment of every stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memory_peaks import lm_cases, lm_models, lm_readings

MOST = 1.05  # times what is measured
MOST_ALIKE = (
    1.35  # the same of samples with tokens in common, which cost in attention alone
)
TABLES = 1 << 10  # bytes of rotary embeddings, which belong to no weight
# One of each kind of worker, on one rank and on two; the rest, with low-rank factors, takes minutes.
DEFAULT = (
    "wide heads, a critic",
    "cut between two ranks",
)
CASES = [
    case if case in DEFAULT else pytest.param(case, marks=pytest.mark.slow)
    for case in lm_cases(Path())
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lm_models(tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("case", CASES)
def test_what_is_held_is_foreseen_and_little_more(models: Path, case: str) -> None:
    job = lm_cases(models)[case]
    most = MOST_ALIKE if job.alike else MOST
    for readings in lm_readings(job):
        assert {reading.stage for reading in readings} >= {"learn"}
        for reading in readings:
            within = (
                reading.measured - TABLES
                <= reading.predicted
                <= most * reading.measured
            )
            assert within, (
                f"{reading.stage}: {reading.predicted} predicted, {reading.measured} measured"
            )
