"""What a rank does if a reward, a reply or an endpoint fails: stop the run, leave out the episode, or try again."""

from __future__ import annotations

import logging

from rlplace.config.blocks.engine import FaultsConfig
from rlplace.metrics import Metric, Metrics

_LOG = logging.getLogger(__name__)
# With `faults.on_error: retry`, the number of repetitions before an episode is left out
_RETRIES = 2
# A number of tries after which none follows, for failures that would only come again
NO_USE = _RETRIES


class Failures:
    """Counts the failures of an iteration, and decides after each one: stop the run, leave out episodes, or try again.

    By default, the first failure stops the run.
    """

    def __init__(self, faults: FaultsConfig | None = None) -> None:
        self._faults = faults or FaultsConfig()
        self._failed = 0
        self._left_out = 0

    def begin(self) -> None:
        """Set the counts to 0 for a new iteration."""
        self._failed = 0
        self._left_out = 0

    def again(self, error: Exception, tries: int, episodes: int = 1) -> bool:
        """Count a failure. Return True to try the failed work again, False to leave out its episodes.

        `tries`: how often the work was repeated already. `episodes`: number of episodes to leave out if the work is not
        repeated. Raises `error` if faults.on_error is stop, or if more than `faults.error_budget` episodes are left
        out.
        """
        notes = getattr(error, "__notes__", ())
        what = ", ".join([f"{type(error).__name__}: {error}", *notes])
        self._failed += 1
        if self._faults.on_error == "stop":
            raise error
        if self._faults.on_error == "retry" and tries < _RETRIES:
            _LOG.warning("tried again: %s", what)
            return True
        self._left_out += episodes
        if self._left_out > self._faults.error_budget:
            error.add_note(
                f"more than faults.error_budget: {self._faults.error_budget} episodes failed"
            )
            raise error
        _LOG.warning("left out: %s", what)
        return False

    def metrics(self, component: str) -> Metrics:
        """Return the number of failures in the iteration as a metric; {} if the first failure stops the run."""
        if self._faults.on_error == "stop":
            return {}
        return {f"{component}/failures": Metric(self._failed, "sum")}
