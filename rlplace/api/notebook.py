"""A curve in a notebook that is updated while a run trains."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from rlplace.config.compose import Composed
from rlplace.contract.reading import try_job
from rlplace.contract.registry import job_of
from rlplace.placement.show.drawing import PALETTE, style
from rlplace.report.charts import Line, chart, styles
from rlplace.report.record import Series

_LEAST_S = 0.5  # least seconds between two pictures, so that drawing hardly slows down the training
_LOOK = "<style>.rlplace-curve svg{{width:100%;max-width:42em}}{lines}</style>"


class Curve:
    """The curve of a metric, drawn in the output of a notebook's cell. It is called after each iteration."""

    def __init__(self, metric: str, show: Callable[[str], object]) -> None:
        """Begin an empty curve. `metric`: its name. `show`: shows a text of HTML in place of the one before."""
        self._metric = metric
        self._show = show
        self._series = Series(array("d"), array("d"))
        self._shown_s = 0.0

    def __call__(
        self, iteration: int, env_steps: int, metrics: Mapping[str, float]
    ) -> None:
        """Add the value of an iteration, and draw the curve if enough time has passed.

        `iteration`: counted from 1. `env_steps`: number of env steps or answers since the run began. `metrics`: name ->
        value; an iteration without the metric adds nothing.
        """
        value = metrics.get(self._metric)
        if value is None:
            return
        self._series.iterations.append(iteration)
        self._series.values.append(value)
        if time.monotonic() - self._shown_s >= _LEAST_S:
            self.draw()

    def draw(self) -> None:
        """Draw the curve as it is, if it has a point."""
        if not self._series.values:
            return
        self._shown_s = time.monotonic()
        look = f"{style(len(PALETTE))}{_LOOK.format(lines=styles())}"
        picture = chart(self._metric, [Line(self._metric, 0, self._series)])
        self._show(f'<div class="rlplace-curve">{look}{picture}</div>')


def curve_of(composed: Composed) -> Curve | None:
    """Return a curve of the return or reward of a run in the output of this notebook's cell.

    Return None outside of a notebook, or if the job has no score. `composed`: the config of the run.
    """
    shell = _notebook()
    if shell is None:
        return None
    config, _ = try_job(composed.mapping, composed.sources)
    if config is None:
        return None
    metric = job_of(config).measures(config).score
    if not metric:
        return None
    return Curve(metric, _output())


def _notebook() -> Any | None:
    """Return the shell of the notebook that runs in this process; None in a terminal or a script."""
    if "ipykernel" not in sys.modules or "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return shell


def _output() -> Callable[[str], object]:
    """Return a function that shows HTML in the output of the running cell. Each call replaces the HTML before."""
    from IPython.display import HTML, display

    # IPython has no types
    show_new: Any = display
    html: Any = HTML
    handle = show_new(html(""), display_id=True)

    def show(text: str) -> None:
        handle.update(html(text))

    return show
