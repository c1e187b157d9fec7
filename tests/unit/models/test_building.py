"""Threads of one process build their models one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlplace.models.building import BUILDING
from rlplace.models.causal_lm import CausalLm, LmSpec, build
from rlplace.models.frozen_lm import FrozenLm, FrozenSpec
from rlplace.models.lora import LoraSpec
from rlplace.workers.engines.contract import CacheBytes, EngineSettings, Sampling
from rlplace.workers.engines.transformers import TransformersEngine
from rlplace.workers.training.ranks import Ranks
from tests.rollout_stage import Ledger


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether others had to wait, each time transformers was asked for a model."""
    seen: list[bool] = []
    made = AutoModelForCausalLM.from_config

    def from_config(*args: Any, **kwargs: Any) -> Any:
        seen.append(BUILDING.locked())
        return made(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    return seen


def test_others_wait_while_a_model_is_built(folder: Path, ranks: Ranks, seen: list[bool]) -> None:
    build(LmSpec(folder=folder, lora=LoraSpec(rank=2, alpha=4.0)), ranks.mesh)
    FrozenLm(CausalLm, FrozenSpec(folder=folder, dtype="bf16"), None, torch.device("cpu"))
    settings = EngineSettings(model=folder, dtype="fp32", context=64, memory=CacheBytes(size_bytes=1 << 20))
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, stop_token_ids=(), seed=0)
    TransformersEngine(settings, sampling, device=Ledger(), owner="rollout rank 0", rank=0)
    assert seen == [True, True, True]
    assert not BUILDING.locked()
