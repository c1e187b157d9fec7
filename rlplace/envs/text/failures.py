"""What a rank does about a reward, a reply or an endpoint that fails: stop, leave the episode out, try again."""

from __future__ import annotations

import logging

from rlplace.config.schema import FaultsConfig
from rlplace.metrics import Metric, Metrics

_LOG = logging.getLogger(__name__)
_RETRIES = 2  # of `faults.on_error: retry`, before the episode is left out
NO_USE = _RETRIES  # tries of what fails the next time as well


class Failures:
    """Counts the failures of an iteration. `Failures()` stops at the first."""

    def __init__(self, faults: FaultsConfig | None = None) -> None:
        self._faults = faults or FaultsConfig()
        self._failed = self._left_out = 0

    def begin(self) -> None:
        self._failed = self._left_out = 0

    def again(self, error: Exception, tries: int, episodes: int = 1) -> bool:
        """Return whether to try once more after `tries` repetitions; else the `episodes` are to be left out.

        Raises `error` where that may not be, or more are left out than `faults.error_budget` allows.
        """
        what = ", ".join(
            [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        )
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
        """Count the failures of the iteration, where they do not stop the run."""
        if self._faults.on_error == "stop":
            return {}
        return {f"{component}/failures": Metric(self._failed, "sum")}
