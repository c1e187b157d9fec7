"""What a component of a user's own asks of memory: what its block declares, or nothing that is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlplace.config.open_job import DeclaredMemory
from rlplace.placement.memory.demands import Footprint, HostPart, Part, Placed
from rlplace.placement.schedule import Residency


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredDemand:
    """Bytes of a rank as its component's block declares them. `stages`: those in which it works."""

    declared: DeclaredMemory
    stages: Sequence[str] = ()

    def footprint(self, placed: Placed) -> Footprint:
        declared = self.declared
        # With one of the two given, the other is at least, or at most, as much.
        weights = declared.weights or 0
        full = weights if declared.full is None else declared.full
        process = placed.process(1)
        held = {
            Residency.OFF: {**process},
            Residency.WEIGHTS: {**process, Part.PARAMETERS: weights},
            Residency.FULL: {
                **process,
                Part.PARAMETERS: min(weights, full),
                Part.OPTIMIZER: max(0, full - weights),
            },
        }
        working = {stage: {Part.WORKSPACE: declared.working} for stage in self.stages}
        # What leaves the accelerators is kept on the host.
        host = {
            Residency.OFF: {HostPart.OFFLOADED: full, HostPart.WEIGHTS: declared.host},
            Residency.WEIGHTS: {
                HostPart.OFFLOADED: max(0, full - weights),
                HostPart.WEIGHTS: declared.host,
            },
            Residency.FULL: {HostPart.WEIGHTS: declared.host},
        }
        return Footprint(held=held, working=working, host=host)
