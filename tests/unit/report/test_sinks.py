"""Sinks write whole iterations or none, and say so when the disk is full; event files hold what they should."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from rlplace.errors import ConfigError, OutputError
from rlplace.extras import install_command
from rlplace.report.sinks import (
    EVALUATED_CONSOLE,
    LINES_PER_HEADER,
    RUN_CONSOLE,
    SCORED_CONSOLE,
    TEXT_CONSOLE,
    Column,
    Console,
    ConsoleSink,
    JsonSink,
    WholeAppends,
    metric_files,
    open_sinks,
)

NUMBERS = {
    "env/mean_return": 471.25,
    "env/episode_length": 98.4,
    "actor/explained_variance": 0.525,
    "actor/approx_kl": 0.00812,
    "actor/clip_fraction": 0.094,
    "actor/entropy": 0.661,
    "actor/grad_norm": 8.776,
    "env/episodes": 17.0,
    "env/steps_per_s": 12345.6,
    "time/rollout_s": 1.234,
    "time/learn_s": 0.5,
    "time/sync_s": 0.01,
    "time/moves_s": 0.002,
    "time/overhead_share": 0.123,
}
# Numbers about learning that have room in 80 columns; with one column more, the last of them does not.
LEARNING = {
    RUN_CONSOLE: [
        "return",
        "length",
        "explained",
        "kl",
        "clipped",
        "entropy",
        "grad norm",
    ],
    TEXT_CONSOLE: [
        "reward",
        "held out",
        "tokens",
        "truncated",
        "mismatch",
        "entropy",
        "grad norm",
    ],
}


def test_the_console_shows_one_aligned_line_per_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = io.StringIO()
    sink = ConsoleSink(out)
    sink(1, 4096, NUMBERS)
    sink(1000, 4_096_000, NUMBERS | {"env/mean_return": -1234.5})
    assert out.getvalue().splitlines() == [
        " iter   env steps    return  length explained      kl clipped entropy grad norm",
        "    1       4,096     471.2      98      0.53  0.0081      9%    0.66      8.78",
        "1,000   4,096,000  -1,234.5      98      0.53  0.0081      9%    0.66      8.78",
    ]


def test_the_console_marks_what_is_not_known_and_repeats_its_heading_in_bold_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for out in (terminal, file):
        sink = ConsoleSink(out)
        for i in range(LINES_PER_HEADER + 1):
            sink(i, 64, {"env/mean_return": float("nan")})
    lines = file.getvalue().splitlines()
    assert lines[1].split() == ["0", "64", "nan", *["-"] * 10]
    headings = (0, LINES_PER_HEADER + 1)
    assert [
        f"\x1b[1m{line}\x1b[0m" if i in headings else line
        for i, line in enumerate(lines)
    ] == (terminal.getvalue().splitlines())


@pytest.mark.parametrize(
    "console",
    [RUN_CONSOLE, EVALUATED_CONSOLE, TEXT_CONSOLE, SCORED_CONSOLE],
    ids=["run", "evaluated", "text", "scored"],
)
@pytest.mark.parametrize("width", [40, 80, 120, 160])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_line_is_wider_than_the_terminal_nor_in_a_pipe(
    terminal: bool, width: int, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(width))
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    ConsoleSink(out, console)(
        1, 4096, dict.fromkeys((metric for _, metric, _, _ in console.columns), 1.0)
    )
    heading, line = out.getvalue().splitlines()
    assert len(heading) == len(line) <= width
    shown = [column.head for column in console.columns if column.head in heading]
    assert (len(shown) == len(console.columns)) == (width == 160)
    assert shown[0] in ("reward", "return")
    # Seconds have room only where all numbers about learning have it.
    learning = LEARNING[TEXT_CONSOLE]
    if "return" in shown:
        learning = LEARNING[RUN_CONSOLE]
    if "kl ref" in heads(console) or "evaluated" in heads(console):
        learning = learning[:-1]
    assert (set(learning) <= set(shown)) == (width >= 80)
    if width <= 80:
        assert not {"rollout s", "learn s", "overhead"} & set(shown)


def heads(console: Console) -> list[str]:
    return [column.head for column in console.columns]


def test_small_returns_have_more_decimals_than_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    sink = ConsoleSink(out)
    for iteration, value in enumerate((0.9421, -9.75, 10.0, 5836.25), 1):
        sink(iteration, 64, {"env/mean_return": value})
    shown = [line.split()[2] for line in out.getvalue().splitlines()[1:]]
    assert shown == ["0.942", "-9.750", "10.0", "5,836.2"]


def test_a_terminal_that_changes_its_width_gets_a_new_heading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    sink = ConsoleSink(terminal)
    for width in ("120", "120", "80", "80"):
        monkeypatch.setenv("COLUMNS", width)
        sink(1, 64, NUMBERS)
    assert ["iter" in line for line in terminal.getvalue().splitlines()] == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]


def test_files_are_whole_after_every_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    with open_sinks(["tensorboard", "jsonl", "console"], folder) as sinks:
        (events,) = (folder / "tensorboard").iterdir()
        assert events.name.startswith("events.out.tfevents.")
        for metrics in (
            {"env/return": 2.5, "env/episodes": 1.0},
            {"env/episodes": float("nan"), "env/return": float("-inf")},
        ):
            before = events.stat().st_size
            for sink in sinks:
                sink(1, 64, metrics)
            assert events.read_bytes()[before:].count(b"env/return") == 1
    assert (folder / "metrics.jsonl").read_text() == (
        '{"iteration": 1, "env_steps": 64, "env/episodes": 1.0, "env/return": 2.5}\n'
        '{"iteration": 1, "env_steps": 64, "env/episodes": null, "env/return": null}\n'
    )
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_samples_have_a_file_of_their_own_that_is_cut_with_the_metrics(
    tmp_path: Path,
) -> None:
    sizes: dict[str, int] | None = None
    for iterations, answer in (
        ((1, 2), "first"),
        ((3,), "dropped"),
        ((3,), "again, ä"),
    ):
        with open_sinks(["jsonl"], tmp_path, sizes=sizes) as (sink,):
            assert isinstance(sink, JsonSink)
            for i in iterations:
                sink.samples(i, [{"answer": answer}])
                sink(i, 0, {})
        sizes = metric_files(tmp_path) if sizes is None else sizes
    lines = [
        json.loads(line)
        for line in (tmp_path / "samples.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    assert [(line["iteration"], line["answer"]) for line in lines] == [
        (1, "first"),
        (2, "first"),
        (3, "again, ä"),
    ]


def test_a_device_that_is_full_is_named_so() -> None:
    with (
        contextlib.closing(WholeAppends(Path("/dev/full"))) as file,
        pytest.raises(OutputError) as caught,
    ):
        file.append(b"x")
    assert caught.value.code == "disk-full"


@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_is_removed_takes_no_more_lines_that_nobody_would_find(
    tmp_path: Path, again: bool
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with contextlib.closing(WholeAppends(path)) as file:
        file.append(b"1\n")
        path.unlink()
        path.parent.rmdir()
        if again:
            path.parent.mkdir()
            path.touch()
        with pytest.raises(
            OutputError, match="removed or moved while the run wrote to it"
        ) as caught:
            file.append(b"2\n")
    assert (caught.value.code, caught.value.problem.got) == ("cannot-write", str(path))


def test_a_sink_that_cannot_be_made_closes_those_before_it(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("not a folder")
    before = os.listdir("/proc/self/fd")
    with (
        pytest.raises(OutputError, match="cannot-write"),
        open_sinks(["jsonl", "tensorboard"], tmp_path),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_scalars_read_back_with_every_checksum(tmp_path: Path) -> None:
    scalars = {
        "env/return": 475.25,
        "größe": -1.0,
        "n": math.nan,
        "big": 1e300,
        "low": -1e300,
    }
    steps = [0, 1, 127, 128, 16384, 2**40]
    with open_sinks(["tensorboard"], tmp_path) as (sink,):
        sink(1, 300, scalars)
        for step in steps:
            sink(2, step, {})
    (file,) = (tmp_path / "tensorboard").iterdir()
    first, second, *more = LegacyEventFileLoader(str(file)).Load()
    assert first.file_version == "brain.Event:2"
    assert abs(first.wall_time - time.time()) < 60
    assert (second.step, second.wall_time >= first.wall_time) == (300, True)
    values = {value.tag: value.simple_value for value in second.summary.value}
    assert math.isnan(values.pop("n"))
    assert values == {
        "env/return": 475.25,
        "größe": -1.0,
        "big": math.inf,
        "low": -math.inf,
    }
    assert [(event.step, len(event.summary.value)) for event in more] == [
        (step, 0) for step in steps
    ]


def test_a_missing_library_is_named_with_the_extra_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [
        name for name in sys.modules if name.partition(".")[0] == "tensorboard"
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [NoTensorboard(), *sys.meta_path])
    with (
        pytest.raises(ConfigError, match="missing-library") as caught,
        open_sinks(["tensorboard"], tmp_path),
    ):
        pass
    assert caught.value.problems[0].fix == install_command("run")


class NoTensorboard:
    """Finds nothing where TensorBoard is."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.partition(".")[0] == "tensorboard":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_event_files_are_written_without_torch() -> None:
    code = "import sys; from rlplace.report import sinks; sinks.tensorboard_record(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_job_whose_steps_are_its_iterations_counts_them_once(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console("", (Column("return", "env/return", ".1f", 10),))
    ConsoleSink(out, console)(7, 7, {"env/return": 2.5})
    assert out.getvalue().splitlines() == [" iter    return", "    7       2.5"]
    with open_sinks(["jsonl"], tmp_path, console) as (sink,):
        sink(7, 7, {"env/return": 2.5})
    line = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert json.loads(line) == {"iteration": 7, "env/return": 2.5}
