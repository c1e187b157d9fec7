"""What is the transformers engine's own: how it shares out its cache, and which models it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.errors import ConfigError
from rlplace.placement.schedule import Residency
from rlplace.workers.engines.contract import (
    CacheBytes,
    EngineBudget,
    EngineSettings,
    EngineShare,
    MemoryLimit,
    Sampling,
)
from rlplace.workers.engines.transformers import TransformersEngine
from tests.rollout_stage import Ledger
from tests.tiny_lm import tiny_model

CONTEXT = 32
ROW_BYTES = 2 * 2 * 2 * CONTEXT * 32 * 4  # keys and values, layers, heads, tokens, head size, bytes of fp32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def engine_of(folder: Path, memory: MemoryLimit, *, most: int = 4) -> TransformersEngine:
    settings = EngineSettings(model=folder, dtype="fp32", context=CONTEXT, memory=memory, step_sequences=most)
    return TransformersEngine(settings, Sampling(), device=Ledger(), owner="rollout rank 0", rank=0)


@pytest.mark.parametrize(("rows", "room"), [(1, 1), (3, 3), (9, 4)])
def test_the_cache_is_all_that_was_given_in_whole_rows(folder: Path, rows: int, room: int) -> None:
    engine = engine_of(folder, CacheBytes(size_bytes=rows * ROW_BYTES + ROW_BYTES - 1))
    weights = engine.move(Residency.WEIGHTS)
    assert engine.move(Residency.FULL) - weights == rows * ROW_BYTES
    assert engine.room == room


def test_a_budget_is_for_the_weights_too(folder: Path) -> None:
    weights = engine_of(folder, CacheBytes(size_bytes=ROW_BYTES)).move(Residency.WEIGHTS)
    engine = engine_of(folder, EngineBudget(size_bytes=weights + 2 * ROW_BYTES))
    assert engine.move(Residency.FULL) == weights + 2 * ROW_BYTES


@pytest.mark.parametrize(
    ("memory", "code"),
    [
        (CacheBytes(size_bytes=ROW_BYTES - 1), "kv-cache-too-small"),
        (EngineBudget(size_bytes=ROW_BYTES), "kv-cache-too-small"),
        (EngineShare(gpu_memory_utilization=0.5), "share-of-nothing"),
    ],
)
def test_a_cache_without_a_row_is_refused(folder: Path, memory: MemoryLimit, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_of(folder, memory)
    assert caught.value.codes == (code,)


def test_what_a_row_takes_is_said(folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.kv_cache_memory: {ROW_BYTES}"):
        engine_of(folder, CacheBytes(size_bytes=1))


def test_a_model_with_sliding_windows_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 8}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rollout\.engine: vllm") as caught:
        engine_of(tmp_path, CacheBytes(size_bytes=ROW_BYTES))
    assert caught.value.codes == ("attention-not-full",)
