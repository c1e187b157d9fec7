"""What becomes of a sync between accelerators when a process of vLLM cannot load what came; threads stand for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.errors import WeightSyncError
from rlplace.workers.engines import vllm_loading
from tests.contract.device_sync import HOST, Mixture, ends_of
from tests.contract.weight_ends import PATIENCE_S, Weights, assert_equal_to_the_bit

CUT = Mixture(
    actors=2, hosts=(0, None, None), parts=(2, 1)
)  # reader 0 has two processes, reader 1 is whole


class Processes:
    """The processes of an engine, as threads, in place of vLLM's: each keeps what it loads once all of it has come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers = [
            SimpleNamespace(rank=n, device=HOST, weights={}, calls=[], refused=None)
            for n in range(2)
        ]
        self._threads = [ThreadPoolExecutor(1) for _ in self.workers]
        for step in (
            self._begin_reload,
            self._load_some,
            self._end_reload,
            self._give_up_reload,
        ):
            monkeypatch.setattr(vllm_loading, step.__name__, step)

    def collective_rpc(
        self, method: Callable[..., Any], args: tuple[Any, ...]
    ) -> list[Any]:
        each = zip(self._threads, self.workers, strict=True)
        return [
            future.result(PATIENCE_S)
            for future in [
                thread.submit(method, worker, *args) for thread, worker in each
            ]
        ]

    @staticmethod
    def _begin_reload(worker: Any) -> None:
        worker.calls, worker.loading = ["begin"], {}

    @staticmethod
    def _load_some(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            assert name != worker.refused, f"{name} is of another shape"
            worker.loading[name] = weight.clone()

    @staticmethod
    def _end_reload(worker: Any) -> None:
        assert worker.refused != "the end", "a layer is not whole"
        worker.calls.append("end")
        worker.weights = worker.loading

    @staticmethod
    def _give_up_reload(worker: Any) -> None:
        worker.calls.append("give up")


@pytest.mark.parametrize("refused", ["first", "third", "the end"])
def test_a_process_that_cannot_load_is_named_with_the_rank_that_lacks_the_version_and_no_other_waits(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = LocalChannel(
        ChannelSpec(name="weights", capacity_items=64, timeout_s=PATIENCE_S)
    )
    engine = Processes(monkeypatch)

    def sent(version: int) -> Weights:
        return {
            name: torch.full((40, 9), float(version))
            for name in ("first", "second", "third", "fourth")
        }

    with ends_of(CUT, channel, tmp_path) as ends:
        load = partial(
            vllm_loading.load_from,
            engine,
            again={},
            others=[],
            stored=frozenset(sent(0)),
        )
        monkeypatch.setattr(ends.receivers[0], "_load", load)
        for version in (1, 2, 3):
            failing = version == 2
            engine.workers[1].refused = refused if failing else None
            pushes, pulls = ends.push(version, sent(version)), ends.pull(version, dict)
            assert [push.exception(PATIENCE_S) for push in pushes] == [None, None]
            assert_equal_to_the_bit(pulls[1].result(PATIENCE_S)[0], sent(version))
            error = pulls[0].exception(PATIENCE_S)
            assert engine.workers[0].calls == ["begin", "end"]
            assert engine.workers[1].calls == ["begin", "give up" if failing else "end"]
            if not failing:
                assert error is None
                for worker in engine.workers:
                    assert_equal_to_the_bit(worker.weights, sent(version))
                continue
            assert isinstance(error, WeightSyncError)
            assert str(error).startswith(
                "rollout rank 0 part 1: version 2 could not be loaded: AssertionError: "
            )
            lacks = r"without version 2 now: rollout ranks? 0.*; an engine that had begun to load has no weights"
            assert re.search(lacks, str(error))
