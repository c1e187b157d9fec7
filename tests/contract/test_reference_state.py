"""A refreshed reference that was saved scores alike in new workers, however many ranks or hosts have it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlplace.checkpoints import written
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.models.sharding import own
from rlplace.placement.schedule import Residency
from rlplace.workers.worker import Rendezvous
from tests.lm_ranks import made_up_samples
from tests.scorer_ranks import (
    ScorerScenario,
    give,
    make_scorer,
    said,
    sole_scorer,
    values,
)
from tests.worker_ranks import in_processes

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, {}),
    "on the host": (1, {"on_host": True}),
    "sharded": (2, {"sharded": True}),
}


@torch.no_grad()
def save_another(scorer: Any, folder: Path) -> None:
    """Weights that no folder of a model has, as after a refresh; read while they are off."""
    for weight in scorer._lm.module.lm.parameters():
        own(weight).mul_(1.5)
    scorer.move(Residency.OFF)
    scorer.write_state(str(folder))


def _rank(
    saved: Path,
    scenario: ScorerScenario,
    rank: int,
    rendezvous: Rendezvous,
    folder: Path,
) -> None:
    channels = {
        spec.name: SharedChannel.attach(folder / f"{spec.name}.channel")
        for spec in scenario.specs
    }
    scorer = make_scorer(scenario, channels, rank=rank, rendezvous=rendezvous)
    try:
        save_another(scorer, saved)
    finally:
        scorer.close()


def scores(
    scenario: ScorerScenario, scorer: Any, channels: Any
) -> dict[tuple[int, int], list[float]]:
    groups = made_up_samples()
    give(scenario, channels, groups)
    scorer.infer(0, 0)
    return said(scenario, channels, sum(map(len, groups)))


@pytest.mark.parametrize("way", WAYS)
def test_another_goes_on_with_the_weights_that_were_saved(
    way: str, qwen: Path, tmp_path: Path
) -> None:
    ranks, block = WAYS[way]
    scenario = ScorerScenario(model=qwen, block={**block, "refresh_every": 2})
    expected = None
    if ranks == 1:
        with sole_scorer(scenario) as (scorer, channels):
            save_another(scorer, tmp_path)
            scorer.move(Residency.FULL)
            expected = scores(scenario, scorer, channels)
    else:
        several = dataclasses.replace(scenario, ranks=ranks)
        in_processes(
            functools.partial(_rank, tmp_path), several, ranks, channels=scenario.specs
        )
    assert written(tmp_path, ranks)
    plain = ScorerScenario(model=qwen, block={"refresh_every": 2})
    with sole_scorer(plain) as (scorer, channels):
        before = scores(plain, scorer, channels)
        scorer.move(Residency.OFF)
        assert scorer.read_state(str(tmp_path))
        scorer.move(Residency.FULL)
        found = scores(plain, scorer, channels)
        whole = {
            name: own(weight).clone()
            for name, weight in scorer._lm.module.lm.named_parameters()
        }
    assert found != before
    if expected is not None:
        np.testing.assert_allclose(values(found), values(expected), rtol=1e-5)
    with sole_scorer(plain) as (scorer, _):
        for name, weight in scorer._lm.module.lm.named_parameters():
            assert torch.equal(1.5 * own(weight), whole[name]), name
