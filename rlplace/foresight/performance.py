"""The performance model of a job whose workers report laps, as a run asks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlplace.comm.channel import ChannelStats
from rlplace.foresight.known import find_profile
from rlplace.foresight.observe import Observations
from rlplace.foresight.predict import can_predict, predict
from rlplace.foresight.profile import Profile
from rlplace.foresight.show import compare_seconds
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan

# Whose iterations are predicted at the end of a run: that takes seconds
_MOST_RANKS = 512


class Performance:
    """Profiles, predictions and their comparison with what was measured, of one planned job."""

    def __init__(self, config: Any, plan: Plan, case: MemoryCase) -> None:
        self._config = config
        self._plan = plan
        self._case = case

    def given_profile(self) -> Profile | None:
        """Return the profile that the config names, to predict from instead of the run's own. Raises ConfigError."""
        return find_profile(self._config, self._plan, self._case)

    def observations(
        self, channels: Callable[[], Mapping[str, ChannelStats]] = dict
    ) -> Observations:
        """Return what takes the iterations of a run, to make a profile of them. `channels`: asks those of the run."""
        return Observations(self._config, self._plan, channels)

    def compared(
        self, profile: Profile, given: Profile | None, measured: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return predicted beside measured seconds, as summary.json has them; None where nothing is predicted.

        `profile`: of the run itself; `given`: the one that the config names.
        """
        placement = self._plan.placement
        ranks = sum(placement.world_size(c) for c in placement.components)
        if not can_predict(self._config) or ranks > _MOST_RANKS:
            return None
        prediction = predict(self._config, self._plan, self._case, given or profile)
        source = (
            "this run's own profile" if given is None else "a profile that was given"
        )
        return {"from": source, "seconds": compare_seconds(prediction, measured)}
