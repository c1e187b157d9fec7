"""Memory of a component of a custom job: what its config block declares, or nothing if that is unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlplace.config.open_job import DeclaredMemory
from rlplace.placement.memory.demands import Footprint, HostPart, Part, Placed
from rlplace.placement.schedule import Residency


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredDemand:
    """The memory demand of a component of a custom job: the bytes of one rank, as its config block declares them.

    `declared`: the declared bytes. `stages`: the stages in which the component works.
    """

    declared: DeclaredMemory
    stages: Sequence[str] = ()

    def footprint(self, placed: Placed) -> Footprint:
        declared = self.declared
        # If only `weights` is declared, `full` is at least that; if only `full`, `weights` is at most that.
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
