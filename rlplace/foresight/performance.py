"""The performance model as a run uses it: profiles, predictions, and their comparison with measured seconds."""

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

# Jobs with more ranks are not predicted at the end of a run, because that would take long.
_MOST_RANKS = 512


class Performance:
    """Makes profiles and predictions of one planned job, and compares predictions with measured seconds."""

    def __init__(self, config: Any, plan: Plan, case: MemoryCase) -> None:
        self._config = config
        self._plan = plan
        self._case = case

    def given_profile(self) -> Profile | None:
        """Return the profile that the config names; None if it names none, so that the run's own profile is used.

        Raises ConfigError if the profile cannot be read or is of another job.
        """
        return find_profile(self._config, self._plan, self._case)

    def observations(
        self, channels: Callable[[], Mapping[str, ChannelStats]] = dict
    ) -> Observations:
        """Return a new collector of a run's iterations, which makes a profile from them.

        `channels`: returns channel name -> statistics, with the seconds that ranks have waited.
        """
        return Observations(self._config, self._plan, channels)

    def compared(
        self,
        profile: Profile,
        given: Profile | None,
        measured: Mapping[str, Any],
        others: float | None = None,
    ) -> dict[str, Any] | None:
        """Return the predicted and measured seconds of a run, as the block `predicted` of summary.json.

        Return None if the job cannot be predicted, or has more than _MOST_RANKS ranks. `profile`: the run's own
        profile. `given`: the profile that the config names, used in place of the run's own; None if it names none.
        `measured`: metric -> measured seconds. `others`: share of the driver's machine that processes outside the run
        used, if they certainly slowed down the run; else None.
        """
        placement = self._plan.placement
        ranks = sum(placement.world_size(c) for c in placement.components)
        if not can_predict(self._config) or ranks > _MOST_RANKS:
            return None
        prediction = predict(self._config, self._plan, self._case, given or profile)
        source = (
            "this run's own profile" if given is None else "a profile that was given"
        )
        seconds = compare_seconds(prediction, measured)
        return {"from": source, "seconds": seconds, "others": others}
