"""Memory of a component of a custom job: what its config block declares, or nothing if that is unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlplace.config.open_job import DeclaredMemory
from rlplace.placement.memory.demands import (
    Bytes,
    DeviceSync,
    Footprint,
    HostPart,
    Part,
    Placed,
    larger,
)
from rlplace.placement.schedule import Residency


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageSync:
    """A component's end of a weight sync in a stage.

    `sync`: what the end takes on an accelerator. `weights_bytes`: bytes of one copy of the weights.
    """

    stage: str
    sync: DeviceSync
    weights_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredDemand:
    """The memory demand of a component of a custom job: the bytes of one rank, as its config block declares them.

    `declared`: the declared bytes. `stages`: the stages in which the component works. `syncs`: its ends of weight
    syncs.
    """

    declared: DeclaredMemory
    stages: Sequence[str] = ()
    syncs: Sequence[StageSync] = ()

    def footprint(self, placed: Placed) -> Footprint:
        declared = self.declared
        # If only `weights` is declared, `full` is at least that; if only `full`, `weights` is at most that.
        weights = declared.weights or 0
        full = weights if declared.full is None else declared.full
        process: Bytes = placed.process(1)
        for end in self.syncs:
            process = end.sync.beside(process)
        held = {
            Residency.OFF: {**process},
            Residency.WEIGHTS: {**process, Part.PARAMETERS: weights},
            Residency.FULL: {
                **process,
                Part.PARAMETERS: min(weights, full),
                Part.OPTIMIZER: max(0, full - weights),
            },
        }
        working: dict[str, Bytes] = {
            stage: {Part.WORKSPACE: declared.working} for stage in self.stages
        }
        # Syncs of a stage run one after the other, before the workers' methods.
        for end in self.syncs:
            moving = {Part.SYNC: end.sync.working(end.weights_bytes)}
            working[end.stage] = larger(working.get(end.stage, {}), moving)
        # State that is offloaded from the accelerators is kept on the host.
        host = {
            Residency.OFF: {HostPart.OFFLOADED: full, HostPart.DECLARED: declared.host},
            Residency.WEIGHTS: {
                HostPart.OFFLOADED: max(0, full - weights),
                HostPart.DECLARED: declared.host,
            },
            Residency.FULL: {HostPart.DECLARED: declared.host},
        }
        return Footprint(held=held, working=working, host=host)
