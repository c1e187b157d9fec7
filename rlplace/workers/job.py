"""What every worker of a run is told: the config, the simulator's shapes and the routes of the plan."""

from __future__ import annotations

import dataclasses

from rlplace.config import Config
from rlplace.envs.spaces import Spaces
from rlplace.placement.flow import Delivery, Routes

# Names of the channels of a run. Keys: the rollout rank; "<env rank>/<stage group>"; the actor rank; the rollout rank.
OBSERVATIONS = "observations"
ACTIONS = "actions"
TRAJECTORIES = "trajectories"
WEIGHTS = "weights"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The `config` of VectorEnvWorker, VectorRolloutWorker and PolicyActor."""

    config: Config
    spaces: Spaces
    routes: Routes
    deliveries: tuple[Delivery, ...]  # of weights, where ranks share memory; else each rank gets its own

    @property
    def rollout_ranks(self) -> int:
        return sum(len(delivery.readers) for delivery in self.deliveries)

    @property
    def rows_per_group(self) -> int:
        """Environments of one stage group over all env ranks."""
        return self.routes.observations.rows
