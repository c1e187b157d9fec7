"""The live block: what it says of a run, how wide it is, and that a terminal is left with the lines alone."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.comm.watchdog import view
from rlplace.config.blocks.engine import RunnerConfig
from rlplace.placement.schedule import Residency
from rlplace.report import live
from rlplace.report.live import Display, span
from rlplace.report.sinks import RUN_CONSOLE, SCORED_CONSOLE, ConsoleSink
from rlplace.report.typed import SCREEN, Typed
from rlplace.signals import Signals
from tests.screen import Screen

ACTIVE = {"rollout": ("env", "rollout"), "learn": ("actor",)}
NUMBERS = {
    "env/mean_return": 104.25,
    "actor/approx_kl": 0.00812,
    "env/episodes": 30.0,
    "env/steps_per_s": 9750.0,
    "env/sim_s": 0.1,
    "rollout/policy_s": 0.15,
    "actor/learn_s": 0.12,
    "time/rollout_s": 0.18,
    "time/learn_s": 0.13,
    "time/sync_s": 0.03,
    "time/moves_s": 0.08,
    "time/iteration_s": 0.42,
    "util/busy_share": 0.39,
}
WITHOUT_EPISODES = {
    name: value for name, value in NUMBERS.items() if name != "env/mean_return"
} | {"env/episodes": 0.0}


@dataclasses.dataclass
class Doing:
    """A loop as the display sees it."""

    began_s: float | None = None
    doing: tuple[str, float] | None = None
    held: Mapping[str, Residency] = dataclasses.field(
        default_factory=lambda: {
            "actor": Residency.FULL,
            "rollout": Residency.WEIGHTS,
            "env": Residency.OFF,
        }
    )


def display(**runner: object) -> Display:
    return Display(RunnerConfig(total_iterations=40, **runner), RUN_CONSOLE, ACTIVE)


def channels() -> dict[str, LocalChannel]:
    made = {
        name: LocalChannel(ChannelSpec(name=name, capacity_items=8))
        for name in ("observations", "actions")
    }
    made["actions"].put("a")
    return made


def test_it_says_what_the_run_does_and_what_the_last_iteration_was() -> None:
    shown, loop, seen = display(), Doing(doing=("learn", 100.0)), view(channels())
    shown.watch(loop, {}, 0)
    shown(7, 28_672, NUMBERS)
    assert shown.rows(103.25, seen) == [
        ("last", "return 104.2, kl 0.0081, steps/s 9,750, episodes 30"),
        ("seconds", "rollout 0.18, learn 0.13, sync 0.03, moves 0.08"),
        ("now", "learn for 3.2 s"),
        ("resident", "actor full, rollout weights, env off"),
        ("queues", "observations 0/8, actions 1/8"),
        (
            "bottleneck",
            "rollout in rollout, 0.15 of 0.42 s; accelerators idle 61% of it",
        ),
    ]
    loop.doing = None
    assert ("now", "between iterations") in shown.rows(103.25, seen)


def test_a_value_of_an_earlier_iteration_says_of_which() -> None:
    shown = display()
    shown.watch(Doing(), {}, 0)
    for iteration, numbers in enumerate(
        (NUMBERS, WITHOUT_EPISODES, WITHOUT_EPISODES), 1
    ):
        shown(iteration, 64 * iteration, numbers)
    assert (
        "last",
        "return 104.2 (of iteration 1), kl 0.0081, steps/s 9,750, episodes 0",
    ) in shown.rows(0.0, {})
    shown(
        4,
        256,
        {name: value for name, value in NUMBERS.items() if name != "time/sync_s"},
    )
    assert ("seconds", "rollout 0.18, learn 0.13, moves 0.08") in shown.rows(0.0, {})
    shown(
        2, 128, WITHOUT_EPISODES
    )  # the run went back: nothing of what is done again is left
    assert ("last", "kl 0.0081, steps/s 9,750, episodes 0") in shown.rows(0.0, {})


def test_the_time_that_is_left_is_that_of_the_latest_iterations() -> None:
    shown, loop = display(), Doing(began_s=1000.0)
    shown.watch(loop, {}, 30)
    assert shown.left(1000.0) == ""
    for iteration, seconds in enumerate((60.0, 10.0, 9.0, 10.0), 31):
        shown(iteration, 64, NUMBERS | {"time/iteration_s": seconds})
    assert (
        shown.left(1004.0) == "56 s left"
    )  # six of ten seconds, four of which are over
    assert (
        shown.left(1100.0) == "50 s left"
    )  # one that takes longer than usual could end at once
    loop.began_s = None
    assert shown.left(1100.0) == "1 min 00 s left"
    goal = display(stop_at_return=100.0)
    goal(39, 64, NUMBERS)
    assert goal.left(0.0) == "0.4 s left at most"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
    ],
)
def test_spans_of_time(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    many = {
        f"scores of reward {number}": channel
        for number in range(5)
        for channel in channels().values()
    }
    shown = Display(
        RunnerConfig(total_iterations=100_000, stop_at_return=1.0),
        SCORED_CONSOLE,
        ACTIVE,
    )
    shown.watch(Doing(doing=("compute advantages", 0.0)), {}, 0)
    shown(
        1,
        64,
        NUMBERS
        | dict.fromkeys(
            (metric for _, metric, _, _ in SCORED_CONSOLE.columns), 12345.678
        ),
    )
    out = Screen()
    Terminal(file=out, width=width, force_terminal=True, soft_wrap=True).print(
        shown.block(1e4, view(many))
    )
    lines = [line.rstrip() for line in out.written.splitlines()]
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "scores of reward 4 1/8" in text or width == 40
    assert "left at most" in text or width == 40


# ── on a terminal ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setattr(live, "_REDRAW_S", 0.001)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    return Screen()


@contextlib.contextmanager
def on(screen: Screen) -> Iterator[None]:
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        yield


def wait_for(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not met():
        assert time.monotonic() < deadline, "it was not drawn"
        time.sleep(0.001)


def above_a_line(screen: Screen, last: str) -> list[str]:
    """Return the lines above the last one, without empty ones; [] if the last one does not begin with `last`.

    All are of one moment: another thread draws them again and again.
    """
    *above, lowest = screen.lines or [""]
    if not lowest.startswith(last):
        return []
    return [line for line in above if line]


def test_the_block_stays_below_the_lines_and_leaves_them_alone(screen: Screen) -> None:
    shown, signals = display(), Signals()
    started = ["  actor: 2 workers started, 1.5 s", "  actor: ready, 2.5 s"]
    says = signals.say
    with on(screen), shown.shown(signals):
        for line in started:
            print(line)
        # The lines of the start stay above the block, as in a pipe
        wait_for(lambda: above_a_line(screen, "starting   for ") == started)
        print("files: " + "long/" * 30)
        shown.watch(Doing(), channels(), 0)
        sink = ConsoleSink(sys.stdout)
        for iteration in (1, 2):
            sink(iteration, 64, NUMBERS)
            shown(iteration, 64, NUMBERS)
        wait_for(
            lambda: any(
                line.startswith("iteration  3 of 40 ━")
                for line in above_a_line(screen, "bottleneck rollout in rollout")
            )
        )
        assert screen.getvalue().count("\x1b[?25l") == 1  # no cursor
        signals.say("\nSIGINT: ends after this iteration\n")
        wait_for(lambda: "SIGINT: ends after this iteration" in screen.lines)
    assert signals.say is says
    screen.write("the summary\n")
    kept = [line for line in screen.lines if line]
    assert kept[:2] == started
    files, heading, first, second, *rest = kept[2:]
    assert files == "files: " + "long/" * 30
    assert [line.split()[0] for line in (heading, first, second)] == ["iter", "1", "2"]
    assert rest == ["SIGINT: ends after this iteration", "the summary"]
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


def test_the_block_is_not_noted_but_the_lines_above_it_are(
    screen: Screen, tmp_path: Path
) -> None:
    shown = display()
    with on(screen), Typed("train") as command:
        print("the plan")
        command.into(tmp_path, {})
        with shown.shown(Signals()):
            wait_for(lambda: screen.lines[-1].startswith("starting   for "))
            print("\x1b[1mfiles\x1b[0m")
            print("a warning", file=sys.stderr)
            wait_for(lambda: {"files", "a warning"} <= set(screen.lines))
        print("the summary")
    assert (tmp_path / SCREEN).read_text(
        encoding="utf-8"
    ) == "the plan\nfiles\na warning\nthe summary\n"


def test_an_error_leaves_a_clean_terminal_too(screen: Screen) -> None:
    def fail() -> None:
        wait_for(lambda: screen.lines[-1].startswith("starting   for "))
        raise KeyError("x")

    shown = display()
    with pytest.raises(KeyError), on(screen), shown.shown(Signals()):
        fail()
    assert not any(screen.lines)
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("terminal", ["dumb", None])
def test_without_a_terminal_there_are_lines(
    terminal: str | None, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    if terminal is None:
        monkeypatch.setattr(screen, "isatty", lambda: False)
        monkeypatch.setenv("FORCE_COLOR", "1")
    else:
        monkeypatch.setenv("TERM", terminal)
    with on(screen), display().shown(Signals()):
        print("  actor: ready, 2.5 s")
    assert screen.getvalue() == "  actor: ready, 2.5 s\n"
