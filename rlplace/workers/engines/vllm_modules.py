"""Import all of vLLM that an engine on a CPU needs, and set the environment variables that vLLM reads meanwhile.

These are more than 3,000 modules, and 4 s of one core. A template imports this module, so that its forks need no time
for them. It imports no code that starts threads or uses an accelerator.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings

import torch

# vLLM reads these when it is imported or builds an engine. The engine must be in this process, which steps it.
FORCED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# vLLM's warnings are about settings that are intended here, so only errors are logged. A rank does not own the cores
# that vLLM would bind it to. A tensor-parallel engine spawns its workers, because a fork would copy torch's threads.
UNLESS_SET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # FlashInfer does not draw answers with log-probabilities, and vLLM with this sampler needs it installed
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# vLLM imports the last three when it builds an engine; a version without one of them takes its time then
_MODULES = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
)


def _imported() -> dict[str, str]:
    """Import the modules, and return the environment variables that vLLM has set meanwhile."""
    os.environ.update(FORCED)
    for name, value in UNLESS_SET.items():
        os.environ.setdefault(name, value)
    before = dict(os.environ)
    # vLLM replaces it by a function that does nothing
    settable = torch.set_num_threads
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _MODULES:
                # An engine that needs the module reports the error
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
    finally:
        torch.set_num_threads = settable
    return {
        name: value for name, value in os.environ.items() if before.get(name) != value
    }


# A fork of a template gets the environment of another process, in which vLLM has not set them
SET_BY_VLLM = _imported()
