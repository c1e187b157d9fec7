"""Builds the generation engine that the config names; only that one's libraries are imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.models.tokenizer import Tokenizer
from rlplace.workers.engines.contract import CacheBytes, EngineBudget, EngineShare, MemoryLimit, Sampling, TextEngine
from rlplace.workers.engines.vllm_support import VllmSettings
from rlplace.workers.llm_job import LlmJob
from rlplace.workers.worker import WorkerContext

if TYPE_CHECKING:
    from rlplace.config import Config


def build_engine(job: LlmJob, context: WorkerContext) -> TextEngine:
    """OFF, without weights."""
    rollout, algorithm = job.config.text_rollout, job.config.algorithm
    sampling = Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=Tokenizer.load(job.model).stop_token_ids,
        seed=rollout.seed,
    )
    memory = _memory(job.config, on_cpu=context.device.torch_name == "cpu")
    if rollout.engine == "transformers":
        from rlplace.workers.engines.transformers import TransformersEngine, TransformersSettings

        plain = TransformersSettings(
            model=job.model,
            dtype=rollout.dtype,
            context=algorithm.longest,
            memory=memory,
            step_sequences=rollout.step_sequences,
        )
        return TransformersEngine(plain, sampling, device=context.device, owner=context.owner, rank=context.rank)
    from rlplace.workers.engines.vllm import VllmEngine

    settings = VllmSettings(
        model=job.model,
        dtype=rollout.dtype,
        context=algorithm.longest,
        memory=memory,
        step_tokens=rollout.step_tokens,
        step_sequences=rollout.step_sequences,
        tensor_parallel=len(context.slot.accelerators),
        enforce_eager=rollout.enforce_eager,
        cache_fp8=rollout.cache == "fp8",
        sleep_level=rollout.sleep_level,
    )
    return VllmEngine(settings, sampling, device=context.device, owner=context.owner, rank=context.rank)


def _memory(config: Config, *, on_cpu: bool) -> MemoryLimit:
    """A share of an emulated accelerator is made bytes: an engine on the CPU would take it of the whole machine."""
    rollout = config.text_rollout
    if rollout.kv_cache_memory is not None:
        return CacheBytes(size_bytes=rollout.kv_cache_memory)
    share = rollout.gpu_memory_utilization
    assert isinstance(share, float), "auto is a number once there is a plan"
    if on_cpu:
        return EngineBudget(size_bytes=int(share * config.cluster.accelerator.memory))
    return EngineShare(gpu_memory_utilization=share)
