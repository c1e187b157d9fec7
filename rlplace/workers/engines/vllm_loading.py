"""Loading weights into vLLM's workers: each loads its part, by vLLM's own steps.

::

    from the host           engine writes a bucket ─▶ every worker loads its part of it ─▶ the next bucket
    from actor ranks        every worker takes part in the sync, window by window, on its own accelerator

Functions whose first argument is `worker` run in each worker, through `collective_rpc`. An engine with one worker has
that worker in its own process, and takes weights from actor ranks in the same way.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rlplace.comm.weights.device_push import DevicePush
from rlplace.comm.weights.device_sync import LoadedParts, WindowTaker
from rlplace.errors import RlplaceError
from rlplace.models.checkpoint import as_stored
from rlplace.workers.engines.vllm_versions import reset_lora
from rlplace.workers.engines.weights import SharedBucket, in_buckets


def load_shards(engine: Any, items: Iterable[tuple[str, Tensor]]) -> None:
    """Let each of vLLM's workers load its shards of the weights, one bucket of whole weights after the other.

    `engine`: vLLM's engine. `items`: names and whole tensors. The weights are not passed as arguments of a call,
    because vLLM would pickle all of them, and each worker would receive the whole model.
    """
    engine.collective_rpc(_begin_reload)
    for bucket in in_buckets(items):
        engine.collective_rpc(_reload, args=(bucket,))
    engine.collective_rpc(_end_reload)


class NothingLoaded(Exception):
    """Error of a weight sync that failed before any worker began to load, so that the workers still have their old
    weights.

    `why`: the original error.
    """

    def __init__(self, why: Exception) -> None:
        super().__init__(str(why))
        self.why = why


def load_from(
    engine: Any,
    sync: DevicePush,
    rank: int,
    deadline_s: float,
    again: Mapping[str, str],
    others: Sequence[str],
    stored: frozenset[str],
) -> LoadedParts:
    """Let each of vLLM's workers receive a weight sync itself, and load its own part of the weights.

    Return the transports that carried the bytes, and the tensors of the sync that are not weights.

    `engine`: vLLM's engine. `sync`: the sync. `rank`: the rollout rank for which the workers receive. `deadline_s`:
    deadline, in seconds of the monotonic clock. `again`: name of a weight -> second name, under which it is loaded too.
    `others`: names of tensors that are not weights. `stored`: names in the model's files, by which vLLM loads weights.

    Raises NothingLoaded if no worker had begun to load, else WeightSyncError or ChannelTimeout.
    """
    parts: list[_PartLoaded] = engine.collective_rpc(
        _take_part, args=(sync, rank, deadline_s, again, others, stored)
    )
    errors = [part.error for part in parts if part.error is not None]
    if errors:
        any_begun = any(part.begun for part in parts)
        raise errors[0] if any_begun else NothingLoaded(errors[0])
    # Each worker has received the whole model, or its part of it, by its own transport
    size = sum(spec.size_bytes for spec in sync.assembly.layout.tensors)
    moved = collections.Counter[str]()
    for part in parts:
        moved[part.transport] += size
    return LoadedParts(transports=moved, others=parts[0].others)


# ── in the engine's workers ──────────────────────────────────────────────────────────────────────────────────────────


def pack_experts_anew(worker: Any) -> None:
    """Make the next load pack the weights of experts for the processor again, as the first load did. Do nothing on a
    GPU.

    A kernel of vLLM 0.32 packs the experts of a layer when it is created. A later load keeps this kernel, which would
    then read unpacked weights as if they were packed (`UnquantizedFusedMoEMethod._setup_kernel`). On a GPU nothing is
    packed, and CUDA graphs have captured the kernel.

    `worker`: worker of vLLM's engine.
    """
    for layer in worker.model_runner.get_model().modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(getattr(method, "unquantized_backend", None), "name", None) == "CPU":
            method.moe_kernel = None


def _begin_reload(worker: Any) -> None:
    """Begin to replace the weights in several parts, by the steps of vLLM's `reload_weights`.

    `worker`: worker of vLLM's engine.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    pack_experts_anew(worker)
    initialize_layerwise_reload(worker.model_runner.get_model())


def _reload(worker: Any, bucket: SharedBucket) -> None:
    """Load the weights of one bucket, between `_begin_reload` and `_end_reload`.

    `worker`: worker of vLLM's engine.
    """
    _load_some(worker, bucket.open())


def _load_some(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load some of the weights, between `_begin_reload` and `_end_reload`.

    `worker`: worker of vLLM's engine. `weights`: name in the model's files, and tensor.
    """
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.get_model().load_weights(weights)


def leave_syncs(worker: Any) -> None:
    """Leave the process group of device syncs, if this worker is in one.

    `worker`: worker of vLLM's engine.
    """
    taker: WindowTaker | None = getattr(worker, "window_taker", None)
    if taker is not None:
        taker.close()


class _PartLoaded(NamedTuple):
    """The result of a weight sync in one worker of vLLM.

    `transport`: how the bytes came. `begun`: whether loading had begun, so that the old weights are gone. `others`:
    tensors of the sync that are not weights. `error`: why the sync failed, or None. The error is not raised, because
    after a raised error vLLM assigns later answers to the wrong calls.
    """

    transport: str
    begun: bool  # whether the previous weights are gone
    others: dict[str, Tensor]
    error: Exception | None = None


def _take_part(
    worker: Any,
    sync: DevicePush,
    rank: int,
    deadline_s: float,
    again: Mapping[str, str],
    others: Sequence[str],
    stored: frozenset[str],
) -> _PartLoaded:
    """Receive a weight sync in this worker, load each group of weights (a window) as it arrives, and return the result.

    `worker`: worker of vLLM's engine. `sync`: the sync. `rank`: the rollout rank for which the workers receive.
    `deadline_s`: deadline, in seconds of the monotonic clock. `again`: name of a weight -> second name, under which it
    is loaded too. `others`: names of tensors that are not weights. `stored`: names in the model's files, by which vLLM
    loads weights.
    """
    # One connection per worker, for all syncs
    if not hasattr(worker, "window_taker"):
        left_s = max(1.0, deadline_s - time.monotonic())
        several = len(sync.delivery.takers_of(rank)) > 1
        worker.window_taker = WindowTaker(
            rank,
            worker.rank if several else None,
            device=worker.device,
            timeout_s=left_s,
        )
    taker: WindowTaker = worker.window_taker
    found: dict[str, Tensor] = {}
    begun = False
    error: Exception | None = None
    try:
        for window in taker.take(sync, deadline_s):
            if error is not None:
                # Receive the rest, since other processes wait for this one
                continue
            try:
                if not begun:
                    begun = True
                    _begin_reload(worker)
                for name in others:
                    if name in window:
                        found[name] = window.pop(name).cpu()
                # Tied weights are loaded under each of their names
                named = [*window.items()]
                for name, weight in window.items():
                    if name in again:
                        named.append((again[name], weight))
                _load_some(worker, as_stored(named, stored))
            except Exception as raised:  # noqa: BLE001  # vLLM raises errors of any kind
                error = raised
        if begun and error is None:
            _end_reload(worker)
    except Exception as raised:  # noqa: BLE001  # returned, and raised by the engine
        error = raised
    if begun and error is not None:
        _give_up_reload(worker)
    if error is not None and not isinstance(error, RlplaceError):
        error = taker.not_loaded(sync, error)
    return _PartLoaded(taker.transport(sync), begun, found, error)


def _give_up_reload(worker: Any) -> None:
    """Abandon a reload that has failed, so that the next reload starts from the beginning.

    Incomplete layers get back their old tensors, at the addresses that CUDA graphs have captured. vLLM's own end of a
    reload would instead load the parts that have arrived, and raise the error of the failed layer again.

    `worker`: worker of vLLM's engine.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in worker.model_runner.get_model().modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    _end_reload(worker)


def _end_reload(worker: Any) -> None:
    """Finish a reload: process the new weights, and drop caches that belong to the old weights.

    `worker`: worker of vLLM's engine.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    runner = worker.model_runner
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(runner.get_model(), runner.model_config)
    reset_lora(runner)
    runner.reset_encoder_cache()
    runner.reset_mm_cache()
