"""Show the state of a run below its last lines on a terminal: a block that a thread redraws and erases at the end.

::

     iter    env steps    return ...          lines, as in a pipe: they scroll
        7       28,672     104.3 ...
    iteration  8 of 40 ━━━━━━╺━━━━━━━━━━━━━━━━ 1 min 12 s left at most
    last       return 104.3, length 98, explained 0.52, kl 0.0081, clipped 9%
    seconds    rollout 0.18, learn 0.13, sync 0.03, moves 0.08
    now        learn for 0.1 s
    resident   actor full, env off, rollout off
    queues     observations 0/8, actions 0/8, trajectories 3/4, weights 0/1
    bottleneck rollout in rollout, 0.18 of 0.42 s; accelerators idle 61% of it

The thread reads the state of the loop and of the channels; nothing waits for the thread. In a pipe there is none.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from rlplace.comm.channel import Channel, ChannelStats
from rlplace.comm.watchdog import view
from rlplace.config.blocks.engine import RunnerConfig
from rlplace.envs.registry import needs
from rlplace.placement.schedule import Residency
from rlplace.report.sinks import Console, is_terminal
from rlplace.report.typed import Noted
from rlplace.report.utilisation import bottleneck
from rlplace.signals import Signals

if TYPE_CHECKING:
    from rich.console import RenderableType

_REDRAW_S = 0.5
_SHARE = 0.1  # of a processor that the thread may use, at most
_END_S = 5.0  # seconds that the end of a run waits for a drawing under way
_RECENT = 20  # iterations whose median is the expected time of the next
_BAR = 24  # columns

Rows = Sequence[tuple[str, str]]


class Watched(Protocol):
    """The present state of a loop. Any thread may read it at any time."""

    @property
    def began_s(self) -> float | None:
        """Return when the present iteration began, in seconds of the monotonic clock; None between iterations."""

    @property
    def doing(self) -> tuple[str, float] | None:
        """Return the present step and when it began, in seconds of the monotonic clock; None between iterations."""

    @property
    def held(self) -> Mapping[str, Residency]: ...


class Display:
    """Shows the present state of a run in a block on a terminal.

    It is a sink (a receiver of metrics), so it is called with the metrics of each iteration.
    """

    def __init__(
        self,
        runner: RunnerConfig,
        console: Console,
        active: Mapping[str, Sequence[str]],
    ) -> None:
        """Prepare the display; nothing is shown yet.

        `runner`: the config block with the number of iterations and the goal (`stop_at_return`). `console`: its columns
        say which metrics the block shows. `active`: stage -> components at work.
        """
        self._runner = runner
        self._console = console
        self._active = active
        self._began_s = time.monotonic()
        # None while the workers start
        self._loop: Watched | None = None
        self._channels: Mapping[str, Channel] = {}
        self._iterations = 0
        # Metric -> its last value, and the iteration of the value.
        self._seen: Mapping[str, tuple[float, int]] = {}
        # Seconds of the last iterations; only the driver's thread uses them.
        self._recent: deque[float] = deque(maxlen=_RECENT)
        # Median of these seconds
        self._iteration_s = 0.0
        self._bottleneck = ""
        # Lines that the thread is to print.
        self._notices: deque[str] = deque()
        self._over = threading.Event()
        self._ready = threading.Event()
        # Held while the loop and the channels are read
        self._reading = threading.Lock()
        self._thread: threading.Thread | None = None

    # ── what the run tells ───────────────────────────────────────────────────────────────────────────────────────────

    def watch(
        self,
        loop: Watched,
        channels: Mapping[str, Channel],
        iterations: int,
        active: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Show the state of `loop` and `channels` from now on.

        `iterations`: number of iterations that are done already. `active`: stage -> components at work; None: as
        before.
        """
        if active is not None:
            self._active = active
        with self._reading:
            self._channels = channels
            self._iterations = iterations
            self._loop = loop

    def rest(self) -> None:
        """Stop to read the loop and the channels, until `watch` is called again. They may end after the return."""
        with self._reading:
            self._loop = None
            self._channels = {}
            self._began_s = time.monotonic()

    def __call__(
        self, iteration: int, env_steps: int, metrics: Mapping[str, float]
    ) -> None:
        """Take the metrics of an iteration that has ended, to show them. `iteration`: counted from 1.

        `env_steps` is not used.
        """
        # New mappings instead of changes: the thread may be reading the old ones.
        seen = dict(self._seen)
        # The run has returned to a checkpoint: forget later values
        if iteration <= self._iterations:
            seen = {}
        for name, value in metrics.items():
            seen[name] = (value, iteration)
        self._seen = seen
        self._iterations = iteration
        # An evaluation before the first iteration has metrics of its own only.
        if "time/iteration_s" not in metrics:
            return
        self._recent.append(metrics["time/iteration_s"])
        self._iteration_s = statistics.median(self._recent)
        self._bottleneck = bottleneck(metrics, self._active)

    # ── what it shows ────────────────────────────────────────────────────────────────────────────────────────────────

    def rows(self, now_s: float, views: Mapping[str, ChannelStats]) -> Rows:
        """Return (head, text) of each row of the block below the row with the progress. Empty rows are left out.

        `now_s`: the present time, by the monotonic clock. `views`: channel -> its statistics.
        """
        loop = self._loop
        if loop is None:
            started = f"for {span(now_s - self._began_s)}"
            return [("starting", started)]
        # The step under way, residencies and channels, as they are at this moment.
        now = "between iterations"
        # Read once: the driver changes it
        doing = loop.doing
        if doing is not None:
            step, since_s = doing
            now = f"{step} for {span(now_s - since_s)}"
        resident = []
        for component, held in loop.held.items():
            resident.append(f"{component} {held.word}")
        queues = []
        for name, seen in views.items():
            queues.append(f"{name} {seen.depth_items}/{seen.capacity_items}")
        rows = [
            ("last", ", ".join(self._numbers())),
            ("seconds", ", ".join(self._stages())),
            ("now", now),
            ("resident", ", ".join(resident)),
            ("queues", ", ".join(queues)),
            ("bottleneck", self._bottleneck),
        ]
        return [(head, text) for head, text in rows if text]

    def _numbers(self) -> Iterator[str]:
        """Yield a text with head and last value for each column of the console that is not a time.

        If the value is from an earlier iteration than the last one, the text names that iteration.
        """
        for column in self._console.columns:
            metric = column.metric
            if metric.startswith("time/") or metric not in self._seen:
                continue
            value, iteration = self._seen[metric]
            text = f"{column.head} {column.text(value)}"
            if iteration < self._iterations:
                text += f" (of iteration {iteration})"
            yield text

    def _stages(self) -> Iterator[str]:
        """Yield a text with the name and the seconds of each stage in the last iteration."""
        for column in self._console.columns:
            metric = column.metric
            if not metric.startswith("time/") or not metric.endswith("_s"):
                continue
            value, iteration = self._seen.get(metric, (0.0, -1))
            if iteration == self._iterations:
                yield f"{column.head.removesuffix(' s')} {column.text(value)}"

    def left(self, now_s: float) -> str:
        """Return a text with the remaining time of the run, estimated by the median time of the latest iterations.

        Return "" before the first iteration has ended. `now_s`: the present time, by the monotonic clock.
        """
        if not self._iteration_s:
            return ""
        iterations = self._runner.total_iterations - self._iterations
        left_s = self._iteration_s * iterations
        # Less the part of the iteration under way; read once, the driver changes it.
        began_s = None if self._loop is None else self._loop.began_s
        if began_s is not None:
            left_s -= min(now_s - began_s, self._iteration_s)
        text = f"{span(max(0.0, left_s))} left"
        if self._runner.stop_at_return is not None:
            text += " at most"
        return text

    def block(self, now_s: float, views: Mapping[str, ChannelStats]) -> RenderableType:
        """Return the whole block: a row with the progress of the iterations, then the rows of the method `rows`.

        `now_s`: the present time, by the monotonic clock. `views`: channel -> its statistics.
        """
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        table.add_column(style="dim", no_wrap=True, min_width=len("bottleneck"))
        table.add_column()
        # The first row has a bar, once the workers have started; all others are text.
        if self._loop is not None:
            done = self._iterations
            all_of = self._runner.total_iterations
            bar = ProgressBar(
                total=all_of,
                completed=done,
                width=_BAR,
                complete_style="cyan",
                finished_style="cyan",
                style="dim",
            )
            progress = Table.grid(padding=(0, 1))
            progress.add_row(
                Text(f"{min(done + 1, all_of):,} of {all_of:,}"),
                bar,
                Text(self.left(now_s)),
            )
            table.add_row("iteration", progress)
        for head, text in self.rows(now_s, views):
            table.add_row(head, Text(text))
        return table

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _draw(self) -> None:
        """Draw the block repeatedly until `close` is called. This is run in the display's thread.

        Drawing also starts and stops in this thread, because signals interrupt only the main thread.
        """
        from rich.console import Console as Terminal
        from rich.live import Live

        # Printed lines are noted, the block is not: it goes to the stream below.
        stdout = sys.stdout
        stderr = sys.stderr
        below = None
        if isinstance(stdout, Noted):
            below = stdout.below
        # Long lines stay whole: only those of the block are cut.
        terminal = Terminal(file=below, highlight=False, soft_wrap=True)
        with Live(
            console=terminal,
            auto_refresh=False,
            transient=True,
            redirect_stderr=is_terminal(sys.stderr),
        ) as live:
            # Live has put its own streams there: note what they are given.
            sys.stdout = _noted_over(stdout, sys.stdout)
            sys.stderr = _noted_over(stderr, sys.stderr)
            self._ready.set()
            pause_s = _REDRAW_S
            while not self._over.wait(pause_s):
                began_s = time.thread_time()
                self._give_notice()
                with self._reading:
                    block = self.block(time.monotonic(), view(self._channels))
                live.update(block, refresh=True)
                # A slow terminal is drawn less often.
                pause_s = max(_REDRAW_S, (time.thread_time() - began_s) / _SHARE)

    def _give_notice(self) -> None:
        while self._notices:
            print(self._notices.popleft(), end="", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def shown(self, signals: Signals) -> Iterator[Display]:
        """Draw the block during the `with` statement, if stdout is a terminal. Raises ConfigError without rich.

        Meanwhile, lines of `signals` are printed by the display's thread, because a signal handler may interrupt the
        driver at any place.
        """
        if not is_terminal(sys.stdout):
            yield self
            return
        with needs(
            "rich", got="console", extra="run", key="runner.sinks", of="the sink"
        ):
            import rich.live  # noqa: F401  which the thread needs
        say = signals.say
        signals.say = self._notices.append
        self._thread = threading.Thread(target=self._draw, name="display", daemon=True)
        try:
            self._thread.start()
            self._ready.wait(_END_S)
            yield self
        finally:
            signals.say = say
            self.close()

    def close(self) -> None:
        """Remove the block from the terminal. The display must not be used afterwards."""
        self._over.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_END_S)
        self._give_notice()


def _noted_over(before: TextIO, now: TextIO) -> TextIO | Noted:
    """Return the stream `now`; if `before` recorded its text, wrap `now` so that its text is recorded as well.

    `before`: the stream in whose place `now` was put.
    """
    if isinstance(before, Noted) and now is not before:
        return before.over(now)
    return now


def span(seconds: float) -> str:
    """Return a time in seconds as text, such as `0.4 s`, `12 s`, `3 min 05 s` or `2 h 07 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
