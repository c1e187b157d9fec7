"""What rules about placements are checked on: a placement that was read, or a job together with its placement."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

from rlplace.placement.plan import Placed

if TYPE_CHECKING:
    from rlplace.config.schema import Config


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedJob(Placed):
    """A job that comes with rlplace, with its config and its placement.

    The rules of these jobs are checked on it.
    """

    config: Config

    @classmethod
    def of(cls, config: Config, placed: Placed) -> Self:
        """Return a job with this config and this placement."""
        return cls(
            config=config,
            cluster=placed.cluster,
            components=placed.components,
            placement=placed.placement,
            active=placed.active,
        )

    def ranks(self, component: str) -> int:
        """Return the number of ranks of a component; 0 if it is not placed."""
        if component in self.placement.components:
            return self.placement.world_size(component)
        return 0


def runs(case: PlacedJob) -> bool:
    """Return whether the job can run. A job that cannot run is only planned."""
    return case.config.runs


def planned_only(case: PlacedJob) -> bool:
    """Return whether the job is only planned and cannot run."""
    return not case.config.runs
