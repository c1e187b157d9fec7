"""benchmarks/placements.py with work that takes no time: every placement runs and learns the same samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(
    0, str(Path(__file__).parents[2] / "benchmarks")
)  # as when it is run as a script

import placements
from emulated_work import SAMPLES, Model


@pytest.mark.parametrize("name", placements.PLACEMENTS)
def test_a_placement_learns_all_samples(name: str) -> None:
    found = placements.measure(name, [Model(name="quick", scale=1e6)], 1, "inline")
    (row,) = found.rows
    whole = [sum(Model(name="").lengths(sample)) for sample in range(SAMPLES)]
    assert row.samples == (SAMPLES, sum(whole), sum(n * n for n in whole))
    assert 0.0 <= row.busy <= 1.0
    assert found.picture.startswith("<svg")


def test_the_plan_says_who_wins_where() -> None:
    models = {model.name: model for model, _ in placements.CASES}

    def predicted(name: str, model: str) -> float:
        return placements.predict(
            placements.layout_of(placements.PLACEMENTS[name]), models[model]
        )

    assert predicted("hybrid", "long answers") < predicted("collocated", "long answers")
    assert predicted("collocated", "slow environments") < predicted(
        "hybrid", "slow environments"
    )
    assert predicted("disaggregated, 1 ahead", "slow host") < predicted(
        "hybrid", "slow host"
    )
    assert predicted("hybrid", "even") < predicted("hybrid, partial overlap", "even")
