"""The only module that knows how versions of vLLM differ.

Each function checks whether vLLM has a function or attribute, and not which version number it has. The sources of
0.26.0 and 0.32.0 were read, and both were tried on a CPU.

========================  =============================  ======================================================
what                      newer (0.32)                   older (0.26)
========================  =============================  ======================================================
memory of the KV cache    `release_kv_cache_memory`      `unmap_cache` of this module
a sleep after that        skips what is asleep           would unmap it twice: `sleep_but_for_what_sleeps`
pools of memory           a list of pairs for each tag   the last pair of each tag: `pools`
adapters after a reload   `reset_lora_state`             there is none: `reset_lora`
config while it reloads   set by the worker              not set: `reload`
draws on a CPU            by seed, if there is one       ignore seeds if one answer has none: `seeded_draws`
========================  =============================  ======================================================

Functions whose first argument is `worker` run in each of the engine's workers, through `collective_rpc`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

# Number of the only LoRA adapter of an engine
ADAPTER_ID = 1
# Name of the class of vLLM's loaders that load no weights
_NOTHING = "NothingLoader"


def releases_its_cache(engine: Any) -> bool:
    """Return whether vLLM's engine can free the memory of its KV cache without also freeing the weights.

    `engine`: vLLM's engine.
    """
    return hasattr(engine, "release_kv_cache_memory")


def tokens_so_far(engine: Any) -> dict[str, int]:
    """Return for each answer in flight, by the name of its request, how many tokens it has.

    `engine`: vLLM's engine.
    """
    states: Iterable[Any] = engine.output_processor.request_states.values()
    return {
        state.external_req_id: state.detokenizer.num_output_tokens() for state in states
    }


def pools(allocator: Any) -> Iterator[Any]:
    """Yield each of torch's memory pools that vLLM's allocator uses.

    `allocator`: vLLM's allocator of GPU memory.
    """
    for kept in allocator.allocator_and_pools.values():
        pairs = kept if isinstance(kept, list) else [kept]
        for pool, _ in pairs:
            yield pool


def seeded_draws() -> dict[str, bool]:
    """Return arguments of vLLM's engine with which each answer that has a seed is sampled by its own seed, also on a
    CPU.

    An older vLLM ignores all seeds in a step on a CPU if one answer in the step, such as a greedy one, has no seed.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    forgets = "compiled_random_sample" in TopKTopPSampler.forward_cpu.__code__.co_names
    if forgets:
        return {"use_fp64_gumbel": True}
    return {}


def load_nothing() -> None:
    """Make vLLM's load format `dummy` leave the weights as they are allocated, in engines of this process.

    vLLM would draw a random number for each weight. That takes a second for 200 million weights on a CPU, and the first
    sync replaces them. Quantised weights are still drawn, because vLLM packs them while it draws.
    """
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader, register_model_loader

    drawing = type(get_model_loader(LoadConfig(load_format="dummy")))
    if drawing.__name__ == _NOTHING:
        return

    def load_weights(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        if model_config.quantization is not None:
            drawing.load_weights(self, model, model_config)

    register_model_loader("dummy")(
        type(_NOTHING, (drawing,), {"load_weights": load_weights})
    )


# ── in the engine's workers ──────────────────────────────────────────────────────────────────────────────────────────


def unmap_cache(worker: Any) -> None:
    """Free the pages of the KV cache, and keep their addresses. `wake_up` with the tag `kv_cache` maps new pages later.

    `worker`: worker of vLLM's engine.
    """
    from vllm.device_allocator import get_mem_allocator_instance
    from vllm.device_allocator.cumem import unmap_and_release

    # No kernel may still use it
    torch.cuda.synchronize()
    allocator: Any = get_mem_allocator_instance()
    for each in allocator.pointer_to_data.values():
        if each.tag == "kv_cache" and not each.is_asleep:
            unmap_and_release(each.handle)
            each.is_asleep = True


def sleep_but_for_what_sleeps(worker: Any, level: Literal[1, 2]) -> None:
    """Call the worker's `sleep` for all memory that is still awake.

    In an older vLLM, `sleep` would free memory again that it has freed before. Therefore this function hides such
    memory from `sleep`.

    `worker`: worker of vLLM's engine. `level`: 1 copies the weights to the host, 2 drops them.
    """
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    allocations: dict[int, Any] = allocator.pointer_to_data
    asleep = {address: each for address, each in allocations.items() if each.is_asleep}
    for address in asleep:
        del allocations[address]
    try:
        worker.sleep(level)
    finally:
        allocations.update(asleep)


def reload(worker: Any, items: Iterable[tuple[str, Tensor]]) -> None:
    """Load all weights with vLLM's `reload_weights`.

    During the load, vLLM's global config is set, because layers read it. `worker`: worker of vLLM's engine. `items`:
    names and tensors.
    """
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.reload_weights(weights_iterator=items)


def put_adapter(
    worker: Any, tensors: dict[str, Tensor], rank: int, alpha: float
) -> None:
    """Replace the factors of the only LoRA adapter, without a file.

    vLLM has no call for this: its own one reads a folder. These are the steps of that call
    (`LRUCacheWorkerLoRAManager.add_adapter`) after the reading. vLLM 0.32.

    `worker`: worker of vLLM's engine. `tensors`: name in the folder of an adapter -> factor; they become vLLM's own.
    `rank`, `alpha`: those of the factors.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager: Any = worker.model_runner.lora_manager
    adapters: Any = manager._adapter_manager
    renamed: Any = getattr(adapters.model, "hf_to_vllm_mapper", None)
    if renamed is not None:
        renamed = renamed.get_rename_mapper()
    helper = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[])  # type: ignore[arg-type]  # vLLM divides it by the rank, whatever it is
    lora = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        tensors,
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=renamed,
    )
    adapters.remove_adapter(ADAPTER_ID)
    adapters.add_adapter(lora)
    adapters.activate_adapter(ADAPTER_ID)


def adapter_request() -> Any:
    """Return vLLM's request for the adapter of `put_adapter`.

    It has the same name in every version of the factors: the caller empties the prefix cache at each version.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, "in memory")


def adapter_buffers(model: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in which vLLM's layers have the factors of adapters."""
    for module in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(module, name, ())
            if isinstance(stacked, Tensor):
                yield stacked
            else:
                yield from stacked


def reset_lora(runner: Any) -> None:
    """Drop what vLLM has computed for LoRA adapters with the old weights. Do nothing if this vLLM has no function for
    it.

    `runner`: model runner of a worker of vLLM's engine.
    """
    if hasattr(runner, "reset_lora_state"):
        runner.reset_lora_state()
