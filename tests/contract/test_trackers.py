"""What trackers are given, and what a run makes of one that fails: stand-ins, and libraries that are installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlplace.errors import ConfigError
from rlplace.report import trackers
from rlplace.report.sinks import RUN_CONSOLE, Console, open_sinks
from rlplace.report.trackers import TRACKERS, check_sinks, find_sink, pages
from rlplace.signals import Stopped
from tests import fake_trackers

CONFIG = {"runner": {"seed": 0}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that has begun, and a tracker that stays on this machine."""
    for name in ("WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.setenv(name, "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "runs" / "cartpole" / "2026-11-23_10-00-00"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("runner: {seed: 0}\n")
    (folder / "plan.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    return folder


@pytest.fixture(
    params=[
        *(pytest.param((name, False), id=f"{name}, a stand-in") for name in TRACKERS),
        *(
            pytest.param((name, True), id=name, marks=pytest.mark.slow)
            for name in TRACKERS
        ),
    ]
)
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, real = request.param
    if not real:
        fake_trackers.install(name, monkeypatch)
    elif importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return str(name)


def follow(
    name: str,
    folder: Path,
    iterations: Iterator[int] | range,
    console: Console = RUN_CONSOLE,
) -> dict[str, Any]:
    """Send iterations as a run does, and leave a report; return what is known of the tracker's run."""
    with open_sinks([name], folder, console, config=CONFIG) as (sink,):
        samples: Any = sink
        for i in iterations:
            samples.samples(
                i,
                [{"reward": float(i), "answer": "4"}, {"reward": 0.5, "answer": "<b>"}],
            )
            sink(i, i * 64, {"env/return": float(i), "actor/loss": math.nan})
        (folder / "report.html").write_text("<html></html>")
    return dict(json.loads((folder / "trackers" / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", TRACKERS)
def test_a_job_whose_steps_are_its_iterations_sends_no_env_steps(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trackers.install(name, monkeypatch)
    follow(name, folder, range(1, 3), Console("", ()))
    points = [(i, {"env/return": float(i)}) for i in (1, 2)]
    assert points == fake_trackers.POINTS


def test_a_run_and_its_resumption_are_one_curve(
    tracker: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler, hook = signal.getsignal(signal.SIGINT), sys.excepthook
    first = follow(tracker, folder, range(1, 4))
    again = follow(tracker, folder, range(3, 6))  # the third is done again
    assert (first["iteration"], again["iteration"]) == (3, 5)
    assert first["id"] == again["id"]
    assert pages(folder) == [again["page"]]
    assert capsys.readouterr() == ("", "")
    assert (signal.getsignal(signal.SIGINT), sys.excepthook) == (handler, hook)
    if getattr(sys.modules[tracker], "__file__", None) is None:  # what a stand-in got
        points = [
            (i, {"env_steps": i * 64.0, "env/return": float(i)}) for i in range(1, 6)
        ]
        files = [
            "config.yaml",
            "plan.svg",
            "report.html",
            "config.yaml",
            "plan.svg",
            "report.html",
        ]
        assert points == fake_trackers.POINTS
        tables = [
            (i, {"samples": (["reward", "answer"], [[float(i), "4"], [0.5, "<b>"]])})
            for i in range(1, 6)
        ]
        assert tables == fake_trackers.TABLES
        assert files == fake_trackers.FILES
        assert [again["id"], f"-{again['id']}"] * 2 == fake_trackers.RUNS
    elif tracker == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{folder.parent.parent}/mlflow.db")
        history = client.get_metric_history(again["id"], "env/return")
        assert [(point.step, point.value) for point in history] == [
            (i, float(i)) for i in range(1, 6)
        ]
        assert [a.path for a in client.list_artifacts(again["id"])] == [
            *("config.yaml", "plan.svg", "report.html", "samples"),
        ]
    elif tracker == "trackio":
        import trackio

        (run,) = trackio.Api().runs(trackers.PROJECT)
        assert run.name == again["id"]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_down_is_said_once_and_taken_up_again(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_trackers.install(name, monkeypatch)
    monkeypatch.setattr(trackers, "PAUSE_S", 0.0)
    with open_sinks([name], folder, config=CONFIG) as (sink,):
        fake_trackers.DOWN.append(True)
        sink(1, 64, {"env/return": 1.0})
        sink(2, 128, {"env/return": 2.0})
        fake_trackers.DOWN.clear()
        sink(3, 192, {"env/return": 3.0})
    assert [step for step, _ in fake_trackers.POINTS] == [3]
    said = capsys.readouterr().err
    assert said.count("[sink-failed]") == 1
    assert "ConnectionError: the tracker is down" in said


def test_a_run_that_waits_for_a_tracker_says_so_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_trackers.install("wandb", monkeypatch)
    monkeypatch.setattr(trackers, "SLOW_S", 0.05)
    said = ""

    def log(iteration: int, steps: int, metrics: Mapping[str, float]) -> None:
        nonlocal said
        # Its server does not answer until the run has said that it waits.
        while "[sink-slow]" not in said:
            said += capsys.readouterr().err

    with open_sinks(["wandb"], folder) as (sink,):
        sink._tracker = sink._tracker._replace(log=log)
        for iteration in (1, 2):
            sink(iteration, 64, {"env/return": 1.0})
    said += capsys.readouterr().err
    assert said.count("[sink-slow]") == 1
    assert "warning: runner.sinks: a call of this sink has not returned for 0 s" in said
    assert "wandb" in said
    assert "[sink-failed]" not in said


def test_a_tracker_that_cannot_be_opened_is_opened_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_trackers.install("wandb", monkeypatch)
    fake_trackers.DOWN.append(True)
    with open_sinks(["wandb"], folder) as (sink,):
        fake_trackers.DOWN.clear()
        sink(1, 64, {"env/return": 1.0})  # left alone for a while
        monkeypatch.setattr(trackers.time, "monotonic", lambda: float("inf"))
        sink(2, 128, {"env/return": 2.0})
    assert [step for step, _ in fake_trackers.POINTS] == [2]
    assert capsys.readouterr().err.count("[sink-failed]") == 1


class Noted:
    """A sink as a user writes it."""

    seen: ClassVar[list[object]] = []

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.seen.append((folder.name, config["runner"]["seed"]))

    def __call__(
        self, iteration: int, env_steps: int, metrics: Mapping[str, float]
    ) -> None:
        if iteration == 2:
            raise KeyError("no such table")
        self.seen.append((iteration, env_steps, metrics["env/return"]))

    def close(self) -> None:
        self.seen.append("closed")


def test_a_sink_of_the_users_gets_the_run_and_its_errors_are_told_as_theirs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Noted.seen.clear()
    name = f"{__name__}:Noted"
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Noted.__module__])
    with open_sinks([name], folder, config=CONFIG) as (sink,):
        for i in (1, 2, 3):
            sink(i, i * 64, {"env/return": float(i)})
    assert Noted.seen == [(folder.name, 0), (1, 64, 1.0), (3, 192, 3.0), "closed"]
    said = capsys.readouterr().err
    assert "KeyError: 'no such table'" in said
    assert f"mend {__file__}:" in said
    assert "metrics.jsonl" not in said  # there is none


def test_a_sink_of_the_users_gets_iterations_that_are_done_again(folder: Path) -> None:
    Noted.seen.clear()
    for iterations in (range(3, 5), range(4, 6)):
        with open_sinks([f"{__name__}:Noted"], folder, config=CONFIG) as (sink,):
            for i in iterations:
                sink(i, i * 64, {"env/return": 0.0})
    assert [
        seen[0] for seen in Noted.seen if isinstance(seen, tuple) and len(seen) == 3
    ] == [3, 4, 4, 5]


STATES: dict[str, list[object]] = {
    "wandb": [0, 1, 1],
    "mlflow": ["FINISHED", "KILLED", "FAILED"],
    "swanlab": ["success", "aborted", "crashed"],
    "trackio": [None, None, None],
}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_knows_how_a_run_has_ended(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trackers.install(name, monkeypatch)
    for error in (None, Stopped(signal.SIGTERM), ValueError()):
        with (
            contextlib.suppress(Stopped, ValueError),
            open_sinks([name], folder, config=CONFIG),
        ):
            if error is not None:
                raise error
    assert STATES[name] == fake_trackers.STATES


def test_the_users_line_is_named_where_a_library_that_it_calls_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_sink.py").write_text(
        "import json\n\n\ndef make(folder, config):\n    json.loads('{')\n"
    )
    monkeypatch.syspath_prepend(folder)
    with open_sinks(["my_sink:make", "jsonl"], folder):
        pass
    said = capsys.readouterr().err
    assert f"mend {folder}/my_sink.py:5" in said
    assert "(metrics.jsonl has every iteration)" in said


@pytest.mark.parametrize(
    "text", ["\nprint(1 / 0)\n", "\nimport no_such_module\n", "\ndef (\n"]
)
def test_a_module_that_fails_at_import_is_a_problem_with_its_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_sink.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = check_sinks(["broken_sink:Sink"])
    assert problem.code == "unknown-sink"
    assert problem.fix == f"mend {tmp_path}/broken_sink.py:2"


def test_a_folder_with_the_name_of_a_library_is_not_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert [problem.code for problem in check_sinks(["trackio"])] == ["missing-library"]


def test_what_is_not_there_is_reported_before_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problems = check_sinks(
        [
            "console",
            "jsonl",
            "wandb",
            "tensorboard",
            "rlplace.units:nothing",
            "no_such:Sink",
        ]
    )
    assert [p.code for p in problems] == [
        "missing-library",
        "missing-library",
        "unknown-sink",
        "unknown-sink",
    ]
    assert all(p.key == "runner.sinks" and p.fix for p in problems)
    with pytest.raises(ConfigError, match="no sink can be found there"):
        find_sink("rlplace.units:nothing")


def test_tensorboard_is_opened_by_a_command(tmp_path: Path) -> None:
    (tmp_path / "a run" / "tensorboard").mkdir(parents=True)
    assert pages(tmp_path / "a run") == [
        f"tensorboard --logdir '{tmp_path}/a run/tensorboard'"
    ]
