"""What a rank does if a reward, a reply or an endpoint fails: stop, leave out the episode, or try again."""

from __future__ import annotations

import logging

from rlplace.config.schema import FaultsConfig
from rlplace.metrics import Metric, Metrics

_LOG = logging.getLogger(__name__)
# With `faults.on_error: retry`: repetitions before an episode is left out
_RETRIES = 2
# As a number of tries: for failures that another try would repeat
NO_USE = _RETRIES


class Failures:
    """Counts the failures of an iteration. With default settings, the first one stops the run."""

    def __init__(self, faults: FaultsConfig | None = None) -> None:
        self._faults = faults or FaultsConfig()
        self._failed = 0
        self._left_out = 0

    def begin(self) -> None:
        """Begin the count of an iteration."""
        self._failed = 0
        self._left_out = 0

    def again(self, error: Exception, tries: int, episodes: int = 1) -> bool:
        """Return whether to try again after `tries` repetitions. If not, the `episodes` are to be left out.

        Raises `error` if faults.on_error is stop, or if more episodes are left out than `faults.error_budget`.
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
        """Return the number of failures of the iteration; empty if the first one stops the run."""
        if self._faults.on_error == "stop":
            return {}
        return {f"{component}/failures": Metric(self._failed, "sum")}
