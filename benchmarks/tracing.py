"""What it costs an iteration to keep the times of all laps: on and off in turns, within one run.

    python benchmarks/tracing.py [iterations] [command line of a run in threads of one process]

The default run is `cartpole`, whose laps are as short as those of any: some hundred in a tenth of a second. Printed is
the median over pairs of neighbouring iterations of the seconds with over those without, and its 95 % interval.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplace import stopwatch, train
from rlplace.stopwatch import Spans, Stopwatch

WARM_UP, DRAWS = 10, 2000  # iterations that are left out; draws of the bootstrap
KEPT = (Stopwatch.lap, Stopwatch.spans)


def lap(self: Stopwatch, part: str, size: float = 0.0) -> None:
    """Count as `Stopwatch.lap` does, and keep no times."""
    now, cpu = self._read()
    wall_s, cpu_s = now - self._since, max(0.0, cpu - self._cpu)
    self._since, self._cpu = now, cpu
    self.seconds[part] = self.seconds.get(part, 0.0) + wall_s
    sums = self._sums.get((part, stopwatch._rounded(size)))
    if sums is None:
        self._sums[part, stopwatch._rounded(size)] = [1.0, size, wall_s, cpu_s, cpu_s, wall_s - cpu_s]
        return
    sums[0] += 1.0
    sums[1] += size
    sums[2] += wall_s
    sums[3] += cpu_s
    sums[4] = min(sums[4], cpu_s)
    sums[5] = min(sums[5], wall_s - cpu_s)


def spans(self: Stopwatch, epoch_s: float) -> Spans:
    return Spans(self._began + epoch_s, (), b"", array("d"))


class Turns:
    """A sink: takes the seconds of an iteration, and switches."""

    seconds: tuple[list[float], list[float]] = ([], [])  # with, without

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._off = 0

    def __call__(self, iteration: int, env_steps: int, metrics: Mapping[str, float]) -> None:
        self.seconds[self._off].append(metrics["time/iteration_s"])
        self._off = 1 - self._off
        Stopwatch.lap, Stopwatch.spans = (lap, spans) if self._off else KEPT  # type: ignore[method-assign]


def main(iterations: int, *words: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        own = (f"runner.total_iterations={iterations}", "runner.stop_at_return=null", f"runner.output_dir={folder}")
        code = train.main([*(words or ("cartpole",)), *own, "runner.sinks=[benchmarks.tracing:Turns]"])
    from benchmarks.tracing import Turns as Filled  # the module that the run has imported; this one is __main__

    on, off = (each[WARM_UP // 2 :] for each in Filled.seconds)
    ratios = [a / b for a, b in zip(on, off, strict=False)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    print(f"with {1e3 * statistics.median(on):.2f} ms, without {1e3 * statistics.median(off):.2f} ms an iteration")
    low, high = medians[DRAWS // 40], medians[-DRAWS // 40]
    print(f"with / without {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f}), {len(ratios)} pairs")
    return code


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400, *sys.argv[2:]))
