"""What it costs an iteration to keep the times of all laps: on and off in turns, within one run.

    python benchmarks/tracing.py [iterations] [command line of a run in threads of one process]

The default run is `cartpole`, whose laps are as short as those of any: some hundred in a tenth of a second. Printed is
the median over pairs of neighbouring iterations of the seconds with over those without, and its 95 % interval: of the
clock, and of the processor, which other programs disturb less.
"""

from __future__ import annotations

import inspect
import random
import re
import statistics
import sys
import tempfile
import textwrap
import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlplace import stopwatch
from rlplace.cli import train
from rlplace.stopwatch import Spans, Stopwatch

WARM_UP = 10
DRAWS = 2000  # iterations that are left out; draws of the bootstrap
KEPT = (Stopwatch.lap, Stopwatch.spans)


def without_times() -> Callable[..., None]:
    """Return `Stopwatch.lap` without the lines that keep when a lap was."""
    lines = textwrap.dedent(inspect.getsource(Stopwatch.lap)).splitlines()
    kept = [line for line in lines if not re.search(r"_which|_ends|_thin_out", line)]
    assert len(lines) - len(kept) == 4, "other lines than those that are known"
    found = dict(vars(stopwatch))
    exec("\n".join(kept), found)
    lap: Callable[..., None] = found["lap"]
    return lap


def spans(self: Stopwatch, epoch_s: float) -> Spans:
    return Spans(self._began + epoch_s, (), b"", array("d"))


LEFT_OUT = (without_times(), spans)


class Turns:
    """A sink: takes the seconds of an iteration, and those of the processor since the last, and switches."""

    seconds: tuple[list[tuple[float, float]], list[tuple[float, float]]] = (
        [],
        [],
    )  # with, without

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._off, self._draw, self._cpu_s = 0, random.Random(0), time.process_time()

    def __call__(
        self, iteration: int, env_steps: int, metrics: Mapping[str, float]
    ) -> None:
        before = self._cpu_s
        self._cpu_s = time.process_time()
        self.seconds[self._off].append(
            (metrics["time/iteration_s"], self._cpu_s - before)
        )
        self._off = (
            1 - self._off if iteration % 2 else self._draw.randrange(2)
        )  # pairs, in either order
        Stopwatch.lap, Stopwatch.spans = LEFT_OUT if self._off else KEPT  # type: ignore[method-assign]  # to leave them out


def main(iterations: int, *words: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        own = (
            f"runner.total_iterations={iterations}",
            "runner.stop_at_return=null",
            f"runner.output_dir={folder}",
        )
        rest = ("checkpoint.every=0", "runner.sinks=[benchmarks.tracing:Turns]")
        code = train.main([*(words or ("cartpole",)), *own, *rest])
    from benchmarks.tracing import (
        Turns as Filled,
    )  # the module that the run has imported; this one is __main__

    for at, what in enumerate(("clock", "processor")):
        on, off = (
            [seconds[at] for seconds in each[WARM_UP // 2 :]] for each in Filled.seconds
        )
        ratios = [a / b for a, b in zip(on, off, strict=False)]
        draw = random.Random(0)
        medians = sorted(
            statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS)
        )
        low = medians[DRAWS // 40]
        high = medians[-DRAWS // 40]
        times = f"with {1e3 * statistics.median(on):.1f} ms, without {1e3 * statistics.median(off):.1f} ms an iteration"
        ratio = f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})"
        print(f"{what:<10}{times}; with / without {ratio}, {len(ratios)} pairs")
    return code


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400, *sys.argv[2:]))
