"""Build the text engine that a config names, in the process of the worker that uses it."""

from __future__ import annotations

import os

from rlplace.comm.shared_memory.folder import claim
from rlplace.envs.registry import named
from rlplace.models import BUILDING
from rlplace.workers.engines.contract import EngineSettings, TextEngine
from rlplace.workers.worker import WorkerContext


def build_engine(settings: EngineSettings, context: WorkerContext) -> TextEngine:
    """Return the generation engine that `settings.rollout.engine` names, without weights and at residency OFF.

    Only the libraries of this engine are imported. Raises ConfigError, ClusterError.
    """
    context.device.verify()
    # vLLM measures free GPU memory while it starts and attributes other processes' changes to itself.
    with context.device.alone(context.folder):
        engine = _built(settings, context)
    _claim_processes(context)
    return engine


def _built(settings: EngineSettings, context: WorkerContext) -> TextEngine:
    name = settings.rollout.engine
    if name == "transformers":
        # Workers may be threads, and parallel imports of transformers fail.
        with BUILDING:
            from rlplace.workers.engines.transformers import TransformersEngine

        return TransformersEngine(settings, device=context.device, owner=context.owner)
    if settings.rollout.own:
        make = named(
            name, {}, key="rollout.engine", code="unknown-engine", noun="engine"
        )
        engine: TextEngine = make(
            settings,
            device=context.device,
            owner=context.owner,
            **settings.rollout.engine_args,
        )
        return engine
    with BUILDING:
        from rlplace.workers.engines.vllm import VllmEngine

    return VllmEngine(settings, device=context.device, owner=context.owner)


def _claim_processes(context: WorkerContext) -> None:
    """Register the engine's child processes, so that their shared memory is removed together with the job's folder.

    Only an engine on several accelerators has child processes.
    """
    if context.folder is None or len(context.slot.accelerators) < 2:
        return
    import psutil

    children = psutil.Process().children(recursive=True)
    claim(context.folder, [os.getpid(), *(child.pid for child in children)])
