"""What every worker of a run is told: the config, the simulator's shapes and the routes of the plan."""

from __future__ import annotations

import dataclasses

from rlplace.config import RunConfig
from rlplace.envs.spaces import Spaces
from rlplace.placement.routes import Routes

# Names of the channels of a run. Keys: the rollout rank; "<env rank>/<stage group>"; the actor rank; the rollout rank.
OBSERVATIONS = "observations"
ACTIONS = "actions"
TRAJECTORIES = "trajectories"
WEIGHTS = "weights"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The `config` of EnvWorker, RolloutWorker and FSDPActor."""

    config: RunConfig
    spaces: Spaces
    routes: Routes

    @property
    def rows_per_group(self) -> int:
        """Environments of one stage group over all env ranks."""
        return self.routes.observations.rows
